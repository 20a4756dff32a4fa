"""Errors name missing ranks and ranks with another world size; a roll call lists ranks."""

from __future__ import annotations

import pickle
import re

import pytest
from lag import stopwatch
from stores import N, clients, come, kind, meanwhile, ranks, timed, until_key
from torch.distributed import DistStoreError, HashStore, PrefixStore, Store

import rankcall
from rankcall import store as ours
from rankcall.c10d.connection import clock
from rankcall.store.keys import Keys, line_of

__all__ = ["clients", "kind"]  # fixtures
LATE_S = {"file": 2.0}


# --- who ---


def test_every_rank_names_every_missing_rank(kind: str, clients: list[Store]) -> None:
    """Also rank 0, on all ranks, within a second of the timeout: the model's rank 0 names a few."""
    for rank in (1, 3):
        timed(lambda r=rank: ours.barrier(clients[r], N, "p", 0.05, r))
    outcomes = ranks(
        lambda rank: timed(lambda: ours.barrier(clients[rank], N, "p", 0.5, rank)), [1, 3]
    )
    for error, took in outcomes:
        assert error.missing_ranks == (0, 2)
        assert (error.arrived, error.world_size) == (2, N)
        assert took < 0.5 + LATE_S.get(kind, 1.0)
        assert "2 of 4 ranks arrived; missing 0,2 (host unknown)" in str(error)


def test_more_than_sixteen_are_named() -> None:
    """The list is complete, sorted, in ranges, with the count."""
    store = HashStore()
    error, _ = timed(lambda: ours.barrier(store, 1024, "p", 0.1, 5))
    assert error.missing_ranks == tuple(rank for rank in range(1024) if rank != 5)
    assert "1 of 1,024 ranks arrived; missing 0-4,6-1023 (host unknown)" in str(error)


def test_get_all_names_the_keys_that_are_not_there(clients: list[Store]) -> None:
    """A rank that has set nothing is missing."""
    clients[0].set("data1", b"")
    error, _ = timed(lambda: ours.get_all(clients[0], 0, "data", 3, timeout=0.2))
    assert error.missing_ranks == (0, 2)


def test_trace_timeout_bounds_the_naming() -> None:
    """Without time for naming, the error names no rank, and says why."""
    error, took = timed(lambda: ours.barrier(HashStore(), 2, "p", 0.1, 0, trace_timeout=0))
    assert error.missing_ranks == ()
    assert "trace_timeout" in str(error)
    assert took < 1


def test_world_sizes_that_differ(clients: list[Store]) -> None:
    """Each error says which ranks expect which world size."""
    sizes = {0: 4, 1: 4, 2: 3}
    errors = come(lambda rank: ours.barrier(clients[rank], sizes[rank], "p", 0.3, rank), range(3))
    for error in errors:
        assert isinstance(error, rankcall.errors.WorldMismatchError)
        assert {claim[:2] for claim in error.claims} == {(0, 4), (1, 4), (2, 3)}
        assert re.search(r"rank 2 \(\S+\) expects 3 ranks", str(error))
        assert re.search(r"ranks 0-1 \(\S+\) expect 4 ranks", str(error))


def test_world_sizes_that_differ_without_ranks(clients: list[Store]) -> None:
    """The same without ranks, by process."""
    errors = come(lambda rank: ours.barrier(clients[rank], 3 + rank, "p", 0.3), range(2))
    assert [type(error) for error in errors] == [rankcall.errors.WorldMismatchError] * 2
    for error in errors:
        assert "1 process without a rank expects 3 ranks" in str(error)
        assert "1 process without a rank expects 4 ranks" in str(error)


def test_a_rank_in_two_threads() -> None:
    """Two threads of one process that call as one rank get an error that says so."""
    store = HashStore()
    with meanwhile(lambda: ours.barrier(store, 2, "p", 5, 0)):
        until_key(store, "/log")
        with pytest.raises(
            rankcall.errors.WorldMismatchError, match="in another thread of this process"
        ):
            ours.barrier(store, 2, "p", 5, 0)
        ours.barrier(store, 2, "p", 5, 1)


def test_rollcall_does_not_wait_for_all(clients: list[Store]) -> None:
    """Ranks that have answered are listed with what they do; the others are missing."""
    first = ours.rollcall(clients[0], 0, 3, timeout=0.5, doing="in all_reduce #3 on group 0")
    assert [answer.rank for answer in first.answers] == [0]
    assert first.missing_ranks == [1, 2]
    second = ours.rollcall(clients[2], 2, 3, timeout=0.5)
    assert [(answer.rank, answer.doing) for answer in second.answers] == [
        (0, "in all_reduce #3 on group 0"),
        (2, None),
    ]
    assert "in all_reduce #3 on group 0" in str(second)
    assert "no answer from 1 rank: 1 (host unknown)" in str(second)
    with stopwatch() as took:
        assert not ours.rollcall(clients[1], 1, 3, timeout=20).missing_ranks
    assert took[0] < 10


# --- words ---


def test_the_message_says_who_what_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person's sentence first, then what their log searches look for."""
    monkeypatch.setenv("RANKCALL_HOST", "node-b")
    hosts = {17: "node-c", 18: "node-c", 512: "node-k"}
    shared = HashStore()
    here = [rank for rank in range(1024) if rank not in hosts]
    keys = Keys("epoch-3", 0, 1024)
    for rank in here[:-1]:  # as their calls would, which would take a second
        shared.append(keys.log("b", 0), line_of(rank).decode())
    error, _ = timed(lambda: ours.barrier(shared, 1024, "epoch-3", 0.1, here[-1], hosts=hosts))
    assert str(error).startswith(
        "barrier 'epoch-3' timed out after 0.1 s on rank 1023 (node-b): 1,021 of 1,024 ranks "
        "arrived; missing 17-18 (node-c), 512 (node-k)."
    )
    assert error.hosts == hosts
    assert isinstance(error, DistStoreError)
    for part in (
        "Timed out waiting on barrier on rank 1023, for key prefix: epoch-3",
        "world_size=1024",
        "missing_ranks=[17, 18, 512]",
        "timeout=0.1",
    ):
        assert part in str(error)


def test_hosts_are_known_from_an_earlier_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing rank that took part in an earlier round is named with its host."""
    shared = HashStore()
    for rank in range(2):
        monkeypatch.setenv("RANKCALL_HOST", f"node-{rank}")
        with pytest.raises(rankcall.errors.BarrierTimeout):
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


def test_torchs_words_of_the_other_ranks_are_found() -> None:
    """In torch, rank 0 alone has the list; searches for what the others say find our error, too."""
    store = HashStore()
    first, _ = timed(lambda: ours.barrier(store, 3, "p", 0.1, 0, lambda rank: f"box{rank}"))
    other, _ = timed(lambda: ours.barrier(store, 3, "p", 0.1, 1, lambda rank: f"box{rank}"))
    alone, _ = timed(lambda: ours.barrier(store, 3, "q", 0.1, 1, lambda rank: f"box{rank}"))
    words = "check rank 0 (box0) for missing rank info"
    assert [words in str(error) for error in (first, other, alone)] == [False, True, False]
    assert "missing_ranks=[box2]" in str(other)


def test_what_stands_in_every_error() -> None:
    """The application's own words, in each kind of error."""
    store = HashStore()
    error, _ = timed(lambda: ours.barrier(store, 2, "p", 0.1, 0, what="checkpoint 1200"))
    assert "barrier 'p' (checkpoint 1200) timed out" in str(error)
    assert error.what == "checkpoint 1200"
    error, _ = timed(lambda: ours.synchronize(store, b"", 0, 2, "p", 0.1, what="saving"))
    assert "synchronize 'p' (saving) timed out" in str(error)
    with pytest.raises(rankcall.errors.WorldMismatchError, match="saving"):
        ours.barrier(store, 3, "p", 0.1, 0, what="saving")


def test_an_error_can_be_pickled() -> None:
    """Errors cross process boundaries whole: torchelastic's and multiprocessing's."""
    error, _ = timed(lambda: ours.barrier(HashStore(), 2, "p", 0.1, 0))
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), vars(copy)) == (str(error), vars(error))
    assert type(copy) is type(error)


def test_a_roll_call_compares_no_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is minutes behind is here; an answer that is the same for a minute is not."""
    shared = HashStore()
    stores = [PrefixStore("p", shared) for _ in range(2)]  # as in two processes
    now = 0.0

    def monotonic() -> float:
        nonlocal now
        now += 0.001
        return now

    monkeypatch.setattr(clock, "monotonic", monotonic, raising=False)
    monkeypatch.setattr(clock, "sleep", lambda seconds: None, raising=False)

    def call(rank: int) -> ours.Rollcall:
        return ours.rollcall(stores[rank], rank, 2, timeout=0.05, doing="here")

    now = 5.0  # rank 1's own clock
    call(1)
    now = 90_000.0
    assert call(0).missing_ranks == []
    now += 59
    assert call(0).missing_ranks == []
    now += 2
    assert call(0).missing_ranks == [1]
    call(1)
    assert call(0).missing_ranks == []
