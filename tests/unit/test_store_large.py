"""Stores of large worlds: what naming the missing reads, counted on a store of ten thousand."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import HashStore

import rankcall
from rankcall import store as ours
from rankcall.store import _member, _roster, _view, _words
from rankcall.store._keys import keys_of
from rankcall.store._link import Link

LEADERS = 12_500  # 100,000 ranks on hosts of eight
LIMIT = 20_000  # bytes each may read: all together 250 MB, a quarter of a second of 10 Gb/s


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of all answers from a store."""
    sizes: list[int] = []
    ask = Link._ask

    def counted(link: Link, call: Any, *arguments: Any) -> Any:
        answer = ask(link, call, *arguments)
        parts = answer if isinstance(answer, list) else [answer]
        sizes.extend(len(part) if isinstance(part, bytes) else 8 for part in parts)
        return answer

    monkeypatch.setattr(Link, "_ask", counted)
    return sizes


def filled(missing: set[int], generation: int, world_size: int = LEADERS) -> HashStore:
    """Return a store as it is when all but some have come to a barrier."""
    store = HashStore()
    keys = keys_of("p", "b", 0, world_size)
    for rank in range(world_size):
        word, _ = _words.place(rank)
        came = rank not in missing
        if generation or came:
            claim = _roster.new_claim(rank, world_size)._replace(host=f"node-{rank // 8:05d}")
            store.append(keys.rosters[word], claim.line())  # type: ignore[attr-defined]
            store.add(keys.words[word], _words.claim(rank))
        for turn in range(generation + came):
            store.add(keys.words[word], _words.arrival(rank, turn))
    store.set(keys.sizes, str(world_size))
    if generation:
        store.set(keys.done(generation - 1), "1")
    return store


@pytest.mark.parametrize("generation", [0, 1])
@pytest.mark.parametrize("gone", [range(40), range(0, LEADERS, 313), range(1, 6000)])
def test_naming_reads_little(generation: int, gone: range, received: list[int]) -> None:
    """All of the missing are named, however many; hosts are looked up for as many as is cheap."""
    missing = {*gone} - {3}
    store = filled({*missing, 3}, generation)
    if generation:
        been_here(store, generation)
    with pytest.raises(rankcall.BarrierTimeout) as caught:
        ours.barrier(store, LEADERS, "p", 0.05, 3, trace_timeout=10)
    assert caught.value.missing_ranks == tuple(sorted(missing))
    assert sum(received) < LIMIT
    named = caught.value.hosts
    assert all(host == f"node-{rank // 8:05d}" for rank, host in named.items())
    if generation and len(missing) == 39:
        assert set(named) == missing, "they have been here, side by side"


def been_here(store: HashStore, generation: int) -> None:
    """Let this process be rank 3, which has been at the barrier before."""
    keys = keys_of("p", "b", 0, LEADERS)
    claim = _roster.read(store.get(keys.rosters[0]), LEADERS).claims[3]
    name = _member.identity_of(store, Link(store))
    member = _member.Member(claim, claimed=True, generation=generation)
    _member._members[name, keys, 3] = member


def test_a_small_world_reads_all() -> None:
    """Below some 1,300 ranks everybody's host is looked up, also of those who never came."""
    missing = {*range(0, 1024, 7)}
    store = filled({*missing, 3}, 1, 1024)
    view = _view.look(Link(store), keys_of("p", "b", 0, 1024), 1)
    assert set(view.missing) == {*missing, 3}
    assert set(view.roster.hosts) == set(range(1024))
