"""Barriers and exchanges let everybody through together, on every kind of store, every time."""

from __future__ import annotations

from pathlib import Path

import pytest
from stores import N, clients, come, keys_of, kind, meanwhile, ranks, stores_of, timed, until_key
from torch.distributed import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.utils import store as model

import rankcall
from rankcall import store as ours

__all__ = ["clients", "kind"]  # fixtures


# --- everybody, and everybody's data ---


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
    for get_all in (ours.get_all, ours.get_all, model.get_all):
        got = ranks(lambda rank, get=get_all: get(clients[rank], rank, "data", N), N)
        assert got == [expected] * N


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
    errors = come(lambda rank: ours.barrier(shared, size, "wide", 0.001, rank), here)
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


def test_the_host_rank_leaves_last(clients: list[Store]) -> None:
    """Whichever rank hosts the store returns when the others have read."""
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


# --- who calls again, or late ---


def test_a_retry_is_no_second_arrival(clients: list[Store]) -> None:
    """A rank that retries does not pass alone; the one that comes late lets it pass."""
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


def test_a_late_rank_is_not_blamed(clients: list[Store]) -> None:
    """Who has come by the time of naming is not missing."""
    first = come(lambda rank: ours.barrier(clients[rank], 3, "p", 0.1, rank), [0, 2])
    assert [error.missing_ranks for error in first] == [(1,), (1,)]
    ours.barrier(clients[1], 3, "p", 5, 1)
    assert ranks(lambda rank: ours.barrier(clients[rank], 3, "p", 5, rank), [0, 2]) == [None] * 2


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
        got = ranks(lambda rank: ours.synchronize(store, b"", rank, 2, "p", 5, host_rank=1), 2)
        assert got == [[b"", b""]] * 2


# --- objects and threads ---


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
    with meanwhile(lambda: ours.barrier(client, 2, "q", 20, 0)) as outcome:
        until_key(client, "q")
        client.set("meanwhile", "set")
        assert client.get("meanwhile") == b"set"
        assert not outcome
        ours.barrier(client, 2, "q", 20, 1)
