"""Nodes that agree through a store: one judge, one verdict, and an error if the store is gone."""

from __future__ import annotations

import threading
import time
import zlib
from collections import Counter
from datetime import timedelta
from typing import Any, cast

import pytest
from torch.distributed import Store

from rankcall.analysis.snapshot import ALIVE, RankState, Snapshot, no_calls
from rankcall.c10d import parts
from rankcall.job import other_nodes
from rankcall.job.other_nodes import Agreed, Exchange, Unreachable
from rankcall.testing.simulated_store import (
    Mark,
    Process,
    Read,
    Set,
    Simulation,
    Steps,
    Violation,
    World,
)

WORLD = 4


def node(*ranks: int, world: int = WORLD) -> Snapshot:
    """Return the snapshot of a node that has these ranks of the job."""
    states = [
        RankState(rank, "node", 1, state=ALIVE) if rank in ranks else RankState(rank, blind=True)
        for rank in range(world)
    ]
    return Snapshot(states, no_calls())


def names(snapshot: Snapshot, before: bytes = b"") -> bytes:
    """Judge by naming the ranks that are known."""
    return repr([state.rank for state in snapshot.ranks if not state.blind]).encode()


def together(exchanges: list[Exchange], parts: list[Snapshot]) -> list[Agreed]:
    """Let all nodes agree at the same time."""
    agreed: dict[int, Agreed] = {}

    def agree(which: int) -> None:
        agreed[which] = exchanges[which].agree(parts[which], len(parts[which].ranks), names)

    threads = [threading.Thread(target=agree, args=(which,)) for which in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [agreed[which] for which in range(len(parts))]


def store() -> Any:
    """Return a store of this process."""
    from torch.distributed import HashStore

    made = HashStore()
    made.set_timeout(timedelta(seconds=2))
    return made


def test_two_nodes_agree() -> None:
    """One node judges the merged snapshots, both get its verdict, and the rounds are numbered."""
    shared = store()
    nodes = [Exchange(lambda: shared) for _ in range(2)]
    assert not nodes[0].asked()
    for number in (1, 2, 3):
        agreed = together(nodes, [node(0, 1), node(2, 3)])
        assert [answer.verdict for answer in agreed] == [b"[0, 1, 2, 3]"] * 2
        assert sorted(answer.by_me for answer in agreed) == [False, True]
        assert shared.get("latest") == str(number).encode()


def simulated(
    nodes: int, rounds: int, settle_s: int, read: Counter[str] | None = None, **faults: int
) -> Any:
    """Return a simulation of nodes of one rank each, which agree in several rounds."""

    def process(rank: int) -> Process:
        def start() -> Steps[None]:
            exchange = Exchange(lambda: None, settle_s=settle_s)
            for number in range(rounds):
                steps = exchange.steps(
                    node(rank, world=nodes), nodes, lambda *_, n=number: b"%d by %d" % (n, rank)
                )
                agreed = yield from (steps if read is None else counting(steps, read))
                yield Mark("agreed", agreed)

        return Process(f"node-{rank}", start, clock_offset=100 * rank)

    return Simulation(list(map(process, range(nodes))), on_mark=check_verdict, **faults)


def counting(steps: Steps[Agreed], read: Counter[str]) -> Steps[Agreed]:
    """Count the reads of each key."""
    answer = None
    while True:
        try:
            request = steps.send(answer)
        except StopIteration as end:
            return cast("Agreed", end.value)
        if isinstance(request, Read):
            read[request.key] += 1
        answer = yield request


def check_verdict(world: World, name: str, mark: Mark, earlier: tuple[Mark, ...]) -> None:
    """Check that a node has the verdict of the last round that is over."""
    latest = int(world.store["latest"])
    if mark.value.by_me and latest > 2:
        return  # it has removed a round since, and others may have gone on meanwhile
    published = zlib.decompress(world.store[f"{latest}/verdict"])
    assert mark.value.verdict == published, f"{name} has another verdict than round {latest}"


@pytest.fixture
def whole_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll and take turns in steps of the simulation's clock."""
    for name in ("_POLL_S", "_JUDGE_S"):
        monkeypatch.setattr(other_nodes, name, 1)
    for name in ("_POLL_RANK_S", "_JUDGE_RANK_S"):
        monkeypatch.setattr(other_nodes, name, 0)


@pytest.mark.usefixtures("whole_seconds")
@pytest.mark.parametrize("deaths", [pytest.param(0, marks=pytest.mark.slow), 1])  # 1: or none
def test_every_order_of_two_nodes(deaths: int) -> None:
    """In every order of requests, two nodes agree on one verdict, also if one dies."""
    assert simulated(2, 1, 1, ticks=3, deaths=deaths).explore().ends


@pytest.mark.usefixtures("whole_seconds")
def test_random_orders_of_three_nodes() -> None:
    """A node that is rounds behind the others has no verdict of its own, also if one dies."""
    simulated(3, 4, 1, ticks=60, deaths=1).search(400, seed=3)


@pytest.mark.usefixtures("whole_seconds")
def test_a_verdict_that_is_overwritten_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a judge overwrites the verdict of another, the simulation finds it."""

    def overwrite(key: str, value: bytes) -> Steps[bytes]:
        yield Set(key, value)
        return value

    monkeypatch.setattr(parts, "publish_once", overwrite)
    with pytest.raises(Violation, match="has another verdict"):
        simulated(2, 1, 1, ticks=4).explore()


@pytest.mark.usefixtures("whole_seconds")
def test_the_work_does_not_grow_with_the_square() -> None:
    """Each node's summary is read once, by the judge, and not by every other node."""
    nodes = 16
    read: Counter[str] = Counter()
    simulated(nodes, 1, 1000, read, ticks=1000).search(1)
    posts = [f"1/post/{number}" for number in range(1, nodes + 1)]
    assert [read[key] for key in posts] == [0] + [1] * (nodes - 1)


def test_many_nodes_agree() -> None:
    """All nodes get one verdict, which knows all of them, and one node has made it."""
    shared, world = store(), 48
    nodes = [Exchange(lambda: shared) for _ in range(world)]
    agreed = together(nodes, [node(rank, world=world) for rank in range(world)])
    assert {answer.verdict for answer in agreed} == {repr(list(range(world))).encode()}
    assert sum(answer.by_me for answer in agreed) == 1


def test_a_judge_knows_the_round_before() -> None:
    """The judge gets the verdict of the round before, so that it can put one off only once."""
    shared = store()
    seen = []

    def judge(snapshot: Snapshot, before: bytes) -> bytes:
        seen.append(before)
        return b"not yet" if before != b"not yet" else names(snapshot)

    verdicts = [
        Exchange(lambda: shared).agree(node(0, 1, 2, 3), WORLD, judge).verdict for _ in range(3)
    ]
    assert verdicts == [b"not yet", b"[0, 1, 2, 3]", b"not yet"]
    assert seen == [b"", b"not yet", b"[0, 1, 2, 3]"]


def test_keys_do_not_pile_up() -> None:
    """After any number of rounds, only the keys of the last few are left."""
    shared = store()
    alone = Exchange(lambda: shared)
    for _ in range(5):
        alone.agree(node(0, 1, 2, 3), WORLD, names)
    assert shared.num_keys() <= 1 + 2 * 4


def test_a_node_that_says_nothing() -> None:
    """A node that posts nothing is waited for briefly; then the others judge without it."""
    shared = store()
    began = time.monotonic()
    agreed = Exchange(lambda: shared, settle_s=0.2).agree(node(0, 1), WORLD, names)
    assert agreed == (b"[0, 1]", True)
    assert time.monotonic() - began >= 0.2


def test_a_node_that_says_nothing_is_named() -> None:
    """A silent node is named by what it last registered; each node has one key."""
    shared = store()
    other, me = Exchange(lambda: shared), Exchange(lambda: shared, settle_s=0.1)
    other.asked([(2, "node-b", 71)])
    for _ in range(3):
        other.asked([(2, "node-b", 72), (3, "node-b", 73)])
        me.asked([(0, "node-a", 70), (1, "node-a", 71)])
    assert int(shared.get("nodes")) == 3
    seen = []

    def judge(snapshot: Snapshot, before: bytes) -> bytes:
        seen.extend(snapshot.ranks)
        return b""

    me.agree(node(0, 1), WORLD, judge)
    assert [(state.blind, state.unheard) for state in seen] == [(False, False)] * 2 + [
        (True, True)
    ] * 2
    assert [(state.host, state.pid) for state in seen[2:]] == [("node-b", 72), ("node-b", 73)]


def test_a_node_is_asked() -> None:
    """A node sees a round that another node opened, until the round has its verdict."""
    shared = store()
    opened = threading.Thread(
        target=Exchange(lambda: shared, settle_s=60).agree, args=(node(0, 1), WORLD, names)
    )
    opened.start()
    other = Exchange(lambda: shared)
    deadline = time.monotonic() + 30
    while not other.asked():
        assert time.monotonic() < deadline
    other.agree(node(2, 3), WORLD, names)
    opened.join(30)
    assert not other.asked()


def test_a_judge_that_dies() -> None:
    """If the first node to post dies, the next one judges."""
    shared = store()
    shared.add("1/open", 1)
    shared.add("1/posts", 1)  # a node took its number and died
    agreed = Exchange(lambda: shared, settle_s=0.1).agree(node(2, 3), WORLD, names)
    assert agreed == (b"[2, 3]", True)


def test_a_post_that_is_no_summary() -> None:
    """A post that is not a snapshot is left out."""
    shared = store()
    shared.add("1/posts", 1)
    shared.set("1/post/1", b"\x80\x04nonsense")
    agreed = Exchange(lambda: shared, settle_s=0.1).agree(node(2, 3), WORLD, names)
    assert agreed.verdict == b"[2, 3]"


class Silent(Store):
    """A store whose host is stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()
        self.calls = 0

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Block until the test is over."""
        self.calls += 1
        self.over.wait(30)
        raise RuntimeError("over")


def test_a_store_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that does not answer is given up after a deadline, and not tried again at once."""
    monkeypatch.setattr(other_nodes, "_PROBE_S", 0.2)
    silent = Silent()
    exchange = Exchange(lambda: silent, settle_s=0.1)
    with pytest.raises(Unreachable, match="no answer within"):
        exchange.agree(node(0), WORLD, names)
    with pytest.raises(Unreachable, match="a moment ago"):
        exchange.asked()
    assert silent.calls == 1  # and it has not returned yet
    silent.over.set()


def test_a_store_that_is_gone() -> None:
    """The error of a store that is gone is the reason that the caller sees."""

    def gone() -> Any:
        raise ConnectionError("broken pipe")

    with pytest.raises(Unreachable, match="broken pipe"):
        Exchange(gone).agree(node(0), WORLD, names)


def test_no_store_yet() -> None:
    """Before init_process_group there is no store, and the error says so."""
    shared = store()
    there: list[Any] = [None]
    exchange = Exchange(lambda: there[0])
    with pytest.raises(Unreachable, match="has not been made"):
        exchange.asked()
    there[0] = shared
    assert not exchange.asked()
