"""Read a ring file whose writer may be alive or dead, and decode its records.

The file is treated as hostile: every size, index and code is checked before it is used, nothing is
executed, and the memory needed is bounded by the size of the file. Damaged records are left out and
counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankcall.errors import CorruptRun
from rankcall.process import open_regular
from rankcall.record import (
    CODED,
    COMMIT_CLOSING,
    COMMIT_DONE,
    COMMIT_WRITING,
    FLAG_ABANDONED,
    FLAG_ANY_SOURCE,
    GROUP_RANKS,
    LATE_TIMES,
    MAX_DIMS,
    PLAIN,
    RECORD,
    STATUSES,
    Rows,
    concat_rows,
    device_name,
    format_ranks,
    take_rows,
)
from rankcall.ring import AHEAD, HEADER_BYTES, Group, Header, Tables, parse_header, parse_tables

if TYPE_CHECKING:
    import polars as pl


# Decode records: names for codes and ids, and global ranks for ranks within a group.
#
# ``decode_record`` returns one record as Python values, for hooks. ``decode_ring`` returns the
# records of a ring as columns, for tables. Both give the same values, but a table holds
# ``group_ranks`` and ``shape`` as text, and it has a label for each group that is unique in the
# run.


_FIELDS = RECORD.names or ()


def decode_record(row: Any, tables: Tables) -> dict[str, Any]:
    """Return a record's columns by name; a column that does not apply is None."""
    raw = dict(zip(_FIELDS, row.item(), strict=True))  # all as Python's own numbers, in one call
    group = tables.groups.get(raw["group"])
    site = tables.sites.get(raw["call_site"])
    ranks = group.ranks if group is not None else ()
    device_ms = raw["device_ms"]
    return {
        "index": (raw["commit"] >> 2) - 1,
        "group": group.label if group is not None else None,
        "group_ranks": list(ranks),
        **{name: names[raw[name]] for name, names in CODED.items()},
        "variant": tables.strings.get(raw["variant"]),
        **{name: raw[name] for name in PLAIN},
        "shape": raw["shape"][: raw["ndim"]].tolist(),
        **{name: _global_rank(ranks, raw[name]) for name in GROUP_RANKS},
        "async_op": {0: False, 1: True}.get(raw["async_op"]),
        "device": device_name(raw["device_type"], raw["device_index"]),
        "call_site": str(site) if site is not None else None,
        "user_line": site.user_line or None if site is not None else None,
        "function": site.function if site is not None else None,
        "api": site.api if site is not None else None,
        "correlation": raw["correlation"],
        "error": tables.strings.get(raw["error"]) if raw["error"] else None,
        "abandoned": bool(raw["flags"] & FLAG_ABANDONED),
        **{name: raw[name] or None for name in LATE_TIMES},
        "device_ms": device_ms if device_ms == device_ms else None,
    }


def _global_rank(ranks: tuple[int, ...], local: int) -> int | None:
    return ranks[local] if 0 <= local < len(ranks) else None


class Column(NamedTuple):
    """One column: numbers, or indexes into a list of names.

    NumPy makes the columns, so that a process that only records does not load Polars (0.5 s).
    """

    values: npt.NDArray[Any]
    names: Sequence[str | None] | None = None
    absent: npt.NDArray[np.bool_] | None = None  # rows without a value; None: every row has one
    complete: bool = False  # ``names`` are all that there can ever be

    def series(self) -> pl.Series:
        """Return the column as a Polars series, with null for absent values."""
        import polars as pl

        column = pl.Series(np.ascontiguousarray(self.values))
        if self.absent is not None and self.absent.any():
            column = column.set(pl.Series(self.absent), None)
        if self.names is None:
            return column
        if self.complete:
            known = [name for name in self.names if name is not None]
            no_gaps = len(known) == len(self.names)
            names = pl.Series(self.names, dtype=pl.Enum(known) if no_gaps else pl.String)
        else:
            names = pl.Series(self.names, dtype=pl.String).cast(pl.Categorical)
        return names.gather(column)


def decode_ring(ring: Ring, labels: Mapping[Group, str]) -> dict[str, Column]:
    """Return the columns of a ring's records, by name; docs/records.md lists them.

    Args:
        ring: The ring.
        labels: The run's labels of its groups. A group that is not among them, because it was made
            since, has its own name.
    """
    rows, header, groups = ring.records, ring.header, ring.tables.groups
    sites, strings = ring.tables.sites, ring.tables.strings

    def of_group(text: Callable[[Group], str]) -> Column:
        return _named(rows["group"], {key: text(group) for key, group in groups.items()})

    return {
        "rank": Column(np.full(len(rows), header.rank, np.int32)),
        "attempt": Column(np.full(len(rows), header.attempt, np.int32)),
        "host": Column(np.zeros(len(rows), np.uint32), [header.host]),
        "index": Column((rows["commit"] >> 2).astype(np.int64) - 1),
        "group": of_group(lambda group: labels.get(group, group.label)),
        "group_ranks": of_group(lambda group: format_ranks(group.ranks)),
        **{
            name: Column(rows[name].astype(np.uint32), names, complete=True)
            for name, names in CODED.items()
        },
        "variant": _named(rows["variant"], strings),
        **{name: Column(rows[name]) for name in PLAIN},
        "shape": _shapes(rows),
        **{name: _global_ranks(rows, name, groups) for name in GROUP_RANKS},
        "async_op": Column(rows["async_op"] == 1, absent=rows["async_op"] == 2),
        "device": _devices(rows),
        "call_site": _named(rows["call_site"], {key: str(site) for key, site in sites.items()}),
        "user_line": _named(
            rows["call_site"], {key: site.user_line for key, site in sites.items() if site.user}
        ),
        "function": _named(rows["call_site"], {key: site.function for key, site in sites.items()}),
        "api": _named(rows["call_site"], {key: site.api for key, site in sites.items()}),
        "correlation": Column(rows["correlation"]),
        "error": _named(rows["error"], strings),
        "abandoned": Column(rows["flags"] & FLAG_ABANDONED != 0),
        **{name: Column(rows[name], absent=rows[name] == 0) for name in LATE_TIMES},
        "device_ms": Column(rows["device_ms"], absent=np.isnan(rows["device_ms"])),
    }


def _named(ids: npt.NDArray[Any], names: Mapping[int, str]) -> Column:
    """Return the names of ids; an id without a name is absent."""
    known = np.array(sorted(names), dtype=np.uint32)
    if not len(known):
        return Column(np.zeros(len(ids), np.uint32), [""], np.ones(len(ids), np.bool_))
    at = np.searchsorted(known, ids).clip(max=len(known) - 1)
    texts = [names[key] for key in known.tolist()]
    return Column(at.astype(np.uint32), texts, known[at] != ids)


def _shapes(rows: Rows) -> Column:
    """Return shapes as text, ``[4, 8]``. A run has few different shapes; each is formatted once."""
    key = np.column_stack([rows["ndim"].astype(np.int64), rows["shape"]])
    shapes, which = _distinct_rows(key)
    texts = [str(shape[1 : 1 + shape[0]].tolist()) for shape in shapes]
    return Column(which.ravel().astype(np.uint32), texts)


def _distinct_rows(
    rows: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.intp]]:
    """Return the distinct rows, and for each row the index of its equal among them.

    Sorting one hash per row is ten times as fast as sorting the rows.
    """
    odd = np.cumprod(np.full(rows.shape[1], 0x5851F42D4C957F2D, np.uint64))
    hashes = (rows.view(np.uint64) * odd).sum(axis=1, dtype=np.uint64)
    _, first, which = np.unique(hashes, return_index=True, return_inverse=True)
    distinct = rows[first]
    if np.array_equal(distinct[which], rows):
        return distinct, which
    return np.unique(rows, axis=0, return_inverse=True)


def _devices(rows: Rows) -> Column:
    types, indexes = rows["device_type"].astype(np.int64), rows["device_index"].astype(np.int64)
    keys, which = np.unique(types * 65536 + (indexes + 32768), return_inverse=True)
    names = [device_name(key // 65536, key % 65536 - 32768) for key in keys.tolist()]
    return Column(which.ravel().astype(np.uint32), names)


def _global_ranks(rows: Rows, name: str, groups: Mapping[int, Group]) -> Column:
    """Translate ranks within their groups to global ranks; absent if none applies."""
    local = rows[name]
    result = np.full(len(rows), -1, np.int32)
    if (local >= 0).any():
        for key, group in groups.items():
            ranks = np.array(group.ranks, np.int32)
            mine = (rows["group"] == key) & (local >= 0) & (local < len(ranks))
            result[mine] = ranks[local[mine]]
    return Column(result, absent=result < 0)


Records = npt.NDArray[Any]


@dataclass(frozen=True)
class Head:
    """A ring file without its records."""

    path: Path
    header: Header
    tables: Tables
    problem: str | None = None

    def without_records(self) -> Ring:
        """Return the ring as if it had no records."""
        return Ring(self.path, self.header, np.zeros(0, RECORD), self.tables, 0)


@dataclass
class Ring:
    """One rank's ring as it was when it was read. ``records`` are in issue order."""

    path: Path
    header: Header
    records: Records
    tables: Tables
    dropped: int  # records that were overwritten or lost before they could be read
    problem: str | None = None
    # The versions of the records and the side tables, as they were on file.
    on_file: tuple[bytes, bytes] | None = field(default=None, repr=False, compare=False)


def read_ring(
    path: str | os.PathLike[str], newest: int | None = None, before: Ring | None = None
) -> Ring:
    """Read one ring file. A file that was cut off gives the rest of its records, and a ``problem``.

    Args:
        path: The file. Its writer may be alive.
        newest: Read only this many records, the last ones.
        before: The same file, as it was read earlier with the same ``newest``. What has not
            changed since is not decoded again: the result shares it.

    Raises:
        CorruptRun: The file is not a ring, has another schema, or its header is damaged.
    """
    path = path if isinstance(path, Path) else Path(path)
    try:
        with open_regular(path) as file:
            return _read(path, file.fileno(), newest, before)
    except OSError as error:
        raise CorruptRun(f"{path}: cannot be read: {error.strerror}") from error


def read_head(path: str | os.PathLike[str]) -> Head:
    """Read a ring's header and side tables. Raises ``CorruptRun`` as ``read_ring`` does."""
    path = path if isinstance(path, Path) else Path(path)
    try:
        with open_regular(path) as file:
            fd = file.fileno()
            return _read_head(path, fd, os.fstat(fd).st_size)[0]
    except OSError as error:
        raise CorruptRun(f"{path}: cannot be read: {error.strerror}") from error


def _read_head(path: Path, fd: int, size: int, before: Ring | None = None) -> tuple[Head, bytes]:
    """Return the head, and the side tables as they are on file."""
    raw = os.pread(fd, HEADER_BYTES, 0)
    header = parse_header(raw, str(path))
    shape = header.geometry
    problem = None
    if size < header.file_bytes:
        problem = f"{path}: truncated: {size:,} of {header.file_bytes:,} bytes are left"
    used = min(header.tables_used, shape.tables_bytes, max(0, size - shape.tables_offset))
    raw_tables = os.pread(fd, used, shape.tables_offset)
    if before is not None and before.on_file is not None and before.on_file[1] == raw_tables:
        tables = before.tables
    else:
        tables = parse_tables(raw_tables)
    if tables.damaged and problem is None:
        problem = f"{path}: damaged side tables; some names are lost"
    return Head(path, header, tables, problem), raw_tables


def _read(path: Path, fd: int, newest: int | None, before: Ring | None) -> Ring:
    size = os.fstat(fd).st_size
    head, raw_tables = _read_head(path, fd, size, before)
    header, shape = head.header, head.header.geometry
    live = header.closed_ns == 0
    if before is not None and newest is not None:
        slots, parked, _ = _slots(fd, size, header, newest, live=False)
        if before.on_file == (_versions(slots, parked), raw_tables):
            same = before.records, before.tables, before.dropped
            return Ring(path, header, *same, head.problem, before.on_file)
    slots, parked, spans = _slots(fd, size, header, newest, live)
    on_file = (_versions(slots, parked), raw_tables) if newest is not None else None
    places = np.concatenate([np.arange(first, first + count) for first, count in spans])
    records, torn = _sound(slots, places[: len(slots)], parked, shape.capacity)
    last = int(records["commit"][-1] >> 2) if len(records) else 0
    kept = len(records)
    if newest is not None:  # records that were not read are not lost
        older = int(np.count_nonzero(records["commit"] >> 2 <= max(0, last - shape.capacity)))
        kept = min(last, shape.capacity) + older
    dropped = max(last - kept, torn)
    return Ring(path, header, records, head.tables, dropped, head.problem, on_file)


def _slots(
    fd: int, size: int, header: Header, newest: int | None, live: bool
) -> tuple[Records, Records, list[tuple[int, int]]]:
    """Return the slots of the records to read, those of old ops in flight, and where the first are.

    ``live``: wait until records that are being written are stable.
    """
    shape = header.geometry
    bytes_there = _bytes_worth_reading(header, min(size, header.file_bytes))
    spans = _spans(header, bytes_there // RECORD.itemsize, newest)
    pieces = [
        _read_records(
            fd, shape.records_offset + first * RECORD.itemsize, count * RECORD.itemsize, live
        )
        for first, count in spans
    ]
    parked_bytes = min(
        shape.inflight_capacity * RECORD.itemsize, max(0, size - shape.inflight_offset)
    )
    return concat_rows(pieces), _read_records(fd, shape.inflight_offset, parked_bytes, live), spans


def _versions(slots: Records, parked: Records) -> bytes:
    """Return what changes whenever a record does."""
    used = parked["commit"] != 0
    parts = (slots, take_rows(parked, used)) if used.any() else (slots,)
    columns = ("commit", "status", "started_ns", "completed_ns")
    return b"".join([part[name].tobytes() for part in parts for name in columns])


def _spans(header: Header, count: int, newest: int | None) -> list[tuple[int, int]]:
    """Return the slots to read as pairs (first, count): all, or those of the newest records."""
    if newest is None or count <= newest + AHEAD:
        return [(0, count)]
    capacity = header.geometry.capacity
    first, length = (header.head - newest) % capacity, min(newest + AHEAD, capacity)
    before_end = max(0, min(length, count - first))
    return [(first, before_end), (0, min(length - before_end, first))]


def _bytes_worth_reading(header: Header, size: int) -> int:
    """Return how many bytes of the record region can hold records.

    ``head`` may lag behind the writers by as many records as there are threads.
    """
    records = min(header.head + AHEAD, header.geometry.capacity)
    return max(0, min(records * RECORD.itemsize, size - header.geometry.records_offset))


def _read_records(fd: int, offset: int, length: int, live: bool) -> Records:
    """Copy records out of the file; one that changes meanwhile is copied until it is stable."""
    first = _pread_records(fd, offset, length)
    if not live:
        return first
    again = _pread_records(fd, offset, length)
    count = min(len(first), len(again))
    first, again = first[:count], again[:count]
    for slot in np.flatnonzero(first["commit"] != again["commit"]):
        first[slot] = _stable_record(fd, offset + int(slot) * RECORD.itemsize)
    return first


def _pread_records(fd: int, offset: int, length: int) -> Records:
    buffer = np.empty(length // RECORD.itemsize, RECORD)
    raw: Any = buffer.view(np.uint8)
    got = os.preadv(fd, [raw], offset) if length else 0
    return buffer[: got // RECORD.itemsize]


def _stable_record(fd: int, offset: int) -> Records:
    for _ in range(8):
        copy = _pread_records(fd, offset, RECORD.itemsize)
        check = _pread_records(fd, offset, RECORD.itemsize)
        if len(copy) and len(check) and copy["commit"][0] == check["commit"][0]:
            return copy[0]  # type: ignore[no-any-return]
    return np.zeros(1, RECORD)[0]  # type: ignore[no-any-return]


def _sound(
    slots: Records, places: npt.NDArray[np.intp], parked: Records, capacity: int
) -> tuple[Records, int]:
    """Return the sound records in issue order, and the number of half-written ones.

    ``places`` are the indexes of the slots.
    """
    words = np.ascontiguousarray(slots["commit"])
    written = int(np.count_nonzero(words))
    if _undisturbed(words[:written]) and not np.any(parked["commit"]):
        return _only(slots[:written], _codes_known(slots[:written])), 0
    at_home = ((words >> 2) - 1) & (capacity - 1) == places.astype(np.uint64)
    used = words != 0
    torn = int(np.count_nonzero(used & at_home & (words & 3 == COMMIT_WRITING)))
    kept = _only(slots, used & at_home & (words & 3 != COMMIT_WRITING))
    if np.any(parked["commit"]):
        parked = parked[(parked["commit"] != 0) & (parked["commit"] & 3 != COMMIT_WRITING)]
        # If the writer was killed while it moved a record, the ring has two copies. The copy in the
        # in-flight table is the newer one.
        others = ~np.isin(kept["commit"] >> 2, parked["commit"] >> 2)
        kept = concat_rows([parked, take_rows(kept, others)])
    order = kept["commit"] >> 2
    if np.any(order[1:] <= order[:-1]):
        kept = take_rows(kept, np.unique(order, return_index=True)[1])
    kept = _only(kept, _codes_known(kept))
    _blank_unfinished(kept)
    return kept, torn


def _undisturbed(words: npt.NDArray[np.uint64]) -> bool:
    """Return whether all records are finished and no slot was reused, as in most rings."""
    finished = np.arange(4 | COMMIT_DONE, 4 * len(words) + 4, 4, dtype=np.uint64)
    return np.array_equal(words, finished)


def _only(records: Records, wanted: npt.NDArray[np.bool_]) -> Records:
    """Return the wanted records; if these are all records, they are not copied."""
    return records if wanted.all() else take_rows(records, wanted)


def _codes_known(records: Records) -> npt.NDArray[np.bool_]:
    known = (records["ndim"] <= MAX_DIMS) & (records["async_op"] <= 2)
    for name, names in CODED.items():
        known &= records[name] < len(names)
    return known


def _blank_unfinished(records: Records) -> None:
    """Clear the completion fields of records that were read while their writer set these fields."""
    rows = np.flatnonzero(records["commit"] & 3 == COMMIT_CLOSING)
    if len(rows):
        part = records[rows]
        part["completed_ns"], part["error"], part["device_ms"] = 0, 0, np.nan
        part["status"] = np.minimum(part["status"], STATUSES.index("started"))
        any_source = part["flags"] & FLAG_ANY_SOURCE != 0
        part["seq"][any_source], part["peer"][any_source] = 0, -1
        records[rows] = part
