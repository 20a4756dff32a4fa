"""The keys in a store: worlds that must not meet, how many there are, and that none is left."""

from __future__ import annotations

from pathlib import Path

import pytest
from stores import N, clients, generations, keys_of, kind, ranks, stores_of, timed
from torch.distributed import HashStore, PrefixStore, Store

from rankcall import store as ours

__all__ = ["clients", "kind"]  # fixtures


# --- prefixes and attempts ---


@pytest.mark.parametrize("prefix", ["", "a/b", "ünï ☃", "{}%s", "new\nline", "rankcall.0/", "\0"])
def test_odd_prefixes(prefix: str, tmp_path: Path) -> None:
    """A prefix is any text."""
    for store_kind in ("tcp", "file", "hash"):
        (tmp_path / store_kind).mkdir()
        both = stores_of(store_kind, 2, tmp_path / store_kind)
        for _ in range(3):
            assert ranks(lambda r, b=both: ours.barrier(b[r], 2, prefix, 5, r), 2) == [None] * 2


def test_prefixes_do_not_meet() -> None:
    """Prefixes that begin alike, attempts and PrefixStores are worlds of their own."""
    store = HashStore()
    for base, prefix, attempt in (
        (store, "p", 0),
        (store, "p", 1),
        (store, "p1", 0),
        (PrefixStore("p", store), "", 0),
        (PrefixStore("q", store), "p", 0),
    ):
        error, _ = timed(
            lambda b=base, p=prefix, a=attempt: ours.barrier(b, 2, p, 0.05, 0, attempt=a)
        )
        assert error.arrived == 1


def test_an_earlier_attempt_does_not_satisfy_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's restart count is in the keys, as it was when a store was first used."""
    store = HashStore()
    before, after = PrefixStore("job", store), PrefixStore("job", store)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    timed(lambda: ours.barrier(before, 2, "p", 0.05, 0))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    error, _ = timed(lambda: ours.barrier(after, 2, "p", 0.05, 1))
    assert error.missing_ranks == (0,)


# --- how many ---


def test_keys_do_not_pile_up(clients: list[Store]) -> None:
    """Sixteen rounds leave no more than four do: two generations at most, and the user's keys."""
    clients[0].set("mine", "kept")

    def rounds(rank: int) -> None:
        for _ in range(4):
            ours.barrier(clients[rank], N, "p", 20, rank)
            ours.synchronize(clients[rank], b"x", rank, N, "p", 20)
            if rank == 2:
                for which in ("b", "s"):
                    assert 1 <= len(generations(clients[rank], which)) <= 4  # others may be ahead

    counts = []
    for _ in range(4):
        assert ranks(rounds, N) == [None] * N
        counts.append(len(keys_of(clients[0])))
        for which in ("b", "s"):
            assert 1 <= len(generations(clients[0], which)) <= 2
    assert counts == counts[:1] * 4
    assert clients[0].get("mine") == b"kept"


def test_retries_leave_no_more_keys_than_one(clients: list[Store]) -> None:
    """A rank that times out again and again adds no keys."""
    sizes = []
    for _ in range(4):
        timed(lambda: ours.barrier(clients[0], 2, "p", 0.02, 0))
        timed(lambda: ours.barrier(clients[0], 2, "p", 0.02))
        timed(lambda: ours.synchronize(clients[0], b"x", 0, 2, "p", 0.02))
        sizes.append({key: len(clients[0].get(key)) for key in keys_of(clients[0])})
    assert sizes[0]
    assert sizes[1:] == sizes[:1] * 3


# --- none is left ---


def test_clean_up_leaves_nothing(clients: list[Store]) -> None:
    """When all ranks are done, no key of ours is left, and every key of the user's."""
    clients[0].set("mine", "kept")

    def use(rank: int) -> None:
        for _ in range(3):
            ours.barrier(clients[rank], N, "p", 20, rank)
            ours.barrier(clients[rank], N, "p", 20)
            ours.synchronize(clients[rank], b"x", rank, N, "p", 20)
        ours.clean_up(clients[rank], rank, N, "p")

    for _ in range(2):
        assert ranks(use, N) == [None] * N
        assert keys_of(clients[0]) == ["mine"]


def test_clean_up_waits_for_all_ranks(clients: list[Store]) -> None:
    """While one rank uses a prefix, its keys stay; a second clean-up by a rank changes nothing."""
    timed(lambda: ours.barrier(clients[0], 2, "p", 0.05, 0))
    ours.barrier(clients[1], 2, "p", 5, 1)
    for _ in range(2):
        ours.clean_up(clients[1], 1, 2, "p")
    ours.barrier(clients[0], 2, "p", 5, 0)
    ours.clean_up(clients[0], 0, 2, "p")
    assert keys_of(clients[0]) == []


def test_clean_up_without_a_rank_removes_at_once() -> None:
    """Any process can remove the keys of a dead job; another prefix is not touched."""
    store = HashStore()
    for prefix in ("p", "p2"):
        timed(lambda p=prefix: ours.barrier(store, 2, p, 0.05, 0))
    ours.clean_up(store, None, 2, "p")
    assert {key.partition("/")[0] for key in keys_of(store)} == {"p2"}


def test_a_new_attempt_removes_what_the_last_one_left() -> None:
    """Leftovers of an attempt go when the next one meets for the first time."""
    store = HashStore()
    timed(lambda: ours.barrier(store, 2, "p", 0.05, 0, attempt=3))
    assert ranks(lambda rank: ours.barrier(store, 2, "p", 5, rank, attempt=4), 2) == [None] * 2
    left = [key for key in keys_of(store) if key.startswith("p")]
    assert left
    assert all("rankcall.4/" in key for key in left)


def test_clean_up_takes_the_arguments_of_version_0_1() -> None:
    """The old order works until 0.3, with a warning; the new one gives none."""
    store = HashStore()
    for old in (
        lambda: ours.clean_up(store, "p", 1, 0),  # type: ignore[arg-type]
        lambda: ours.clean_up(store, "p", 1, rank=0),  # type: ignore[arg-type, misc, call-arg]
        lambda: ours.clean_up(store, "p", 1),  # type: ignore[arg-type, call-arg]
        lambda: ours.clean_up(store, "p", world_size=1),  # type: ignore[arg-type, call-arg]
        lambda: ours.clean_up(store, key_prefix="p", world_size=1),  # type: ignore[call-arg]
    ):
        ours.barrier(store, 1, "p", 5, 0)
        with pytest.warns(DeprecationWarning, match="store, rank, world_size, key_prefix"):
            old()
        assert keys_of(store) == []
    ours.barrier(store, 1, "p", 5, 0)
    ours.clean_up(store, key_prefix="p", world_size=1, rank=0)
    assert keys_of(store) == []
