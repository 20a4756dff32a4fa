"""Random schedules of arrivals, retries, deaths and doubles, against a model of what must come out.

Each step is one call, made with a timeout so short that it either passes at once or times out, so
the order of the steps is the schedule. A process is what it remembers: swapping that swaps it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stores import generations
from torch.distributed import HashStore

from rankcall import BarrierTimeout, StoreLost, WorldMismatch
from rankcall.store import _claiming, _member, _words, barrier, synchronize
from rankcall.store._keys import keys_of as keys_for
from rankcall.store._link import Link

MOMENT_S = 1e-4
STEPS = st.lists(
    st.tuples(
        st.integers(0, 6),  # which rank, modulo the world's size
        st.sampled_from([0, 0, 0, 0, 0, 1]),  # its process, or another one that believes to be it
        st.sampled_from(["barrier", "barrier", "synchronize", "die"]),
    ),
    max_size=60,
)


@dataclass
class Model:
    """What one prefix must do, in the simplest words. A process that died calls no more."""

    size: int
    owner: dict[int, int] = field(default_factory=dict)
    generation: int = 0
    arrived: dict[int, bytes] = field(default_factory=dict)
    past: list[list[bytes]] = field(default_factory=list)
    reached: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))

    def call(self, rank: int, process: int, data: bytes) -> Any:
        """Return the name of the error and the missing, or what all handed in."""
        if self.owner.setdefault(rank, process) != process:
            return "WorldMismatch"
        if self.reached[rank] == self.generation:
            self.arrived.setdefault(rank, data)
            if len(self.arrived) < self.size:
                return tuple(one for one in range(self.size) if one not in self.arrived)
            self.past.append([self.arrived[one] for one in range(self.size)])
            self.generation, self.arrived = self.generation + 1, {}
        self.reached[rank] += 1
        return self.past[self.reached[rank] - 1]


class Processes:
    """What each process remembers; all live in this one."""

    def __init__(self) -> None:
        self._memories: defaultdict[tuple[int, int], dict[Any, Any]] = defaultdict(dict)

    def act(self, rank: int, process: int, call: Any) -> Any:
        """Do as that process, also while another one is in the middle of something."""
        memory, interrupted = self._memories[rank, process], dict(_member._members)
        _member._members.clear()
        _member._members.update(memory)
        try:
            return call()
        except BarrierTimeout as error:
            return error.missing_ranks
        except WorldMismatch:
            return "WorldMismatch"
        finally:
            memory.clear()
            memory.update(_member._members)
            _member._members.clear()
            _member._members.update(interrupted)


@pytest.fixture(params=[31, 2])
def bits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Use words of their real size, and of two ranks, so that small worlds have several."""
    monkeypatch.setattr(_words, "BITS", request.param)
    monkeypatch.setattr(_words, "_LOW", (1 << request.param) - 1)
    keys_for.cache_clear()
    yield int(request.param)
    keys_for.cache_clear()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=120)
@given(size=st.integers(1, 5), steps=STEPS)
def test_schedules(bits: int, size: int, steps: list[tuple[int, int, str]]) -> None:
    """Whatever the order, each call passes, or names exactly the missing, or is turned away."""
    store = HashStore()
    models = {"barrier": Model(size), "synchronize": Model(size)}
    processes, dead = Processes(), set()
    for turn, (number, process, what) in enumerate(steps):
        rank = number % size
        if what == "die":
            dead.add((rank, process))
        if (rank, process) in dead:
            continue
        data = b"%d/%d" % (rank, turn)
        expected = models[what].call(rank, process, data)
        if what == "barrier":
            got = processes.act(
                rank, process, lambda r=rank: barrier(store, size, "p", MOMENT_S, r)
            )
            expected = None if isinstance(expected, list) else expected
        else:
            got = processes.act(
                rank, process,
                lambda r=rank, d=data: synchronize(store, d, r, size, "p", MOMENT_S, host_rank=r),
            )  # fmt: skip
        assert got == expected, (turn, rank, process, what)
        assert len(generations(store, "b")) <= 2
        assert len(generations(store, "s")) <= 3  # the one that is being left, too


@pytest.mark.parametrize("passed", [0, 1, 2])
@pytest.mark.parametrize(("size", "doubled"), [(2, (0, 1)), (3, (0, 1)), (3, (2, 1)), (5, (3, 0))])
def test_doubles_at_once(
    bits: int, size: int, doubled: tuple[int, int], passed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second job on the same store: its ranks come at once, are turned away, and change nothing.

    What one has added and not yet taken back carries into the bits by which the other is judged.
    """
    store, processes = HashStore(), Processes()

    def come(rank: int, process: int = 0) -> Any:
        return processes.act(rank, process, lambda: barrier(store, size, "p", MOMENT_S, rank))

    def all_pass() -> None:
        missing = [tuple(range(rank + 1, size)) for rank in range(size - 1)]
        assert [come(rank) for rank in range(size)] == [*missing, None]
        assert [come(rank) for rank in range(size - 1)] == [None] * (size - 1)

    for _ in range(passed):
        all_pass()
    if not passed:  # two have come, the others have not
        come(doubled[0])
        come(doubled[1])
    told, fits, (first, second) = [], _claiming._fits, doubled

    def overtaken(before: int, rank: int, member: Any) -> bool:
        if not told:
            told.append("")
            told.append(come(second, 1))
        return fits(before, rank, member)

    with monkeypatch.context() as patch:
        patch.setattr(_claiming, "_fits", overtaken)
        told.append(come(first, 1))
    assert told[1:] == ["WorldMismatch"] * 2
    if not passed:
        late = [rank for rank in range(size) if rank not in doubled]
        for rank in late:
            come(rank)
        waiting = [*doubled, *late[:-1]] if late else [doubled[0]]
        assert [come(rank) for rank in waiting] == [None] * len(waiting)
    all_pass()


def test_a_double_that_had_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its addition may be lost: it does not take the rank's own for it, but is turned away."""
    store, processes = HashStore(), Processes()

    def come(rank: int, process: int = 0) -> Any:
        return processes.act(rank, process, lambda: barrier(store, 2, "p", MOMENT_S, rank))

    def lost(link: Link, key: str, amount: int) -> int:
        raise StoreLost("no answer")

    assert [come(0), come(1), come(0)] == [(1,), None, None]
    with monkeypatch.context() as patch:
        patch.setattr(Link, "add", lost)
        with pytest.raises(StoreLost):
            come(0, 1)
    assert come(0, 1) == "WorldMismatch"
    assert [come(0), come(1), come(0)] == [(1,), None, None]


@given(size=st.integers(1, 130), generation=st.integers(0, 5), here=st.sets(st.integers(0, 129)))
def test_words_say_who_is_missing(size: int, generation: int, here: set[int]) -> None:
    """Arrivals add up to words from which exactly the others are missing, in each generation."""
    words: dict[int, int] = defaultdict(int)
    for rank in range(size):
        words[_words.place(rank)[0]] += _words.claim(rank)
        for before in range(generation):
            words[_words.place(rank)[0]] += _words.arrival(rank, before)
    here = {rank for rank in here if rank < size}
    for rank in here:
        word, _ = _words.place(rank)
        assert not _words.was_in(words[word], rank, generation)
        words[word] += _words.arrival(rank, generation)
        assert _words.was_in(words[word], rank, generation)
    assert _words.missing(words, size, generation) == sorted(set(range(size)) - here)
    full = [
        _words.full(words[word], word, size, generation) for word in range(_words.word_count(size))
    ]
    assert all(full) == (len(here) == size)
    assert not any(_words.disturbed(words[w], w, size, generation) for w in words)
    assert all(0 <= value < 1 << 62 for value in words.values())
    assert _words.is_open(words, size) == (0 < len(here) < size)
