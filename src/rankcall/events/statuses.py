"""Make the statuses that hooks get from records: one for each start or end of an op.

The order of a status's fields is that of ``drop_in.STATUS``, here and in ``native/statuses.h``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, repeat, starmap
from typing import Any, TypeVar

import numpy as np

from rankcall.capture.recording import Recording
from rankcall.record import FLAG_DEVICE, OPS, STATUSES, Rows, has_duration
from rankcall.ring.decode import decode_record
from rankcall.ring.follower import (
    Batch,
    Flags,
    Indexes,
    LiveTables,
    RingView,
)
from rankcall.ring.tables import Tables

T = TypeVar("T")
Fields = tuple[Any, ...]
_UNKNOWN = "unknown"
_OP_NAMES, _STATUS_NAMES = np.array(OPS, object), np.array(STATUSES, object)
_ENQUEUED, _STARTED = STATUSES.index("enqueued"), STATUSES.index("started")
# Statuses that are made at once. A list of thousands of new objects sets off the garbage collector
# in the middle, which then goes through all of them; these few are gone before it runs.
_AT_A_TIME = 128


class LazyRecord(Mapping[str, Any]):
    """Every column of one record, by name; decoded when it is read.

    So a hook that reads none of them does not pay for the decoding.
    """

    __slots__ = ("_at", "_maker", "_rows")

    def __init__(self, maker: StatusMaker, rows: Rows, at: int) -> None:
        self._maker = maker
        self._rows = rows
        self._at = at

    def _decoded(self) -> dict[str, Any]:
        return self._maker.decode(self._rows[self._at])

    def __getitem__(self, name: str) -> Any:
        return self._decoded()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._decoded())

    def __len__(self) -> int:
        return len(self._decoded())

    def __repr__(self) -> str:
        return f"LazyRecord({self._decoded()!r})"


class StatusMaker:
    """Names groups, ops and errors of one recording's records. ``tables`` are its side tables."""

    def __init__(self, recording: Recording, tables: LiveTables | None = None) -> None:
        self._live = tables or LiveTables(recording.ring, recording.geometry)
        self._host = recording.host
        self._rank = recording.rank
        self._native = recording.capture.make_statuses
        self._tables = Tables()
        self._labels = self._backends = np.array([_UNKNOWN], object)  # by group id
        self._names = [_UNKNOWN], [_UNKNOWN]  # the same two as lists
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def statuses(
        self, batch: Batch, make: Callable[..., T], starts: bool, ends: bool
    ) -> Iterator[tuple[T, bool]]:
        """Yield the status of each wanted event, made by ``make``, and whether the op ended.

        ``make`` is a class of slots, in the order of the fields.
        """
        self._refresh()
        # Of one op, the start comes before the end.
        wanted = np.column_stack([batch.begins & starts, batch.ends & ends]).ravel()
        at, is_end = np.divmod(np.flatnonzero(wanted), 2)
        ended = is_end.astype(bool)
        made = (self._by_column if self._native is None else self._natively)(
            batch.rows, at, ended, make
        )
        return zip(made, ended.tolist(), strict=True)

    def _natively(
        self, rows: Rows, at: Indexes, ended: Flags, make: Callable[..., T]
    ) -> Iterable[T]:
        """Make statuses natively, and no more at a time than the caches hold."""
        make_statuses = self._native
        assert make_statuses is not None
        names = self, rows, *self._names, OPS, STATUSES, self._tables.strings
        raw: Rows = rows.view(np.uint8)
        return chain.from_iterable(
            make_statuses((make, LazyRecord), names, self._epoch_ns, raw, at[some], ended[some])
            for some in (
                slice(first, first + _AT_A_TIME) for first in range(0, len(at), _AT_A_TIME)
            )
        )

    def _by_column(
        self, rows: Rows, at: Indexes, ended: Flags, make: Callable[..., T]
    ) -> Iterable[T]:
        """Make statuses column by column: a loop's step costs more than all else."""
        group, error = self._known(rows["group"][at]), np.where(ended, rows["error"][at], 0)
        began, completed = rows["enqueued_ns"][at], np.where(ended, rows["completed_ns"][at], 0)
        issued = np.where(rows["flags"][at] & FLAG_DEVICE, _ENQUEUED, _STARTED)
        fields = zip(  # all of one length, or endless
            self._labels[group].tolist(),
            self._backends[group].tolist(),
            rows["seq"][at].tolist(),
            _OP_NAMES[rows["op"][at]].tolist(),
            (np.where(completed != 0, completed, began) + self._epoch_ns).tolist(),
            _durations_ms(began, completed, rows["device_ms"][at], rows["flags"][at]),
            repeat(0),
            _STATUS_NAMES[np.where(ended, rows["status"][at], issued)].tolist(),
            map(self._tables.strings.get, error.tolist()) if error.any() else repeat(None),
            map(LazyRecord, repeat(self), repeat(rows), at.tolist()),
        )
        return starmap(make, fields)

    def unfinished(self, rows: Rows) -> Iterator[Fields]:
        """Yield the fields of the status of each open record."""
        self._refresh()
        for at, row in enumerate(rows):
            group = self._known(row["group"])
            yield (
                self._labels[group],
                self._backends[group],
                int(row["seq"]),
                OPS[row["op"]],
                int(row["enqueued_ns"]) + self._epoch_ns,
                None,
                0,
                STATUSES[row["status"]],
                None,
                LazyRecord(self, rows, at),
            )

    def decode(self, row: Any) -> dict[str, Any]:
        """Return every column of a record, as ``Run.records`` names them."""
        self._refresh()
        values = decode_record(row, self._tables)
        return {"rank": self._rank(), "host": self._host, **values}

    def _known(self, group: Any) -> Any:
        """Return group ids, 0 for those without a name."""
        return np.where(group < len(self._labels), group, 0)

    def _refresh(self) -> None:
        """Read the side tables again if they have grown."""
        tables = self._live.now()
        if tables is self._tables:
            return
        self._tables = tables
        self._labels = np.full(max(tables.groups, default=0) + 1, _UNKNOWN, object)
        self._backends = self._labels.copy()
        for number, group in tables.groups.items():
            self._labels[number], self._backends[number] = group.label, group.backend.lower()
        self._names = self._labels.tolist(), self._backends.tolist()


def _durations_ms(began: Any, completed: Any, device_ms: Any, flags: Any) -> list[float | None]:
    """Return how long each op took, None if that is not known (yet)."""
    took = np.where(np.isnan(device_ms), (completed - began) / 1e6, device_ms).astype(object)
    took[(completed == 0) | ~has_duration(flags, device_ms)] = None
    durations: list[float | None] = took.tolist()
    return durations


def unfinished(recording: Recording) -> list[Fields]:
    """Return the fields of the status of each op in flight, the oldest first."""
    rows = RingView(recording.ring, recording.geometry).unfinished()
    return list(StatusMaker(recording).unfinished(rows))
