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
_COLUMNS = ("group", "seq", "op", "started_ns", "completed_ns", "status", "error", "device_ms")


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


class StatusMaker:
    """Names groups, ops and errors of one recording's records."""

    def __init__(self, recording: Recording) -> None:
        self._ring = recording.ring
        self._geometry = recording.geometry
        self._host = recording.host
        self._rank = recording.rank
        self._tables = Tables()
        self._tables_used = -1
        self._names: dict[int, tuple[str, str]] = {}
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def statuses(
        self, batch: Batch, make: Callable[..., T], starts: bool, ends: bool
    ) -> Iterator[tuple[T, bool]]:
        """Yield the status of each wanted event, made by ``make``, and whether the op ended."""
        rows = batch.rows
        at = batch.at if starts and ends else batch.at[batch.ended == ends]
        ended = batch.ended if starts and ends else batch.ended[batch.ended == ends]
        columns = [rows[name][at].tolist() for name in _COLUMNS]
        dropped, epoch_ns, names = batch.dropped, self._epoch_ns, self._names
        self._refresh()
        strings = self._tables.strings
        for place, is_end, group, seq, op, started, completed, status, error, device_ms in zip(
            at.tolist(), ended.tolist(), *columns, strict=True
        ):
            name, backend = names.get(group) or self._name(group)
            record = Record(self, rows, place)
            if is_end:
                duration = None
                if completed:
                    known = device_ms == device_ms  # not NaN: the device's own clock
                    duration = device_ms if known else (completed - started) / 1e6
                yield make(
                    name, backend, seq, OPS[op], (completed or started) + epoch_ns, duration,
                    dropped, STATUSES[status], strings.get(error), record,
                ), True  # fmt: skip
            else:
                yield make(
                    name, backend, seq, OPS[op], started + epoch_ns, None, dropped,
                    "started", None, record,
                ), False  # fmt: skip
            dropped = 0

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
        if group not in self._tables.groups:
            self._refresh()
        known = self._tables.groups.get(group)
        if known is None:
            return "unknown", "unknown"
        self._names[group] = (known.label, known.backend)
        return self._names[group]

    def _refresh(self) -> None:
        """Read the side tables again if they have grown."""
        at = offset_of("tables_used")
        used = int.from_bytes(self._ring[at : at + 8], "little")
        if used != self._tables_used:
            start = self._geometry.tables_offset
            self._tables = parse_tables(self._ring[start : start + used])
            self._tables_used = used
