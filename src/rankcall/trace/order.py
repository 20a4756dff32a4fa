"""Decide when each op is described: in issue order per group, and one call of a function as one op.

An op that ended waits while an earlier op of its group is in flight. An op that has been in flight
for ``OVERDUE_NS`` is described as issued, and no longer blocks the later ones. When the trace ends,
each op that is still in flight is described as issued. The ops of one call that sends pickles are
merged into one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rankcall.record import (
    OBJECT_CALLS,
    PICKLE_DTYPE,
    RECORD,
    STATUSES,
    Rows,
    concat_rows,
    take_rows,
)
from rankcall.ring.follower import Flags, index_of
from rankcall.ring.tables import Tables

# After this time in flight, an op is described as issued, and delays the descriptions of later ops
# no more. Most ops of a healthy job are shorter, so few of them are described twice.
OVERDUE_NS = 5_000_000_000
# A call that sends pickles issues two or three ops, one right after the other. If one of them does
# not come within this time, it never will, for example because the call has raised.
_STALE_NS = 1_000_000_000
_MOST_WAITING = 1 << 16  # bounds the memory if a group's first op hangs and others end by millions

_FAILED = STATUSES.index("failed")
_NONE: Rows = np.empty(0, RECORD)


def _in_order(rows: Rows) -> Rows:
    """Return records in issue order; an earlier op may have ended while later ones were read."""
    commits = rows["commit"]
    if not np.any(commits[1:] < commits[:-1]):
        return rows
    return take_rows(rows, np.argsort(commits, kind="stable"))


class Order:
    """Holds back the ops that must wait. Each recording has its own; use it from one thread."""

    def __init__(self) -> None:
        self._waiting = _NONE
        self._described: set[int] = set()  # ops in flight that were described as issued
        self._tables: Tables | None = None
        self._object_sites: npt.NDArray[np.uint32] = np.empty(0, np.uint32)
        self._calls: dict[int, int] = {}

    @property
    def waiting(self) -> int:
        """How many ended ops are held back."""
        return len(self._waiting)

    def take(
        self, ended: Rows, awaited: Rows, tables: Tables, now_ns: int, last: bool = False
    ) -> tuple[Rows, Flags]:
        """Return the rows to describe now, in issue order, and which of them are still in flight.

        Args:
            ended: The ops that ended since the last call.
            awaited: The ops that are in flight.
            tables: The side tables of the recording.
            now_ns: The monotonic clock.
            last: Whether this is the last call. It returns everything that waits, and the ops in
                flight that were not described.
        """
        self._learn(tables)
        objects = self._are_objects(ended)
        if not (len(awaited) or len(self._waiting) or objects.any()):
            self._described.clear()
            return _in_order(ended), np.zeros(len(ended), np.bool_)
        rows = _in_order(concat_rows([self._waiting, ended]))
        overdue, blocking = self._split(awaited, now_ns, last)
        rows, held = self._hold(rows, awaited, blocking, now_ns)
        if last or np.count_nonzero(held) > _MOST_WAITING:
            held[:] = False
        self._waiting = take_rows(rows, held)
        ready = self._merged(take_rows(rows, ~held))
        issued = np.concatenate([np.zeros(len(ready), np.bool_), np.ones(len(overdue), np.bool_)])
        ready = concat_rows([ready, overdue])
        order = np.argsort(ready["commit"], kind="stable")
        return take_rows(ready, order), issued[order]

    def _learn(self, tables: Tables) -> None:
        """Note the call sites of functions that send pickles."""
        if tables is self._tables:
            return
        self._tables = tables
        self._calls = {
            number: OBJECT_CALLS[site.api]
            for number, site in tables.sites.items()
            if site.api in OBJECT_CALLS
        }
        self._object_sites = np.array(list(self._calls), np.uint32)

    def _are_objects(self, rows: Rows) -> Flags:
        if not len(self._object_sites):
            return np.zeros(len(rows), np.bool_)
        return np.isin(rows["call_site"], self._object_sites)

    def _split(self, awaited: Rows, now_ns: int, last: bool) -> tuple[Rows, Rows]:
        """Return the ops in flight to describe as issued now, and the ops that block later ones."""
        index = index_of(awaited)
        self._described &= set(index.tolist())
        described = np.isin(index, list(self._described))
        overdue = ~described & (last | (awaited["enqueued_ns"] < now_ns - OVERDUE_NS))
        self._described.update(index[overdue].tolist())
        return take_rows(awaited, overdue), take_rows(awaited, ~described & ~overdue)

    def _hold(self, rows: Rows, awaited: Rows, blocking: Rows, now_ns: int) -> tuple[Rows, Flags]:
        """Return the rows, and a mask of those that have to wait."""
        held = np.zeros(len(rows), np.bool_)
        first: dict[int, int] = {}  # group -> its earliest record that has not ended
        for group, index in zip(blocking["group"].tolist(), index_of(blocking), strict=True):
            first[group] = min(first.get(group, int(index)), int(index))
        calls = self._calls_in(rows)
        for parts in calls:
            if not self._is_whole(take_rows(rows, np.array(parts)), awaited, now_ns):
                held[parts] = True
                group, index = int(rows["group"][parts[0]]), int(index_of(rows[parts])[0])
                first[group] = min(first.get(group, index), index)
        index = index_of(rows)
        for group, blocker in first.items():
            held |= (rows["group"] == group) & (index > blocker)
        for parts in calls:
            held[parts] = held[parts].any()
        return rows, held

    def _calls_in(self, rows: Rows) -> list[list[int]]:
        """Return the indexes of the ops of each call of an object function."""
        calls: dict[int, list[int]] = {}
        for at in np.flatnonzero(self._are_objects(rows)).tolist():
            calls.setdefault(int(rows["correlation"][at]), []).append(at)
        return list(calls.values())

    def _is_whole(self, parts: Rows, awaited: Rows, now_ns: int) -> bool:
        if len(parts) >= self._calls[int(parts["call_site"][0])]:
            return True
        if (parts["status"] == _FAILED).any():
            return True
        more = (awaited["correlation"] == parts["correlation"][0]).any()
        return not more and int(parts["completed_ns"].max()) < now_ns - _STALE_NS

    def _merged(self, rows: Rows) -> Rows:
        """Merge each call into the row of its pickles, from the first start to the last end.

        The lengths that are sent beside the pickles are no messages of the user's.
        """
        calls = self._calls_in(rows)
        if not calls:
            return rows
        kept = np.ones(len(rows), np.bool_)
        for parts in calls:
            pickles = [at for at in parts if rows["dtype"][at] == PICKLE_DTYPE]
            chosen = (pickles or parts)[-1]
            kept[parts], kept[chosen] = False, True
            ends = rows["completed_ns"][parts]
            for name in ("enqueued_ns", "started_ns"):
                rows[name][chosen] = rows[name][parts[0]]
            rows["completed_ns"][chosen] = ends.max() if ends.all() else 0
            if (rows["status"][parts] == _FAILED).any():
                rows["status"][chosen] = _FAILED
        return take_rows(rows, kept)
