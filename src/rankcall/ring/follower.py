"""Read this process's own ring while it is written: events, ops in flight, and names.

Readers only read; the writers never wait for them. A follower that is lapped counts every event
that it missed. Ops in flight are not missed: the in-flight table has them.

The start of an op is its issue, on devices, too. Few back ends tell when a device has begun an op,
and those only a second later; an op that its device never begins has to be reported as well.

Ops of one sequence counter are reported in its order, starts and ends alike. If a back end finishes
a later op first, its end is held back while the earlier one is under way, for ``HOLD_NS`` at most:
an op that hangs must not hide that others end.
"""

from __future__ import annotations

import mmap
import time
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankcall.record import (
    COMMIT_DONE,
    COMMIT_WRITING,
    RECORD,
    Rows,
    assign_rows,
    concat_rows,
    copy_rows,
    read_barrier,
    take_rows,
)
from rankcall.ring.layout import Geometry, offset_of
from rankcall.ring.tables import Tables, parse_tables

Indexes = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
# How long an end is held back for an earlier op. A back end may end a small op before a large one
# that was issued earlier. But an op that hangs must not hide the ends of others.
HOLD_NS = 50_000_000
NO_ROWS: Rows = np.empty(0, RECORD)
# A writer takes an index and writes the record right after it, within nanoseconds unless the kernel
# takes the processor away in between. A reader that waited longer for one record than this would
# deliver none of those behind it, so the record is counted as missed.
_NEVER_WRITTEN_NS = 100_000_000
# Records in one look. More than fit the processor's caches are slow to go through. And for arrays
# of 500 elements or more, numpy lets go of the GIL and then waits for it, several times in each
# look, while the training thread holds it.
_CHUNK = 448
# Finding out which ends overtook others is a loop in Python. With more candidates than this, order
# is given up, because the ring might lap the reader meanwhile.
_MOST_HELD = 2048
# A record is in change for nanoseconds, so the second try finds it steady. If its writer was
# stopped in the middle, it counts as not written yet, and the next look finds it.
_TRIES = 20
_UNWRITTEN, _FOUND, _LOST = 0, 1, 2
_NO_INDEXES: Indexes = np.empty(0, np.int64)
_NO_FLAGS: Flags = np.empty(0, np.bool_)


class Batch(NamedTuple):
    """Records in issue order. ``begins`` and ``ends`` mark the ones issued, and the ones ended."""

    rows: Rows
    begins: Flags
    ends: Flags
    dropped: int  # events missed before the first of these


def index_of(rows: Rows) -> Indexes:
    """Return the index of each record in its ring, from 0."""
    return _index(rows["commit"])


class LiveTables:
    """The side tables of a ring that is being written, read again when they have grown."""

    def __init__(self, ring: mmap.mmap, geometry: Geometry) -> None:
        self._ring = ring
        self._start = geometry.tables_offset
        self._known = -1, Tables()  # the bytes that were read, and the tables; set at once

    def now(self) -> Tables:
        """Return the tables as they are now; the same object while nothing was added."""
        at = offset_of("tables_used")
        used = int.from_bytes(self._ring[at : at + 8], "little")
        read, tables = self._known
        if used != read:
            tables = parse_tables(self._ring[self._start : self._start + used])
            self._known = used, tables
        return tables


class RingView:
    """Copies single records out of a mapped ring.

    Each copy is checked: the commit word is read before and after it, and a record whose word has
    changed meanwhile, or belongs to another index, is looked for again.
    """

    def __init__(self, ring: mmap.mmap, geometry: Geometry) -> None:
        self._capacity = geometry.capacity
        self._slots = np.frombuffer(ring, RECORD, geometry.capacity, geometry.records_offset)
        self._parked = np.frombuffer(
            ring, RECORD, geometry.inflight_capacity, geometry.inflight_offset
        )
        self._words = self._slots["commit"]

    def unfinished(self) -> Rows:
        """Return a copy of every unfinished record, oldest first."""
        words = np.concatenate([self._parked["commit"], self._words])
        words = words[(words != 0) & (words & 3 != COMMIT_DONE)]
        rows, state = self._look_up(np.unique(_index(words)))
        return take_rows(rows, (state == _FOUND) & (rows["commit"] & 3 != COMMIT_DONE))

    def all_until(self, head: int) -> Rows:
        """Return a copy of each record before number ``head`` that is still there, in order."""
        rows, state = self._look_up(np.arange(max(0, head - self._capacity), head))
        return take_rows(rows, state == _FOUND)

    def _look_up(self, index: Indexes) -> tuple[Rows, Indexes]:
        """Copy records by index; return them, and whether each was found, lost or not written."""
        rows = np.empty(len(index), RECORD)
        state = np.full(len(index), _UNWRITTEN)
        todo = np.arange(len(index))
        for _ in range(_TRIES):
            wanted = index[todo]
            slots = wanted & (self._capacity - 1)
            words = self._words[slots]
            read_barrier()
            copy = take_rows(self._slots, slots)
            read_barrier()
            steady = words == self._words[slots]
            holder = _index(words)
            present = steady & (holder == wanted) & (words & 3 != COMMIT_WRITING)
            assign_rows(rows, todo[present], take_rows(copy, present))
            state[todo[present]] = _FOUND
            lapped = todo[holder > wanted]
            if len(lapped):
                parked, state[lapped] = self._look_up_parked(index[lapped])
                assign_rows(rows, lapped, parked)
            todo = todo[~present & (holder == wanted)]  # in change at this moment
            if not len(todo):
                break
        return rows, state

    def _look_up_parked(self, index: Indexes) -> tuple[Rows, Indexes]:
        """Copy lapped records that were moved to the in-flight table; the others are lost."""
        for _ in range(_TRIES):
            words = self._parked["commit"].copy()
            read_barrier()
            copy = copy_rows(self._parked)
            read_barrier()
            steady = words == self._parked["commit"]
            if steady.all():
                break
        holders = np.where(steady & (words & 3 != COMMIT_WRITING), _index(words), -1)
        order = np.argsort(holders)
        places = order[np.searchsorted(holders, index, sorter=order) % len(holders)]
        is_parked = holders[places] == index
        elsewhere = _LOST if steady.all() else _UNWRITTEN
        return take_rows(copy, places), np.where(is_parked, _FOUND, elsewhere)


class RingFollower(RingView):
    """Reports the events of one mapped ring, from record number ``first`` on.

    Of ops that were in flight then, the ends are reported, too. Use it from one thread at a time.
    """

    def __init__(self, ring: mmap.mmap, geometry: Geometry, first: int = 0) -> None:
        super().__init__(ring, geometry)
        self._next = first
        self._open = _NO_INDEXES  # issued, and their end is not reported
        self._start_reported = _NO_FLAGS  # of these: whether their start was reported
        self._held = NO_ROWS  # ended and held back; their start was reported
        self._stalled_at, self._stalled_ns = -1, 0  # waiting for that record, since then
        self._dropped = 0
        if first:
            before = index_of(self.unfinished())
            before = before[before < first]
            self._remember(before, np.ones(len(before), np.bool_))

    @property
    def unsettled(self) -> bool:
        """Whether more is known to come soon, without a wake-up."""
        return self._stalled_at == self._next or len(self._held) > 0

    @property
    def has_open(self) -> bool:
        """Whether an op is in flight, or an end is held back."""
        return len(self._open) + len(self._held) > 0

    @property
    def open_indexes(self) -> Indexes:
        """The indexes of the ops in flight."""
        return self._open

    def poll(self, issued: int) -> Batch | None:
        """Return what happened up to record number ``issued``, or the first part of it.

        Returns None if nothing did.
        """
        while True:
            before = self._next
            batch = self._look(issued)
            if batch is not None or self._next == before or self._next >= issued:
                return batch

    def in_flight(self) -> Rows:
        """Return a copy of every record up to the last poll whose end was not reported."""
        if not len(self._open):
            return NO_ROWS
        rows, state = self._look_up(self._open)
        return take_rows(rows, state == _FOUND)

    def _look(self, issued: int) -> Batch | None:
        # Records that the ring has lapped are looked up one by one, which only a chunk of them is
        # worth. A reader that is further behind would be lapped again before it had done that.
        if issued - self._next > self._capacity + _CHUNK:
            self._leap(issued - self._capacity)
        if not self.has_open:
            fresh = self._fresh(issued)
            return self._events(fresh, np.zeros(len(fresh), np.bool_))
        known, reported = self._known()
        held, fresh = self._held, self._fresh(issued)
        self._held = NO_ROWS
        rows = concat_rows([known, held, fresh])
        reported = np.concatenate(
            [reported, np.ones(len(held), np.bool_), np.zeros(len(fresh), np.bool_)]
        )
        order = np.argsort(rows["commit"], kind="stable")
        return self._events(take_rows(rows, order), reported[order])

    def _events(self, rows: Rows, reported: Flags) -> Batch | None:
        """Make a batch of rows in issue order; remember the ops that have not ended."""
        if not len(rows):
            return None
        ends = rows["commit"] & 3 == COMMIT_DONE
        begins = ~reported
        if not ends.all():
            open_indexes = _index(rows["commit"][~ends])
            self._remember(open_indexes, np.ones(len(open_indexes), np.bool_))
            held = _overtaking(rows, ends)
            if held.any():
                self._held = take_rows(rows, held)
                ends &= ~held
            happened = begins | ends
            if not happened.any():
                return None
            rows, begins, ends = take_rows(rows, happened), begins[happened], ends[happened]
        dropped, self._dropped = self._dropped, 0
        return Batch(rows, begins, ends, dropped)

    def _remember(self, index: Indexes, reported: Flags) -> None:
        self._open = np.concatenate([self._open, index])
        self._start_reported = np.concatenate([self._start_reported, reported])

    def _known(self) -> tuple[Rows, Flags]:
        """Copy the records in flight, and whether the start of each was reported."""
        rows, state = self._look_up(self._open)
        reported, present, lost = self._start_reported, state == _FOUND, state == _LOST
        # Each lost op has two events, of which its start may have been reported.
        self._dropped += 2 * int(np.count_nonzero(lost)) - int(np.count_nonzero(reported[lost]))
        later = state == _UNWRITTEN  # on its way to the in-flight table
        self._open, self._start_reported = self._open[later], reported[later]
        return take_rows(rows, present), reported[present]

    def _fresh(self, issued: int) -> Rows:
        """Copy records issued since the last look, up to one that is not written yet."""
        first = self._next & (self._capacity - 1)
        count = min(issued - self._next, _CHUNK, self._capacity - first)
        if count <= 0:
            return NO_ROWS
        part = slice(first, first + count)
        words = self._words[part].copy()
        read_barrier()
        rows = copy_rows(self._slots[part])
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
        rows, present = rows[:count], state[:count] == _FOUND
        self._next += count
        self._dropped += 2 * int(np.count_nonzero(~present))
        return take_rows(rows, present)

    def _leap(self, oldest: int) -> None:
        """Go on from ``oldest``. Records before it are lost, unless they are still in the file."""
        index = _index(np.concatenate([self._parked["commit"], self._words]))
        index = np.unique(index[(self._next <= index) & (index < oldest)])
        self._dropped += 2 * (oldest - self._next - len(index))
        self._remember(index, np.zeros(len(index), np.bool_))
        self._next = oldest

    def _patient(self, index: int) -> bool:
        """Return whether to wait for a record that was numbered and is not written."""
        now = time.monotonic_ns()
        if self._stalled_at != index:
            self._stalled_at, self._stalled_ns = index, now
        return now - self._stalled_ns < _NEVER_WRITTEN_NS


def _index(words: npt.NDArray[Any]) -> Indexes:
    """Return the record numbers that commit words belong to; -1 for an empty slot."""
    return (words >> 2).astype(np.int64) - 1


def _overtaking(rows: Rows, ended: Flags) -> Flags:
    """Mark the ends that overtook, a moment ago, an earlier op of their sequence counter."""
    held = ended & (rows["completed_ns"] > time.monotonic_ns() - HOLD_NS)
    held[: int(np.argmin(ended))] = False
    if not held.any() or np.count_nonzero(held) > _MOST_HELD:
        return np.zeros(len(rows), np.bool_)
    directions = (rows["op"] * rows["kind"]).tolist()  # send and recv; 0 for collectives
    counters = zip(
        rows["group"].tolist(),
        directions,
        rows["peer"].tolist(),
        rows["tag"].tolist(),
        strict=True,
    )
    under_way = set()
    for at, (counter, is_over) in enumerate(zip(counters, ended.tolist(), strict=True)):
        if not is_over:
            under_way.add(counter)
        elif held[at] and counter not in under_way:
            held[at] = False
    return held
