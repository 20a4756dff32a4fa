"""Follow this process's own ring: what began and what ended since the last look, what was missed.

Used from one thread. It only reads; the writers never wait for it. A reader that is lapped counts
every event it missed, except of ops still in flight: those are found in the in-flight table.

Ops of one sequence counter are reported in its order, starts and ends alike. Where a back end
finishes a later op first, its end is held back while the earlier one is under way, but for
``HOLD_NS`` at most: an op that hangs must not hide that others end.
"""

from __future__ import annotations

import mmap
import time
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankcall._whole import Rows, copied, joined, picked, put, read_barrier
from rankcall.record import COMMIT_DONE, COMMIT_OPEN, COMMIT_WRITING, RECORD, STATUSES
from rankcall.ring.layout import Geometry

Indexes = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
HOLD_NS = 50_000_000
_ENQUEUED = STATUSES.index("enqueued")
_NEVER_WRITTEN_NS = 100_000_000  # after this, an index that was taken is not going to be written
_CHUNK = 2048  # what does not fit the caches is slow to go through
_MOST_HELD = 2048
_TRIES = 20  # a record is in change for nanoseconds
_UNWRITTEN, _FOUND, _LOST = 0, 1, 2
_NO_ROWS: Rows = np.empty(0, RECORD)
_NO_INDEXES: Indexes = np.empty(0, np.int64)
_NO_FLAGS: Flags = np.empty(0, np.bool_)


class Batch(NamedTuple):
    """Rows in the order to deliver them; of each: whether it began, then whether it ended."""

    rows: Rows
    begins: Flags
    ends: Flags
    dropped: int  # events missed before the first of these


class RingTail:
    """Reads the events of one mapped ring, from record number ``first`` on.

    Of ops that were in flight then, the ends are reported too. ``hold_ns`` of 0 reports every end
    as soon as it is seen.
    """

    def __init__(
        self, ring: mmap.mmap, geometry: Geometry, first: int = 0, hold_ns: int = HOLD_NS
    ) -> None:
        self._hold_ns = hold_ns
        self._capacity = geometry.capacity
        self._slots = np.frombuffer(ring, RECORD, geometry.capacity, geometry.records_offset)
        self._parked = np.frombuffer(
            ring, RECORD, geometry.inflight_capacity, geometry.inflight_offset
        )
        self._words = self._slots["commit"]
        self._next = first
        self._open = _NO_INDEXES  # issued, their end not reported
        self._told = _NO_FLAGS  # of these: whether their start was reported
        self._held = _NO_ROWS  # ended, held back; their start was reported
        self._stalled_at, self._stalled_ns = -1, 0  # waiting for that record, since then
        self._dropped = 0
        if first:
            before = _index(self.open()["commit"])
            self._remember(before[before < first], np.ones(int((before < first).sum()), np.bool_))

    @property
    def unsettled(self) -> bool:
        """Whether more is known to come soon, without a wake-up."""
        return self._stalled_at == self._next or len(self._held) > 0

    @property
    def has_open(self) -> bool:
        """Whether an op is in flight, or an end held back."""
        return len(self._open) + len(self._held) > 0

    def poll(self, issued: int) -> Batch | None:
        """Return what happened up to record number ``issued``, or the first part of it.

        None where nothing did.
        """
        while True:
            before = self._next
            batch = self._look(issued)
            if batch is not None or self._next == before or self._next >= issued:
                return batch

    def awaited(self) -> Rows:
        """Return a copy of every record up to the last look whose end was not reported."""
        rows, state = self._look_up(self._open)
        return picked(rows, state == _FOUND)

    def open(self) -> Rows:
        """Return a copy of every unfinished record, oldest first."""
        words = np.concatenate([self._parked["commit"], self._words])
        words = words[(words != 0) & (words & 3 != COMMIT_DONE)]
        rows, state = self._look_up(np.unique(_index(words)))
        return picked(rows, (state == _FOUND) & (rows["commit"] & 3 != COMMIT_DONE))

    # --- what happened ---

    def _look(self, issued: int) -> Batch | None:
        if issued - self._next > self._capacity + _CHUNK:
            self._leap(issued - self._capacity)
        if not self.has_open:
            fresh = self._fresh(issued)
            return self._events(fresh, np.zeros(len(fresh), np.bool_))
        known, told = self._known()
        held, fresh = self._held, self._fresh(issued)
        self._held = _NO_ROWS
        rows = joined([known, held, fresh])
        told = np.concatenate([told, np.ones(len(held), np.bool_), np.zeros(len(fresh), np.bool_)])
        order = np.argsort(rows["commit"], kind="stable")
        return self._events(picked(rows, order), told[order])

    def _events(self, rows: Rows, told: Flags) -> Batch | None:
        """Make a batch of rows in issue order; what is not over is remembered."""
        if not len(rows):
            return None
        state = rows["commit"] & 3
        ends = state == COMMIT_DONE
        begins = (ends | ((state == COMMIT_OPEN) & (rows["status"] != _ENQUEUED))) & ~told
        if not ends.all():
            self._remember(_index(rows["commit"][~ends]), (told | begins)[~ends])
            held = _overtaking(rows, ends, self._hold_ns)
            if held.any():
                self._held = picked(rows, held)
                ends &= ~held
            happened = begins | ends
            if not happened.any():
                return None
            rows, begins, ends = picked(rows, happened), begins[happened], ends[happened]
        dropped, self._dropped = self._dropped, 0
        return Batch(rows, begins, ends, dropped)

    def _remember(self, index: Indexes, told: Flags) -> None:
        self._open = np.concatenate([self._open, index])
        self._told = np.concatenate([self._told, told])

    # --- reading the ring ---

    def _known(self) -> tuple[Rows, Flags]:
        """Copy the records in flight, and whether the start of each was reported."""
        rows, state = self._look_up(self._open)
        told, found, lost = self._told, state == _FOUND, state == _LOST
        self._dropped += 2 * int(np.count_nonzero(lost)) - int(np.count_nonzero(told[lost]))
        later = state == _UNWRITTEN  # on its way to the in-flight table
        self._open, self._told = self._open[later], told[later]
        return picked(rows, found), told[found]

    def _fresh(self, issued: int) -> Rows:
        """Copy records issued since the last look, up to one that is not written yet."""
        first = self._next & (self._capacity - 1)
        count = min(issued - self._next, _CHUNK, self._capacity - first)
        if count <= 0:
            return _NO_ROWS
        part = slice(first, first + count)
        words = self._words[part].copy()
        read_barrier()
        rows = copied(self._slots[part])
        read_barrier()
        index = np.arange(self._next, self._next + count)
        state = words - ((index + 1) << 2).astype(np.uint64)
        if np.all((words == self._words[part]) & (state - 1 < COMMIT_DONE)):
            self._next += count
            return rows
        return self._fresh_one_by_one(index)

    def _fresh_one_by_one(self, index: Indexes) -> Rows:
        rows, state = self._look_up(index)
        unwritten = np.flatnonzero(state == _UNWRITTEN)
        if len(unwritten) and not self._patient(int(index[unwritten[0]])):
            unwritten = unwritten[1:]  # the first is not going to come: lost
        count = int(unwritten[0]) if len(unwritten) else len(index)
        rows, found = rows[:count], state[:count] == _FOUND
        self._next += count
        self._dropped += 2 * int(np.count_nonzero(~found))
        return picked(rows, found)

    def _leap(self, oldest: int) -> None:
        """Go on from ``oldest``; what is before it is lost, except what is still somewhere."""
        index = _index(np.concatenate([self._parked["commit"], self._words]))
        index = np.unique(index[(self._next <= index) & (index < oldest)])
        self._dropped += 2 * (oldest - self._next - len(index))
        self._remember(index, np.zeros(len(index), np.bool_))
        self._next = oldest

    def _patient(self, index: int) -> bool:
        """Tell whether to wait for a record that was numbered and is not written."""
        now = time.monotonic_ns()
        if self._stalled_at != index:
            self._stalled_at, self._stalled_ns = index, now
        return now - self._stalled_ns < _NEVER_WRITTEN_NS

    def _look_up(self, index: Indexes) -> tuple[Rows, Indexes]:
        """Copy records by index, and say of each whether it was found, lost, or not yet written."""
        rows = np.empty(len(index), RECORD)
        result = np.full(len(index), _UNWRITTEN)
        todo = np.arange(len(index))
        for _ in range(_TRIES):
            wanted = index[todo]
            slots = wanted & (self._capacity - 1)
            words = self._words[slots]
            read_barrier()
            copy = picked(self._slots, slots)
            read_barrier()
            steady = words == self._words[slots]
            holder = _index(words)
            found = steady & (holder == wanted) & (words & 3 != COMMIT_WRITING)
            put(rows, todo[found], picked(copy, found))
            result[todo[found]] = _FOUND
            lapped = todo[holder > wanted]
            if len(lapped):
                parked, result[lapped] = self._look_up_parked(index[lapped])
                put(rows, lapped, parked)
            todo = todo[~found & (holder == wanted)]  # in change at this moment
            if not len(todo):
                break
        return rows, result

    def _look_up_parked(self, index: Indexes) -> tuple[Rows, Indexes]:
        """Copy lapped records that were moved to the in-flight table; the others are lost."""
        for _ in range(_TRIES):
            words = self._parked["commit"].copy()
            read_barrier()
            copy = copied(self._parked)
            read_barrier()
            steady = words == self._parked["commit"]
            if steady.all():
                break
        holders = np.where(steady & (words & 3 != COMMIT_WRITING), _index(words), -1)
        order = np.argsort(holders)
        places = order[np.searchsorted(holders, index, sorter=order) % len(holders)]
        found = holders[places] == index
        elsewhere = _LOST if steady.all() else _UNWRITTEN
        return picked(copy, places), np.where(found, _FOUND, elsewhere)


def _index(words: npt.NDArray[Any]) -> Indexes:
    """Return the record numbers that commit words belong to; -1 where there is none."""
    return (words >> 2).astype(np.int64) - 1


def _overtaking(rows: Rows, ended: Flags, hold_ns: int) -> Flags:
    """Tell which ends overtook, a moment ago, an earlier op of their sequence counter."""
    held = ended & (rows["completed_ns"] > time.monotonic_ns() - hold_ns)
    held[: int(np.argmin(ended))] = False
    if not held.any() or np.count_nonzero(held) > _MOST_HELD:
        return np.zeros(len(rows), np.bool_)
    directions = (rows["op"] * rows["kind"]).tolist()  # send and recv; 0 for collectives
    counters = zip(
        rows["group"].tolist(), directions, rows["peer"].tolist(), rows["tag"].tolist(),
        strict=True,
    )  # fmt: skip
    under_way = set()
    for at, (counter, is_over) in enumerate(zip(counters, ended.tolist(), strict=True)):
        if not is_over:
            under_way.add(counter)
        elif held[at] and counter not in under_way:
            held[at] = False
    return held
