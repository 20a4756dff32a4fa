"""Stores: barriers and exchanges on every kind of store, and what the model gets wrong."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from stores import KINDS, keys_of, meanwhile, ranks, stores_of, threads
from torch.distributed import DistStoreError, HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.utils import store as model

import rankcall
from rankcall import store as ours
from rankcall.store import _words
from rankcall.store._keys import keys_of as keys_for

LATE_S = {"file": 2.0}
N = 4


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Run on every kind of store."""
    return str(request.param)


@pytest.fixture
def clients(kind: str, tmp_path: Path) -> list[Store]:
    """Return four clients of one store."""
    return stores_of(kind, N, tmp_path)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return what a call raised, and after how long."""
    began = time.monotonic()
    with pytest.raises(rankcall.BarrierTimeout) as caught:
        call()
    return caught.value, time.monotonic() - began


# --- it does what the model does ---


def test_nobody_passes_before_the_last(clients: list[Store]) -> None:
    """Everybody has entered when the first leaves, again and again under one prefix."""
    entered: list[int] = []

    def rounds(rank: int) -> None:
        for turn in range(5):
            entered.append(rank)
            ours.barrier(clients[rank], N, "epoch", 20, rank)
            assert len(entered) >= (turn + 1) * N

    assert ranks(rounds, N) == [None] * N


def test_nobody_passes_before_the_last_without_ranks(clients: list[Store]) -> None:
    """The same where nobody says which rank it is."""
    entered: list[int] = []

    def rounds(rank: int) -> None:
        for turn in range(5):
            entered.append(rank)
            ours.barrier(clients[rank], N, "epoch", 20)
            assert len(entered) >= (turn + 1) * N

    assert ranks(rounds, N) == [None] * N


def test_everybody_gets_everybodys_data(clients: list[Store]) -> None:
    """Synchronize returns all data in rank order: empty, binary and large ones, repeatedly."""

    def data(rank: int, turn: int) -> bytes:
        return bytes(range(256)) * (rank * turn * 10)

    def rounds(rank: int) -> list[list[bytes]]:
        return [ours.synchronize(clients[rank], data(rank, t), rank, N, "x", 20) for t in range(3)]

    expected = [[data(rank, turn) for rank in range(N)] for turn in range(3)]
    assert ranks(rounds, N) == [expected] * N


def test_get_all_returns_what_was_set(clients: list[Store]) -> None:
    """get_all agrees with the model on the same keys, and may be called again."""
    for rank, client in enumerate(clients):
        client.set(f"data{rank}", f"value {rank}")
    expected = [f"value {rank}".encode() for rank in range(N)]
    for _ in range(2):
        assert ranks(lambda rank: ours.get_all(clients[rank], rank, "data", N), N) == [expected] * N


@pytest.mark.parametrize("size", [31, 32, 63])
def test_more_ranks_than_a_word_holds(size: int) -> None:
    """Worlds around the size of a word of arrivals."""
    shared = HashStore()

    def rounds(rank: int) -> list[bytes]:
        for _ in range(3):
            ours.barrier(shared, size, "wide", 20, rank)
        return ours.synchronize(shared, b"%d" % rank, rank, size, "wide", 20)

    assert ranks(rounds, size) == [[b"%d" % rank for rank in range(size)]] * size
    lost = [0, 30, size - 1]
    here = [rank for rank in range(size) if rank not in lost]
    errors = ranks(lambda rank: ours.barrier(shared, size, "wide", 0.3, rank), here)
    assert {error.missing_ranks for error in errors} == {tuple(sorted(set(lost)))}


def test_data_too_large_to_copy(tmp_path: Path) -> None:
    """Data of more than a store takes in one value goes through, and is removed later."""
    clients = stores_of("tcp", 3, tmp_path)

    def rounds(rank: int) -> list[list[int]]:
        sizes = (3 << 20, 10, 3 << 20)
        return [
            [len(each) for each in ours.synchronize(clients[rank], bytes(n), rank, 3, "big", 20)]
            for n in sizes
        ]

    assert ranks(rounds, 3) == [[[3 << 20] * 3, [10] * 3, [3 << 20] * 3]] * 3
    left = [key for key in keys_of(clients[0]) if "/data" in key]
    assert left == ["big/rankcall.s0/3/data2"]


# --- the model's defects ---


@pytest.mark.parametrize("which", [model.store_timeout, ours.store_timeout])
def test_a_timeout_is_put_back_after_an_error(which: Any) -> None:
    """Defect 1: the model leaves the short timeout behind."""
    store = HashStore()
    before = store.timeout  # type: ignore[attr-defined]
    with pytest.raises(KeyError), which(store, 5):
        raise KeyError
    after = store.timeout  # type: ignore[attr-defined]
    assert (after == before) is (which is ours.store_timeout)


def test_store_timeout_nests(clients: list[Store]) -> None:
    """Each level puts back what it found."""
    store: Any = clients[1]
    seen = [store.timeout]
    with ours.store_timeout(store, 7):
        with ours.store_timeout(store, 3):
            seen.append(store.timeout)
        seen.append(store.timeout)
    assert seen[1:] == [timedelta(seconds=3), timedelta(seconds=7)]
    assert store.timeout == seen[0]


def test_the_stores_timeout_is_never_touched(clients: list[Store]) -> None:
    """After a barrier, in time or not, and meanwhile, the store's timeout is what it was."""
    store: Any = clients[0]
    store.set_timeout(timedelta(seconds=77))
    with meanwhile(lambda: ours.barrier(store, 2, "never", 0.5, 0)) as outcome:
        while not any("never" in key for key in keys_of(clients[1])):
            assert store.timeout == timedelta(seconds=77)
    assert isinstance(outcome[0], rankcall.BarrierTimeout)
    assert store.timeout == timedelta(seconds=77)


def test_a_prefix_serves_more_than_once() -> None:
    """Defect 2: the model lets one rank pass alone where the prefix was used before."""
    for barrier, passes in ((model.barrier, True), (ours.barrier, False)):
        store = HashStore()
        assert ranks(lambda rank, b=barrier, s=store: b(s, 2, "p", 5, rank), 2) == [None, None]
        (again,) = ranks(lambda rank, b=barrier, s=store: b(s, 2, "p", 0.2, rank), 1)
        assert (again is None) is passes


def test_a_retry_is_no_second_arrival(clients: list[Store]) -> None:
    """Defect 2: a rank that retries does not pass alone; the one that comes late lets it pass."""
    for _ in range(3):
        error, _ = timed(lambda: ours.barrier(clients[0], 2, "p", 0.1, 0))
        assert error.missing_ranks == (1,)
    ours.barrier(clients[1], 2, "p", 0.1, 1)  # all are here, so it need not wait
    ours.barrier(clients[0], 2, "p", 0.1, 0)
    timed(lambda: ours.barrier(clients[0], 2, "p", 0.1, 0))


def test_a_retry_is_no_second_arrival_without_ranks(clients: list[Store]) -> None:
    """A process that timed out keeps its place."""
    for _ in range(3):
        error, _ = timed(lambda: ours.barrier(clients[0], 2, "p", 0.1))
        assert (error.missing_ranks, error.arrived) == ((), 1)
    assert ranks(lambda rank: ours.barrier(clients[rank], 2, "p", 5), 2) == [None, None]


def test_every_rank_names_every_missing_rank(kind: str, clients: list[Store]) -> None:
    """Defects 3, 5 and 6: also rank 0, on all ranks, within a second of the timeout."""
    outcomes = ranks(
        lambda rank: timed(lambda: ours.barrier(clients[rank], N, "p", 0.5, rank)), [1, 3]
    )
    for error, took in outcomes:
        assert error.missing_ranks == (0, 2)
        assert (error.arrived, error.world_size) == (2, N)
        assert took < 0.5 + LATE_S.get(kind, 1.0)
        assert "2 of 4 ranks arrived; missing 0,2 (host unknown)" in str(error)


def test_more_than_sixteen_are_named() -> None:
    """Defect 5: the list is complete, sorted, in ranges, with the count."""
    store = HashStore()
    error, _ = timed(lambda: ours.barrier(store, 1024, "p", 0.1, 5))
    assert error.missing_ranks == tuple(rank for rank in range(1024) if rank != 5)
    assert "1 of 1,024 ranks arrived; missing 0-4,6-1023 (host unknown)" in str(error)


def test_a_late_rank_is_not_blamed(clients: list[Store]) -> None:
    """Defect 4: who has come by the time of naming is not missing."""
    first = ranks(lambda rank: ours.barrier(clients[rank], 3, "p", 0.2, rank), [0, 2])
    assert [error.missing_ranks for error in first] == [(1,), (1,)]
    ours.barrier(clients[1], 3, "p", 5, 1)
    assert ranks(lambda rank: ours.barrier(clients[rank], 3, "p", 0.2, rank), [0, 2]) == [None] * 2


def test_keys_do_not_pile_up(clients: list[Store]) -> None:
    """Defect 7: fifty rounds leave two generations at most, and the user's keys alone."""
    clients[0].set("mine", "kept")
    seen: list[int] = []

    def rounds(rank: int) -> None:
        for turn in range(12):
            ours.barrier(clients[rank], N, "p", 20, rank)
            ours.synchronize(clients[rank], b"x", rank, N, "p", 20)
            if rank == 2 and turn % 3 == 0:
                names = [key.partition("/rankcall.")[2] for key in keys_of(clients[rank])]
                seen.append(len({key for key in names if "/done" in key and key[0] == "b"}))
                assert len([key for key in names if "/done" in key and key[0] == "s"]) <= 2

    assert ranks(rounds, N) == [None] * N
    assert max(seen) <= 2
    assert clients[0].get("mine") == b"kept"


def test_world_sizes_that_differ(clients: list[Store]) -> None:
    """Defect 8: everybody is told who believes what."""
    said = {0: 4, 1: 4, 2: 3}
    errors = ranks(lambda rank: ours.barrier(clients[rank], said[rank], "p", 0.3, rank), 3)
    for error in errors:
        assert isinstance(error, rankcall.WorldMismatch)
        assert {claim[:2] for claim in error.claims} == {(0, 4), (1, 4), (2, 3)}
        assert "3 say ranks 2" in str(error)
        assert "4 say ranks 0-1" in str(error)


def test_world_sizes_that_differ_without_ranks(clients: list[Store]) -> None:
    """The same without ranks, by process."""
    errors = ranks(lambda rank: ours.barrier(clients[rank], 3 + rank, "p", 0.3), 2)
    assert [type(error) for error in errors] == [rankcall.WorldMismatch] * 2
    assert "4 say pid" in str(errors[0])


def test_the_host_rank_leaves_last(clients: list[Store]) -> None:
    """Defect 9: whichever rank hosts the store returns when the others have read."""
    for rank, client in enumerate(clients):
        client.set(f"data{rank}", b"v")
    with meanwhile(lambda: ours.get_all(clients[2], 2, "data", N, host_rank=2)) as host:
        for rank in (0, 1):
            ours.get_all(clients[rank], rank, "data", N, host_rank=2)
        assert not host
        ours.get_all(clients[3], 3, "data", N, host_rank=2)
    assert host == [[b"v"] * N]
    error, _ = timed(lambda: ours.get_all(clients[2], 2, "data", N, host_rank=2, timeout=0.2))
    assert error.missing_ranks == (0, 1, 3)
    assert "have read" in str(error)


def test_get_all_names_the_keys_that_are_not_there(clients: list[Store]) -> None:
    """A rank that has set nothing is missing."""
    clients[0].set("data1", b"")
    error, _ = timed(lambda: ours.get_all(clients[0], 0, "data", 3, timeout=0.2))
    assert error.missing_ranks == (0, 2)


# --- words ---


def test_the_message_says_who_what_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person's sentence first, then what their log searches look for."""
    monkeypatch.setenv("RANKCALL_HOST", "node-b")
    hosts = {17: "node-c", 18: "node-c", 512: "node-k"}
    shared = HashStore()
    here = [rank for rank in range(1024) if rank not in hosts]
    words = keys_for("epoch-3", "b", 0, 1024).words
    for rank in here[:-1]:  # as their calls would, which would take a second
        word, _ = _words.place(rank)
        shared.add(words[word], _words.claim(rank) + _words.arrival(rank, 0))
    error, _ = timed(lambda: ours.barrier(shared, 1024, "epoch-3", 0.1, here[-1], hosts=hosts))
    assert str(error).startswith(
        "barrier 'epoch-3' timed out after 0.1 s on rank 1023 (node-b): 1,021 of 1,024 ranks "
        "arrived; missing 17-18 (node-c), 512 (node-k)."
    )
    assert error.hosts == hosts
    assert isinstance(error, DistStoreError)
    for part in (
        "Timed out waiting on barrier on rank 1023, for key prefix: epoch-3",
        "world_size=1024", "missing_ranks=[17, 18, 512]", "timeout=0.1",
    ):  # fmt: skip
        assert part in str(error)


def test_hosts_are_known_from_an_earlier_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has been here before is named with its host."""
    shared = HashStore()
    for rank in range(2):
        monkeypatch.setenv("RANKCALL_HOST", f"node-{rank}")
        with pytest.raises(rankcall.BarrierTimeout):
            ours.barrier(shared, 3, "p", 0.001, rank)
    monkeypatch.setenv("RANKCALL_HOST", "node-2")
    ours.barrier(shared, 3, "p", 5, 2)
    error, _ = timed(lambda: ours.barrier(shared, 3, "p", 0.1, 2))
    assert error.hosts == {0: "node-0", 1: "node-1"}
    assert "missing 0 (node-0), 1 (node-1)" in str(error)


def test_hosts_are_known_from_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun, ranks of one node share a host."""
    shared = HashStore()
    for name, value in (("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2"), ("RANKCALL_HOST", "a")):
        monkeypatch.setenv(name, value)
    error, _ = timed(lambda: ours.barrier(shared, 4, "p", 0.1, 1))
    assert error.hosts == {0: "a"}


def test_the_decoders_words_are_used() -> None:
    """A decoder's words stand in both forms; one that raises loses no rank."""
    store = HashStore()
    error, _ = timed(lambda: ours.barrier(store, 3, "p", 0.1, 0, lambda rank: f"box{rank}"))
    assert "missing 1 (box1), 2 (box2)" in str(error)
    assert "missing_ranks=[box1, box2]" in str(error)

    def broken(rank: int) -> str:
        raise KeyError(rank)

    error, _ = timed(lambda: ours.barrier(store, 3, "p", 0.1, 0, broken))
    assert error.missing_ranks == (1, 2)
    assert "rank_tracing_decoder(1) raised KeyError(1)" in str(error)
    assert "missing_ranks=[1, 2]" in str(error)


def test_what_stands_in_every_error() -> None:
    """The application's own words, in each kind of error."""
    store = HashStore()
    error, _ = timed(lambda: ours.barrier(store, 2, "p", 0.1, 0, what="checkpoint 1200"))
    assert "barrier 'p' (checkpoint 1200) timed out" in str(error)
    assert error.what == "checkpoint 1200"
    error, _ = timed(lambda: ours.synchronize(store, b"", 0, 2, "p", 0.1, what="saving"))
    assert "synchronize 'p' (saving) timed out" in str(error)
    with pytest.raises(rankcall.WorldMismatch, match="saving"):
        ours.barrier(store, 3, "p", 0.1, 0, what="saving")


def test_an_error_can_be_pickled() -> None:
    """Errors cross process boundaries whole: torchelastic's and multiprocessing's."""
    error, _ = timed(lambda: ours.barrier(HashStore(), 2, "p", 0.1, 0))
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), vars(copy)) == (str(error), vars(error))
    assert type(copy) is type(error)


def test_trace_timeout_bounds_the_naming() -> None:
    """With no time for it, nobody is named, and the error says so."""
    error, took = timed(lambda: ours.barrier(HashStore(), 2, "p", 0.1, 0, trace_timeout=0))
    assert error.missing_ranks == ()
    assert "trace_timeout" in str(error)
    assert took < 0.3


# --- mistakes ---


@pytest.mark.parametrize(
    ("arguments", "kind_of_error", "says"),
    [
        ((0, "p"), ValueError, "world_size must be at least 1"),
        ((-3, "p"), ValueError, "world_size must be at least 1"),
        ((2.0, "p"), TypeError, "world_size must be an int"),
        ((True, "p"), TypeError, "world_size must be an int"),
        ((2, "p", 0), ValueError, "barrier_timeout must be positive"),
        ((2, "p", -1), ValueError, "barrier_timeout must be positive"),
        ((2, "p", float("nan")), ValueError, "barrier_timeout must be positive"),
        ((2, "p", "5"), TypeError, "barrier_timeout is in seconds"),
        ((2, "p", 1, 2), ValueError, "rank 2 is outside a world of 2"),
        ((2, "p", 1, -1), ValueError, "rank -1 is outside a world of 2"),
        ((2, "p", 1, "0"), TypeError, "rank must be an int"),
        ((2, "p", 1, None, str), ValueError, "give rank as well"),
        ((2, "p", 1, 0, None, -1), ValueError, "trace_timeout must be at least 0"),
        ((2, b"p"), TypeError, "key_prefix must be a str"),
        ((2, "\ud800"), ValueError, "cannot be written as UTF-8"),
    ],
)
def test_mistakes_are_told_at_once(arguments: Any, kind_of_error: Any, says: str) -> None:
    """Nothing is sent to the store for a call that cannot be meant."""
    store = HashStore()
    with pytest.raises(kind_of_error, match=says):
        ours.barrier(store, *arguments)
    assert keys_of(store) == []


def test_other_mistakes() -> None:
    """What is no store, no data, or too much of it."""
    with pytest.raises(TypeError, match=r"torch\.distributed\.Store; got dict"):
        ours.barrier({}, 2, "p")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="data must be bytes; got str on rank 1"):
        ours.synchronize(HashStore(), "text", 1, 2, "p")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="use a collective"):
        ours.synchronize(HashStore(), bytes(8 << 20), 1, 2, "p")
    with pytest.raises(ValueError, match="timeout must be positive"):
        ours.store_timeout(HashStore(), 0).__enter__()


@pytest.mark.parametrize("prefix", ["", "a/b", "ünï ☃", "{}%s", "new\nline", "rankcall.b0/", "\0"])
def test_odd_prefixes(prefix: str, tmp_path: Path) -> None:
    """A prefix is any text."""
    for kind in ("tcp", "file", "hash"):
        (tmp_path / kind).mkdir()
        clients = stores_of(kind, 2, tmp_path / kind)
        for _ in range(3):
            assert ranks(lambda r, c=clients: ours.barrier(c[r], 2, prefix, 5, r), 2) == [None] * 2


def test_prefixes_do_not_meet() -> None:
    """Prefixes that begin alike, attempts and PrefixStores are worlds of their own."""
    store = HashStore()
    for base, prefix, attempt in (
        (store, "p", 0), (store, "p", 1), (store, "p1", 0), (PrefixStore("p", store), "", 0),
        (PrefixStore("q", store), "p", 0),
    ):  # fmt: skip
        error, _ = timed(
            lambda b=base, p=prefix, a=attempt: ours.barrier(b, 2, p, 0.05, 0, attempt=a)
        )
        assert error.arrived == 1


def test_an_earlier_attempt_does_not_satisfy_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's restart count is in the keys."""
    store = HashStore()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    timed(lambda: ours.barrier(store, 2, "p", 0.05, 0))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    error, _ = timed(lambda: ours.barrier(store, 2, "p", 0.05, 1))
    assert error.missing_ranks == (0,)


def test_a_rank_in_two_threads() -> None:
    """Two threads of one process that are one rank are told so."""
    store = HashStore()
    with meanwhile(lambda: ours.barrier(store, 2, "p", 5, 0)):
        while not any(key.endswith("w0") for key in keys_of(store)):
            time.sleep(0.001)
        with pytest.raises(rankcall.WorldMismatch, match="in another thread of this process"):
            ours.barrier(store, 2, "p", 5, 0)
        ours.barrier(store, 2, "p", 5, 1)


def test_a_new_prefix_store_each_time() -> None:
    """It does not matter through which object a store is reached."""
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _ in range(3):
        assert (
            ranks(lambda r: ours.barrier(PrefixStore("x", master), 2, "p", 5, r), 2) == [None] * 2
        )
    timed(lambda: ours.barrier(PrefixStore("x", master), 2, "p", 0.1, 0))
    log = next(key for key in keys_of(master) if key.endswith("who0"))
    assert master.get(log.removeprefix("/")).count(b"\n") == 2


def test_threads_share_one_client(tmp_path: Path) -> None:
    """A barrier that waits does not hold up another thread on the same store object."""
    (client,) = stores_of("tcp", 1, tmp_path)
    assert ranks(lambda rank: ours.barrier(client, 8, "p", 20, rank), 8) == [None] * 8
    with meanwhile(lambda: ours.barrier(client, 2, "q", 20, 0)):
        client.set("meanwhile", "set")
        assert client.get("meanwhile") == b"set"
        ours.barrier(client, 2, "q", 20, 1)


# --- no key is left ---


def test_clean_up_leaves_nothing(clients: list[Store]) -> None:
    """When all ranks are done, no key of ours is left, and every key of the user's."""
    clients[0].set("mine", "kept")

    def use(rank: int) -> None:
        for _ in range(3):
            ours.barrier(clients[rank], N, "p", 20, rank)
            ours.barrier(clients[rank], N, "p", 20)
            ours.synchronize(clients[rank], b"x", rank, N, "p", 20)
        ours.clean_up(clients[rank], "p", N, rank)

    for _ in range(2):
        assert ranks(use, N) == [None] * N
        assert keys_of(clients[0]) == ["mine"]


def test_clean_up_waits_for_all_ranks(clients: list[Store]) -> None:
    """While one rank has use for a prefix, what it needs stays; saying it twice changes nothing."""
    timed(lambda: ours.barrier(clients[0], 2, "p", 0.05, 0))
    ours.barrier(clients[1], 2, "p", 5, 1)
    for _ in range(2):
        ours.clean_up(clients[1], "p", 2, 1)
    ours.barrier(clients[0], 2, "p", 5, 0)
    ours.clean_up(clients[0], "p", 2, 0)
    assert keys_of(clients[0]) == []


def test_clean_up_without_a_rank_removes_at_once() -> None:
    """What a dead job left can be removed by anybody; another prefix is not touched."""
    store = HashStore()
    for prefix in ("p", "p2"):
        timed(lambda p=prefix: ours.barrier(store, 2, p, 0.05, 0))
    ours.clean_up(store, "p", 2)
    assert {key.partition("/")[0] for key in keys_of(store)} == {"p2", "rankcall.store"}


def test_a_new_attempt_removes_what_the_last_one_left() -> None:
    """Leftovers of an attempt go when the next one meets for the first time."""
    store = HashStore()
    timed(lambda: ours.barrier(store, 2, "p", 0.05, 0, attempt=3))
    assert ranks(lambda rank: ours.barrier(store, 2, "p", 5, rank, attempt=4), 2) == [None] * 2
    assert all("b4/" in key for key in keys_of(store) if key.startswith("p"))


def test_an_addition_without_an_answer_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An arrival that the store took but did not acknowledge is not made twice by the retry."""
    from rankcall.store._link import Link

    store, add = HashStore(), Link.add

    def silent(link: Link, key: str, amount: int) -> int:
        add(link, key, amount)
        raise ours.StoreLost("no answer")

    for turn in range(3):
        for call in (
            lambda: ours.barrier(store, 2, "p", 0.1, 0),
            lambda: ours.synchronize(store, b"", 0, 2, "p", 0.1, host_rank=1),
        ):
            monkeypatch.setattr(Link, "add", silent)
            with pytest.raises(rankcall.StoreLost):
                call()
            monkeypatch.setattr(Link, "add", add)
            error, _ = timed(call)
            assert error.missing_ranks == (1,), turn
        ours.barrier(store, 2, "p", 5, 1)
        ours.barrier(store, 2, "p", 5, 0)
        both = [
            lambda: ours.synchronize(store, b"", 0, 2, "p", 5, host_rank=1),
            lambda: ours.synchronize(store, b"", 1, 2, "p", 5, host_rank=1),
        ]
        assert threads(both) == [[b"", b""]] * 2


# --- in torch's place ---


def test_install_is_undone() -> None:
    """While it is installed torch's names are ours; afterwards they are what they were."""
    import torch.distributed.elastic.utils.distributed as distributed

    names = ("barrier", "get_all", "store_timeout", "synchronize")
    before = [getattr(model, name) for name in names] + [distributed.barrier]
    with ours.install() as handle:
        assert model.barrier is distributed.barrier is ours.barrier
        assert [getattr(model, name) for name in names] == [getattr(ours, name) for name in names]
        with pytest.raises(RuntimeError, match="installed already"):
            ours.install()
    handle.remove()
    assert [getattr(model, name) for name in names] + [distributed.barrier] == before


def test_torchs_own_code_meets_by_ours() -> None:
    """create_c10d_store's check that all are there, and a second use of one prefix, go through."""
    from torch.distributed.elastic.utils.distributed import create_c10d_store

    with ours.install():
        store = create_c10d_store(True, "127.0.0.1", world_size=1, timeout=10)
        assert any("/rankcall.b0/" in key for key in keys_of(store))
        with pytest.raises(DistStoreError, match="Timed out waiting on barrier on rank 0"):
            model.barrier(store, 2, "p", 0.1, 0, str, 1)


# --- who is here ---


def test_rollcall_waits_for_nobody(clients: list[Store]) -> None:
    """Who has answered is listed with what it does; who has not is missing."""
    first = ours.rollcall(clients[0], 0, 3, timeout=0.05, doing="in all_reduce #3 on group 0")
    assert [one.rank for one in first.answers] == [0]
    assert first.missing_ranks == [1, 2]
    second = ours.rollcall(clients[2], 2, 3, timeout=0.05)
    assert [(one.rank, one.doing) for one in second.answers] == [
        (0, "in all_reduce #3 on group 0"), (2, None),
    ]  # fmt: skip
    assert "in all_reduce #3 on group 0" in str(second)
    assert "no answer from 1 ranks: 1 (host unknown)" in str(second)
    began = time.monotonic()
    assert not ours.rollcall(clients[1], 1, 3, timeout=20).missing_ranks
    assert time.monotonic() - began < 10
