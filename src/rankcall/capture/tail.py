"""Follow this process's own ring: what began and what ended since the last look, and what was missed.

Used from one thread. It only reads; the writers never wait for it. A reader that is lapped counts
every event it missed, except of ops still in flight: those are found in the in-flight table.
"""

from __future__ import annotations

import mmap
import time
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankcall.record import COMMIT_DONE, COMMIT_OPEN, COMMIT_WRITING, RECORD, STATUSES
from rankcall.ring.layout import Geometry

Rows = npt.NDArray[Any]
Indexes = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_ENQUEUED = STATUSES.index("enqueued")
_NEVER_WRITTEN_NS = 100_000_000  # after this, an index that was taken is not going to be written
_CHUNK = 2048
_TRIES = 50  # a record is in change for nanoseconds
_UNWRITTEN, _FOUND, _LOST = 0, 1, 2
_NO_ROWS: Rows = np.empty(0, RECORD)
_NO_INDEXES: Indexes = np.empty(0, np.int64)


class Batch(NamedTuple):
    """Events in the order to deliver them: row ``at`` of ``rows`` began, or ended."""

    rows: Rows
    at: Indexes
    ended: Flags
    dropped: int  # events missed before the first of these


class RingTail:
    """Reads the events of one mapped ring, from record number ``first`` on."""

    def __init__(self, ring: mmap.mmap, geometry: Geometry, first: int = 0) -> None:
        self._capacity = geometry.capacity
        self._slots = np.frombuffer(ring, RECORD, geometry.capacity, geometry.records_offset)
        self._parked = np.frombuffer(
            ring, RECORD, geometry.inflight_capacity, geometry.inflight_offset
        )
        self._next = first
        self._began = _NO_INDEXES  # delivered as begun, not ended
        self._queued = _NO_INDEXES  # issued, not begun on their device
        self._stalled_ns = 0
        self._dropped = 0

    def poll(self, issued: int) -> Batch | None:
        """Return what happened up to record number ``issued``, or the first part of it.

        None where nothing did.
        """
        behind = issued - self._next
        if _CHUNK < behind <= self._capacity:  # what does not fit the caches is slow to go through
            issued = self._next + _CHUNK
        fresh, fresh_index = self._fresh(issued)
        if not len(self._began) and not len(self._queued):
            return self._events(fresh, fresh_index, 0) if len(fresh) else None
        began, began_index = self._known(self._began, events_each=1)
        queued, queued_index = self._known(self._queued, events_each=2)
        rows = np.concatenate([began, queued, fresh])
        index = np.concatenate([began_index, queued_index, fresh_index])
        return self._events(rows, index, len(began))

    def open(self) -> Rows:
        """Return a copy of every unfinished record, oldest first."""
        everything = np.concatenate([self._parked.copy(), self._slots.copy()])
        state = everything["commit"] & 3
        unfinished = everything[(state != COMMIT_DONE) & (state != COMMIT_WRITING)]
        return unfinished[np.unique(unfinished["commit"] >> 2, return_index=True)[1]]

    def _events(self, rows: Rows, index: Indexes, known_begun: int) -> Batch | None:
        ended = rows["commit"] & 3 == COMMIT_DONE
        begun = ended | (rows["status"] != _ENQUEUED)
        self._began, self._queued = index[begun & ~ended], index[~begun]
        begun[:known_begun] = False  # delivered before
        starts, ends = np.flatnonzero(begun), np.flatnonzero(ended)
        if not len(starts) and not len(ends):
            return None
        at = np.concatenate([starts, ends])
        is_end = np.arange(len(at)) >= len(starts)
        order = np.lexsort((is_end, index[at]))
        dropped, self._dropped = self._dropped, 0
        return Batch(rows, at[order], is_end[order], dropped)

    def _known(self, index: Indexes, events_each: int) -> tuple[Rows, Indexes]:
        """Copy records that were open at the last look."""
        rows, state = self._look_up(index)
        self._dropped += events_each * int(np.count_nonzero(state == _LOST))
        found = state == _FOUND
        return rows[found], index[found]

    def _fresh(self, issued: int) -> tuple[Rows, Indexes]:
        """Copy the records issued since the last look, up to one that is not written yet."""
        index = np.arange(self._next, issued)
        if not len(index):
            return _NO_ROWS, _NO_INDEXES
        rows, state = self._look_up(index)
        unwritten = np.flatnonzero(state == _UNWRITTEN)
        if not len(unwritten):
            self._stalled_ns = 0
        elif self._patient():
            index, rows, state = (part[: unwritten[0]] for part in (index, rows, state))
        self._next += len(index)
        found = state == _FOUND
        self._dropped += 2 * (len(index) - int(np.count_nonzero(found)))
        return rows[found], index[found]

    def _patient(self) -> bool:
        """Tell whether to wait for a record that was numbered and is not written."""
        now = time.monotonic_ns()
        if not self._stalled_ns:
            self._stalled_ns = now
        if now - self._stalled_ns < _NEVER_WRITTEN_NS:
            return True
        self._stalled_ns = 0
        return False

    def _look_up(self, index: Indexes) -> tuple[Rows, Indexes]:
        """Copy records by index, and say of each whether it was found, lost, or not yet written."""
        rows = np.empty(len(index), RECORD)
        result = np.full(len(index), _UNWRITTEN)
        todo = np.arange(len(index))
        for _ in range(_TRIES):
            slots = index[todo] & (self._capacity - 1)
            words = self._slots["commit"][slots]
            copy = self._slots[slots]
            steady = words == self._slots["commit"][slots]
            holder = (words >> 2).astype(np.int64) - 1
            state = words & 3
            whole = (state == COMMIT_OPEN) | (state == COMMIT_DONE)
            good = steady & whole & (holder == index[todo])
            rows[todo[good]], result[todo[good]] = copy[good], _FOUND
            lapped = steady & (holder > index[todo])
            if np.any(lapped):
                self._look_up_parked(index, todo[lapped], rows, result)
            left = ~(good | lapped)
            if not left.any():
                break
            todo = todo[left]
        return rows, result

    def _look_up_parked(
        self, index: Indexes, positions: Indexes, rows: Rows, result: Indexes
    ) -> None:
        """Find lapped records that were moved to the in-flight table; the others are lost."""
        result[positions] = _LOST
        for _ in range(_TRIES):
            words = self._parked["commit"].copy()
            copy = self._parked.copy()
            steady = words == self._parked["commit"]
            state = words & 3
            whole = steady & ((state == COMMIT_OPEN) | (state == COMMIT_DONE))
            places = {int(word >> 2) - 1: at for at, word in enumerate(words) if whole[at]}
            for position in positions:
                place = places.get(int(index[position]))
                if place is not None:
                    rows[position], result[position] = copy[place], _FOUND
            if np.all(whole | (words == 0)):
                return
