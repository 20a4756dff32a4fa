"""Turn ring records into what hooks are told: the fields of a CollectiveStatus, in its order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from rankcall._rows import decode_row
from rankcall.capture.tail import Batch, Rows
from rankcall.record import OPS, STATUSES
from rankcall.ring.layout import offset_of
from rankcall.ring.reader import Tables, parse_tables

if TYPE_CHECKING:
    from rankcall.capture.session import Recording

T = TypeVar("T")
Fields = tuple[Any, ...]
_COLUMNS = (
    "group", "seq", "op", "enqueued_ns", "started_ns", "completed_ns", "status", "error",
    "device_ms",
)  # fmt: skip


class Record(Mapping[str, Any]):
    """Every column of one record, by name; decoded when asked."""

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
        return f"Record({self._decoded()!r})"


class LiveTables:
    """The side tables of a ring that is being written, read again when they have grown."""

    def __init__(self, recording: Recording) -> None:
        self._ring = recording.ring
        self._start = recording.geometry.tables_offset
        self._used = -1
        self._tables = Tables()

    def now(self) -> Tables:
        """Return the tables as they are now; the same object while nothing was added."""
        at = offset_of("tables_used")
        used = int.from_bytes(self._ring[at : at + 8], "little")
        if used != self._used:
            self._tables = parse_tables(self._ring[self._start : self._start + used])
            self._used = used
        return self._tables


class StatusMaker:
    """Names groups, ops and errors of one recording's records."""

    def __init__(self, recording: Recording) -> None:
        self._live = LiveTables(recording)
        self._host = recording.host
        self._rank = recording.rank
        self._tables = Tables()
        self._names: dict[int, tuple[str, str]] = {}
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def statuses(
        self, batch: Batch, make: Callable[..., T], starts: bool, ends: bool
    ) -> Iterator[tuple[T, bool]]:
        """Yield the status of each wanted event, made by ``make``, and whether the op ended.

        Columns are turned into Python's numbers as a whole: this runs for every event.
        """
        self._refresh()
        rows, epoch_ns, names, strings = (
            batch.rows,
            self._epoch_ns,
            self._names,
            self._tables.strings,
        )
        columns = [rows[name].tolist() for name in _COLUMNS]
        events = zip(range(len(rows)), batch.begins.tolist(), batch.ends.tolist(), *columns)  # noqa: B905  # all of one length
        for (
            at,
            begins,
            is_end,
            group,
            seq,
            op,
            enqueued,
            started,
            completed,
            status,
            error,
            device_ms,
        ) in events:
            name, backend = names.get(group) or self._name(group)
            record = Record(self, rows, at)
            began = (started or enqueued) + epoch_ns
            if begins and starts:
                yield make(
                    name, backend, seq, OPS[op], began, None, 0, "started", None, record
                ), False  # fmt: skip
            if is_end and ends:
                duration = None
                if completed:
                    completed += epoch_ns
                    duration = (completed - began) / 1e6 if device_ms != device_ms else device_ms
                yield make(
                    name, backend, seq, OPS[op], completed or began, duration, 0,
                    STATUSES[status], strings.get(error), record,
                ), True  # fmt: skip

    def unfinished(self, rows: Rows) -> Iterator[Fields]:
        """Yield the fields of the status of each open record."""
        self._refresh()
        for at, row in enumerate(rows):
            name, backend = self._name(int(row["group"]))
            since = int(row["started_ns"] or row["enqueued_ns"]) + self._epoch_ns
            yield (
                name, backend, int(row["seq"]), OPS[row["op"]], since, None, 0,
                STATUSES[row["status"]], None, Record(self, rows, at),
            )  # fmt: skip

    def decode(self, row: Any) -> dict[str, Any]:
        """Return every column of a record, as ``Run.records`` names them."""
        self._refresh()
        values = decode_row(row, self._tables)
        return {"rank": self._rank(), "host": self._host, **values}

    def _name(self, group: int) -> tuple[str, str]:
        known = self._tables.groups.get(group)
        if known is None:
            return "unknown", "unknown"
        self._names[group] = (known.label, known.backend.lower())
        return self._names[group]

    def _refresh(self) -> None:
        self._tables = self._live.now()
