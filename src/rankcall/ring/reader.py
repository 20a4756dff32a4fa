"""Read a ring file whose writer may be alive or dead, and decode its records.

The file is treated as hostile: every size, index and code is checked before it is used, nothing is
executed, and the memory needed is bounded by the bytes that the file takes on disk, and by the
budget of the run that it is of. Damaged records are left out and counted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rankcall.budget import Budget
from rankcall.errors import CorruptRunError
from rankcall.files import descriptor_of_regular
from rankcall.record import (
    CODED,
    COMMIT_CLOSING,
    COMMIT_DONE,
    COMMIT_WRITING,
    FLAG_ANY_SOURCE,
    MAX_DIMS,
    RECORD,
    STATUSES,
    concat_rows,
    take_rows,
)
from rankcall.ring.extents import data_in
from rankcall.ring.layout import AHEAD, HEADER_BYTES, Header, parse_header
from rankcall.ring.samples import Samples, no_samples, read_samples
from rankcall.ring.tables import Tables, parse_tables

Records = npt.NDArray[Any]
_NO_ROWS, _NO_PLACES = np.empty(0, RECORD), np.empty(0, np.intp)


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
    samples: Samples = field(default_factory=no_samples, repr=False)  # oldest first
    # The versions of the records and the side tables, as they were on file.
    on_file: tuple[bytes, bytes] | None = field(default=None, repr=False, compare=False)


def read_ring(
    path: str | os.PathLike[str],
    newest: int | None = None,
    before: Ring | None = None,
    budget: Budget | None = None,
) -> Ring:
    """Read one ring file. A file that was cut off gives the rest of its records, and a ``problem``.

    Args:
        path: The file. Its writer may be alive.
        newest: Read only this many records, the last ones.
        before: The same file, as it was read earlier with the same ``newest``. What has not
            changed since is not decoded again: the result shares it.
        budget: What is left for the rings that the caller keeps; by default, it keeps no other.

    Raises:
        CorruptRunError: The file is not a ring, has another schema, its header is damaged, or it
            asks for more than the budget has.
    """
    path, budget = path if isinstance(path, Path) else Path(path), budget or Budget()
    try:
        fd, status = descriptor_of_regular(path)
        try:
            with budget.reading(path, status):
                return _read(path, fd, status, newest, before, budget)
        finally:
            os.close(fd)
    except OSError as error:
        raise CorruptRunError(f"{path}: cannot be read: {error.strerror}") from error


def read_head(path: str | os.PathLike[str], budget: Budget | None = None) -> Head:
    """Read a ring's header and side tables. Arguments and errors are those of ``read_ring``."""
    path, budget = path if isinstance(path, Path) else Path(path), budget or Budget()
    try:
        fd, status = descriptor_of_regular(path)
        try:
            with budget.reading(path, status):
                return _read_head(path, fd, status, budget)[0]
        finally:
            os.close(fd)
    except OSError as error:
        raise CorruptRunError(f"{path}: cannot be read: {error.strerror}") from error


def _read_head(
    path: Path, fd: int, status: os.stat_result, budget: Budget, before: Ring | None = None
) -> tuple[Head, bytes]:
    """Return the head, and the side tables as they are on file."""
    raw = os.pread(fd, HEADER_BYTES, 0)
    header = parse_header(raw, str(path))
    budget.spend_on_world(max(header.world_size, header.rank + 1))
    problem = None
    if status.st_size < header.file_bytes:
        problem = f"{path}: truncated: {status.st_size:,} of {header.file_bytes:,} bytes are left"
    raw_tables = read_tables(fd, status, header)
    if before is not None and before.on_file is not None and before.on_file[1] == raw_tables:
        tables = before.tables
    else:
        tables = parse_tables(raw_tables, budget)
    if tables.damaged and problem is None:
        problem = f"{path}: damaged side tables; some names are lost"
    return Head(path, header, tables, problem), raw_tables


def read_tables(fd: int, status: os.stat_result, header: Header) -> bytes:
    """Return the side tables as they are on file, up to the first hole: they have no gaps."""
    begin = header.geometry.tables_offset
    end = min(begin + min(header.tables_used, header.geometry.tables_bytes), status.st_size)
    first, hole = next(data_in(fd, status, begin, end), (end, end))
    return os.pread(fd, hole - begin, begin) if first == begin else b""


def _read(
    path: Path,
    fd: int,
    status: os.stat_result,
    newest: int | None,
    before: Ring | None,
    budget: Budget,
) -> Ring:
    head, raw_tables = _read_head(path, fd, status, budget, before)
    header, shape = head.header, head.header.geometry
    live = header.closed_ns == 0
    if before is not None and newest is not None:
        slots, parked, _ = _slots(fd, status, header, newest, live=False)
        if before.on_file == (_versions(slots, parked), raw_tables):
            same = before.records, before.tables, before.dropped
            samples = read_samples(fd, status, header)
            return Ring(path, header, *same, head.problem, samples, before.on_file)
    slots, parked, places = _slots(fd, status, header, newest, live)
    on_file = (_versions(slots, parked), raw_tables) if newest is not None else None
    records, torn = _sound(slots, places, parked, shape.capacity)
    last = int(records["commit"][-1] >> 2) if len(records) else 0
    kept = len(records)
    if newest is not None:  # records that were not read are not lost
        older = int(np.count_nonzero(records["commit"] >> 2 <= max(0, last - shape.capacity)))
        kept = min(last, shape.capacity) + older
    dropped = max(last - kept, torn)
    samples = read_samples(fd, status, header)
    return Ring(path, header, records, head.tables, dropped, head.problem, samples, on_file)


def _slots(
    fd: int, status: os.stat_result, header: Header, newest: int | None, live: bool
) -> tuple[Records, Records, npt.NDArray[np.intp]]:
    """Return the slots of the records to read, those of old ops in flight, and where the first are.

    ``live``: wait until records that are being written are stable.
    """
    shape, size = header.geometry, status.st_size
    bytes_there = _bytes_worth_reading(header, min(size, header.file_bytes))
    pieces, places = [], []
    for first, count in _spans(header, bytes_there // RECORD.itemsize, newest):
        for at, piece in _records_in(fd, status, shape.records_offset, first, count, live):
            pieces.append(piece)
            places.append(np.arange(at, at + len(piece)))
    parked_count = min(
        shape.inflight_capacity, max(0, size - shape.inflight_offset) // RECORD.itemsize
    )
    in_flight = _records_in(fd, status, shape.inflight_offset, 0, parked_count, live)
    parked = [piece for _, piece in in_flight]
    slots = concat_rows(pieces or [_NO_ROWS])
    return slots, concat_rows(parked or [_NO_ROWS]), np.concatenate([_NO_PLACES, *places])


def _records_in(
    fd: int, status: os.stat_result, offset: int, first: int, count: int, live: bool
) -> Iterator[tuple[int, Records]]:
    """Yield the slots of a table at ``offset`` that are not in holes, and where each piece is."""
    width = RECORD.itemsize
    after = first  # the slot after the last piece: a slot may have its ends on both sides of a hole
    whole = offset + first * width, offset + (first + count) * width
    for begin, end in data_in(fd, status, *whole):
        at = max(after, (begin - offset) // width)
        after = -((offset - end) // width)
        piece = _read_records(fd, offset + at * width, (after - at) * width, live)
        if len(piece):
            yield at, piece


def _versions(slots: Records, parked: Records) -> bytes:
    """Return what changes whenever a record does."""
    used = parked["commit"] != 0
    parts = (slots, take_rows(parked, used)) if used.any() else (slots,)
    # The commit word tells new records and ends. The start of an op on a device sets other fields.
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
    # The kernel copies while the writer writes. If the commit word is the same in two copies, the
    # record did not change in between, so the first copy is whole.
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
    # A record changes three times in its life. One that changes at each of eight looks belongs to a
    # ring that is being rewritten as fast as it is read: it is left out.
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
    if not len(slots) and not len(parked):
        return slots, 0
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
