"""Values in the job's store that no rank wrote: a watcher bounds what it reads, and raises nothing.

Any process that reaches the store can write to it.
"""

from __future__ import annotations

import json
import threading
import tracemalloc
import zlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed import HashStore

from rankcall.analysis.node_snapshot import decode as decode_node
from rankcall.analysis.node_snapshot import encode, node_snapshot_of
from rankcall.analysis.snapshot import ALIVE, CALL, RankState, Snapshot, no_calls
from rankcall.analysis.verdicts.decoding import decode
from rankcall.analysis.verdicts.encoding import encode as encode_verdict
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.verdict import Origin, Verdict
from rankcall.c10d.client import perform
from rankcall.c10d.parts import publish_once
from rankcall.job import other_nodes
from rankcall.job.choice import KEY, Choice, agree
from rankcall.job.choice import decode as decode_choice
from rankcall.job.other_nodes import Exchange, Unreachable, Untrusted
from rankcall.job.posts import PART_BYTES, Posts
from rankcall.job.sealing import SECRET, ForgedError, job_secret, sealed
from rankcall.job.viewers import Questions
from rankcall.packed_json import pack, unpack
from rankcall.ring.tables import Group
from rankcall.rpc.backends.zmq.member_log import MemberLog
from rankcall.rpc.rank_claims import claiming

WORLD = 4
_MOST_BYTES = 120 << 20  # of Python's memory; what the tests write takes some 20 MiB of it


def bomb(text: bytes) -> bytes:
    """Return 128 MiB of a repeated text, compressed."""
    packer = zlib.compressobj(9)
    piece = text * ((1 << 20) // len(text))
    packed = b"".join(packer.compress(piece) for _ in range(128))
    return packed + packer.flush()


def snapshot_of(**document: object) -> bytes:
    """Return a node's snapshot with other values than it can have."""
    whole = json.loads(zlib.decompress(encode(node_snapshot_of(node(1)))))
    return zlib.compress(json.dumps(whole | document).encode())


def node(*ranks: int) -> Snapshot:
    """Return the snapshot of a node that has these ranks of the job."""
    states = [
        RankState(rank, "node", 1, state=ALIVE) if rank in ranks else RankState(rank, blind=True)
        for rank in range(WORLD)
    ]
    return Snapshot(states, no_calls())


def group(ranks: object) -> dict[str, object]:
    """Return a group of a snapshot."""
    return {"name": "0", "epoch": 0, "backend": "", "description": "", "ranks": ranks}


VALUES: dict[str, Callable[[], bytes]] = {
    "huge count": lambda: b"1000000000",
    "digits": lambda: b"9" * 4_000_000,
    "negative": lambda: b"-1",
    "superscript": lambda: "²".encode(),
    "no UTF-8": lambda: b"\xff\xfe\x00",
    "empty object": lambda: b"{}",
    "deep": lambda: b"[" * 1_000_000,
    "wrong types": lambda: json.dumps([[None, {}, 1.5], ["x", 1, -1]]).encode(),
    "infinite": lambda: b'[[1e999, "h", 1e999]]',
    "many members": lambda: b"[" + b'[0,"h",1],' * 400_000 + b'[0,"h",1]]',
    "header": lambda: json.dumps({"ranks": [0] * 100_000, "parts": 1 << 40}).encode(),
    "parts": lambda: json.dumps({"ranks": [1], "parts": 1000}).encode(),
    "zeros": lambda: bomb(b"\0"),
    "lists": lambda: bomb(b"[],"),
    "numbers": lambda: bomb(b"1,"),
    "verdict of lists": lambda: zlib.compress(b'{"findings":[' + b"[]," * 2_000_000 + b"[]]}"),
    "large world": lambda: snapshot_of(world=1 << 20),
    "large groups": lambda: snapshot_of(groups=[group([[0, 1 << 20, 1]])] * 2_000),
    "world of digits": lambda: snapshot_of(world=10**300),
    "ranks of digits": lambda: snapshot_of(ranks=[vars(RankState(10**4000))]),
    "a rank beyond the world": lambda: snapshot_of(ranks=[vars(RankState(WORLD))]),
    "a rank twice": lambda: snapshot_of(ranks=[vars(RankState(1))] * 2),
    "members twice": lambda: snapshot_of(groups=[group([[0, 4, 1], [0, 4, 1]])]),
    "digits of a rank": lambda: snapshot_of(groups=[group([[10**4000, 1 << 20, 1]])]),
}
KEYS = (
    *("bell", "latest", "nodes", "node/1", "1/posts", "1/post/1", "1/verdict", "view/asked"),
    *("view/answer/1", "p/posts", "p/1", "p/1/0", "p/second", "p/done"),
)


def judge(snapshot: Snapshot, before: bytes) -> bytes:
    """Judge that the job is healthy."""
    return encode_verdict(Verdict("run", [], origin=Origin("x")))


def use(store: Any, exchange: Exchange) -> list[bytes]:
    """Make every request that a watcher makes; return the verdicts that it accepts."""
    verdicts = []
    for ask in (
        lambda: exchange.asked([(0, "node-0", 1)]),
        lambda: verdicts.append(exchange.agree(node(0), WORLD, judge).verdict),
        lambda: exchange.perform(2.0, Questions("").ask({0}, WORLD)),
        lambda: exchange.perform(2.0, Questions("").question()),
        lambda: exchange.perform(2.0, collect()),
    ):
        try:
            ask()
        except Unreachable:
            exchange._lost_until = 0.0
    return verdicts


def collect() -> Any:
    """Collect the bundles of other nodes."""
    return Posts("p", WORLD, 0.0).exchange([0], b"mine", "me")


@pytest.mark.parametrize("value", VALUES, ids=lambda name: name.replace(" ", "-"))
def test_forged_values(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is at any key that a watcher reads, its memory stays bounded, and it goes on.

    No verdict comes of it that was not judged: those that are accepted have no finding.
    """
    monkeypatch.setattr(other_nodes, "_JUDGE_S", 0.0)  # no other node judges
    raw = VALUES[value]()
    for key in KEYS:
        store = HashStore()
        store.set_timeout(timedelta(seconds=2))
        for name in ("1/posts", "p/posts", "nodes"):
            store.set(name, "1")
        if key == "p/1/0":
            store.set("p/1", json.dumps({"ranks": [1], "parts": 1}))
        store.set(key, raw)
        exchange = Exchange(lambda store=store: store, settle_s=0.0, retry_s=0.0)
        tracemalloc.start()
        verdicts = use(store, exchange)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < _MOST_BYTES, key
        for verdict in verdicts:
            try:
                assert decode(verdict).findings == []
            except ValueError:
                assert key == "1/verdict"


@pytest.mark.parametrize("parts", [8, 400])
def test_parts_that_are_larger_than_any(parts: int) -> None:
    """A bundle whose parts are larger than a rank posts is not kept in memory."""
    store = HashStore()
    store.set("p/posts", "1")
    store.set("p/1", json.dumps({"ranks": [1], "parts": parts}))
    for number in range(parts):
        store.set(f"p/1/{number}", b"x" * (8 * PART_BYTES))
    tracemalloc.start()
    assert perform(store, 5.0, Posts("p", 2, 0.0).collect([0], 0.0)) == []
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


def test_a_store_whose_counters_were_raised_is_named() -> None:
    """The node judges alone then, and says which value cannot be a rank's."""
    store = HashStore()
    store.set("1/posts", str(10**9))
    with pytest.raises(Untrusted, match="1/posts is not a number up to 80"):
        Exchange(lambda: store, settle_s=0.1).agree(node(0), WORLD, judge)


@pytest.mark.parametrize("document", ["a rank beyond the world", "a rank twice", "members twice"])
def test_impossible_ranks_are_refused(document: str) -> None:
    """A node's snapshot with ranks that the job cannot have is left out as a whole."""
    with pytest.raises(ValueError, match="a rank"):
        decode_node(VALUES[document](), WORLD)


def test_what_a_job_can_state_is_read() -> None:
    """A node of 8 ranks that have enqueued as many calls as fit into a ring is not refused."""
    ranks, world, calls = 8, 16, np.zeros(8 * 16_384, CALL)
    calls["rank"] = np.arange(len(calls)) % ranks
    states = [
        RankState(rank, "n", 1, state=ALIVE, stack="a, b: c\n" * 200) for rank in range(ranks)
    ]
    snapshot = Snapshot(states, calls, [Group("0", 0, "gloo", "", tuple(range(world)))])
    assert len(decode_node(encode(node_snapshot_of(snapshot)), world).calls) == len(calls)
    text = b'{"findings":[' + b'"' + b"x" * (20 << 20) + b'"]}'
    assert unpack(pack(text), 1024) == text
    with pytest.raises(ValueError, match="more than"):
        unpack(pack(text), 4)


FORGED = Verdict("run", [Finding("missing", (1,), stops=True)], origin=Origin("x", "b", 1, 1, 1))
OURS, THEIRS = b"the secret of this job", b"a secret of another job"


def seal(key: str, value: bytes, secret: bytes) -> bytes:
    """Return a value as a rank with this secret publishes it."""
    store = HashStore()
    perform(store, 5.0, sealed(publish_once(key, value), lambda: secret))
    return bytes(store.get(key))


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this process the job's secret."""
    monkeypatch.setenv(SECRET, OURS.decode())


@pytest.mark.usefixtures("secret")
@pytest.mark.parametrize("how", ["plain", "theirs", "another round's", "cut", "changed"])
def test_with_a_secret_a_forged_verdict_is_refused(how: str) -> None:
    """A value without the HMAC of the job's secret, or of another key, is no verdict."""
    packed = pack(encode_verdict(FORGED))
    ours = seal("1/verdict", packed, OURS)
    assert OURS not in ours
    forged = {
        "plain": packed,
        "theirs": seal("1/verdict", packed, THEIRS),
        "another round's": seal("2/verdict", packed, OURS),
        "cut": ours[:20],
        "changed": ours[:-1] + bytes([ours[-1] ^ 1]),
    }[how]
    store = HashStore()
    store.set("1/verdict", forged)
    exchange = Exchange(lambda: store, settle_s=0.1)
    with pytest.raises(Untrusted, match=r"1/verdict is sealed by .* than this node"):
        exchange.agree(node(0), WORLD, judge)
    store.delete_key("latest")
    store.delete_key("1/posts")
    store.set("1/verdict", ours)
    assert decode(exchange.agree(node(0), WORLD, judge).verdict).findings == FORGED.findings


@pytest.mark.usefixtures("secret")
def test_with_a_secret_nodes_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes with one secret agree as without; a node without it says so, and judges alone."""
    store = HashStore()
    nodes = [Exchange(lambda: store, settle_s=60.0) for _ in range(2)]
    heard: list[list[int]] = []

    def judge_heard(snapshot: Snapshot, before: bytes) -> bytes:
        heard.append([state.rank for state in snapshot.ranks if not state.blind])
        return judge(snapshot, before)

    agreed: list[Any] = []
    other = threading.Thread(
        target=lambda: agreed.append(nodes[1].agree(node(2, 3), WORLD, judge_heard))
    )
    other.start()
    agreed.append(nodes[0].agree(node(0, 1), WORLD, judge_heard))
    other.join(60)
    assert heard == [[0, 1, 2, 3]]
    assert sorted(answer.by_me for answer in agreed) == [False, True]
    store.delete_key("latest")
    monkeypatch.delenv(SECRET)
    with pytest.raises(
        Untrusted, match=f"sealed by a secret, and this node has none .*{SECRET}_FILE"
    ):
        nodes[0].agree(node(0, 1), WORLD, judge_heard)


@pytest.mark.usefixtures("secret")
def test_bundles_and_answers_are_sealed() -> None:
    """The evidence of other nodes and the answers for pages come from ranks of the job, too."""
    store = HashStore()
    perform(store, 5.0, sealed(Posts("p", 2).post([1], b"x" * 300_000)))
    (bundle,) = perform(store, 5.0, sealed(Posts("p", 2).fresh(set())))
    assert bundle == b"x" * 300_000
    store.set("p/1/0", b"y" * PART_BYTES)
    with pytest.raises(ForgedError, match="p/1/0"):
        perform(store, 5.0, sealed(Posts("p", 2).fresh(set())))
    store.set("view/answer/1", b"1\nforged")
    store.set("nodes", "1")
    store.set("node/1", seal("node/1", b'[[1, "b", 7]]', OURS))
    with pytest.raises(Untrusted, match="view/answer/1"):
        Exchange(lambda: store).perform(5.0, Questions("").ask([0], 2))


@pytest.mark.usefixtures("secret")
def test_the_choice_of_a_run_is_sealed(tmp_path: Path) -> None:
    """Another process cannot name the directory that ranks write to."""
    store = HashStore()
    store.set(KEY, Choice(tmp_path).encode())
    with pytest.raises(ForgedError, match=KEY):
        perform(store, 5.0, sealed(agree(KEY, lambda: Choice(tmp_path / "ours"))))


def test_a_secret_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A node whose secret can be guessed or read trusts nothing in the store, and says why."""
    store = HashStore()
    file = tmp_path / "secret"
    file.write_bytes(OURS)
    file.chmod(0o644)
    for variable, value, why in (
        (SECRET, "short", "has 5 bytes; it must have at least 16"),
        (f"{SECRET}_FILE", str(file), "others may read the secret .* chmod 600"),
        (f"{SECRET}_FILE", str(tmp_path / "none"), "cannot be read"),
    ):
        monkeypatch.setenv(variable, value)
        with pytest.raises(Unreachable, match=why):
            Exchange(lambda: store).asked()
        monkeypatch.delenv(variable)
    file.chmod(0o600)
    monkeypatch.setenv(f"{SECRET}_FILE", str(file))
    assert job_secret() == OURS


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("epoch", "9" * 5000, "'epoch' in the job's store is not a number"),
        (
            "epoch-0/size",
            "999999999999",
            "size' in the job's store is not a number up to 1,048,576",
        ),
        (
            "epoch-0/rank/0",
            "[" * 100_000,
            "rank/0' in the job's store is not the claim of a worker",
        ),
        ("epoch-0/rank/0", '{"name": 1, "pid": 2}', "is not the claim of a worker"),
        ("members/newest", "-1", "'members/newest' in the job's store is not a number"),
        ("members/0", "[1]\n", "has a line of another program"),
        ("members/0", '{"in": {"node": 1}}\n', "has a line of another program"),
        ("members/0", '{"in": 1}\n', "has a line of another program"),
    ],
)
def test_what_rpc_workers_read(key: str, value: str, message: str) -> None:
    """``init_rpc`` says which value is no worker's. It searched a world of 10**12 for a rank."""
    store = HashStore()
    store.set(key, value)
    steps = MemberLog(store).reading() if key.startswith("members") else claiming("w", -1, -1)
    if key.startswith("epoch-0/rank"):
        steps = claiming("w", 0, 2)
    with pytest.raises(RuntimeError, match=message):
        perform(store, 5.0, steps)


def test_a_choice_with_an_infinite_attempt() -> None:
    """It is not a choice; the error was an OverflowError."""
    with pytest.raises(ValueError, match="not the choice of a run"):
        decode_choice(b'{"run_dir": "/tmp/x", "attempt": 1e999}')
