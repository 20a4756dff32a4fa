"""Read a ring file that somebody else wrote, or is writing, or died while writing.

The file is treated as hostile: every size, index and code is checked before it is used, nothing is
executed, and memory is bounded by what the file really holds. What is sound comes back; what is
not is counted.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rankcall.errors import CorruptRun
from rankcall.record import (
    COMMIT_CLOSING,
    COMMIT_DONE,
    COMMIT_WRITING,
    DTYPES,
    FLAG_ANY_SOURCE,
    KINDS,
    MAX_DIMS,
    OPS,
    RECORD,
    REDUCE_OPS,
    STATUSES,
)
from rankcall.ring.layout import (
    CAPTURES,
    ENTRY_GROUP,
    ENTRY_HEADER,
    ENTRY_SITE,
    ENTRY_SIZES,
    ENTRY_STRING,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MAX_CAPACITY,
    MAX_TABLES_BYTES,
    SCHEMA,
    Geometry,
)

Records = npt.NDArray[Any]
_ENTRY = struct.Struct("<IIII")
assert _ENTRY.size == ENTRY_HEADER.itemsize
MAX_RANKS = 1 << 20
MAX_MEMBERS = 1 << 23  # of all groups of a ring together: bounds what a small file can expand to
_GROUPS_KEPT = 1 << 20  # members of the groups that rings share: 8 MiB of them
_AHEAD = 64  # records that writers may be ahead of ``head``
ERA = 1000  # epochs of one init_process_group; a name used again within it adds one


@dataclass(frozen=True)
class Header:
    """What a ring file says of itself. Times in ns; ``mono`` is CLOCK_MONOTONIC of its host."""

    rank: int
    world_size: int
    local_rank: int
    node: int
    attempt: int
    pid: int
    process_start: int
    host: str
    boot_id: str
    capture: str
    anchor_mono_ns: int
    anchor_epoch_ns: int
    head: int
    step: int
    native_heartbeat_ns: int
    python_heartbeat_ns: int
    inflight_lost: int
    tables_lost: int
    closed_ns: int
    file_bytes: int
    geometry: Geometry
    expect_until_ns: int = 0
    expect_what: str = ""
    overdue_ns: int = 0
    verdicts: int = 0
    stack_fd: int = 0
    left_ns: int = 0


@dataclass(frozen=True)
class Group:
    """A process group as one of its members knew it. ``ranks`` are global, in group order."""

    name: str
    epoch: int
    backend: str
    description: str
    ranks: tuple[int, ...]

    @property
    def label(self) -> str:
        """Torch's name for it, and what tells it from earlier groups of that name.

        ``#2`` where init_process_group ran a second time, ``.1`` where the name was used again
        within one time.
        """
        era, again = divmod(self.epoch, ERA)
        return self.name + (f"#{era + 1}" if era else "") + (f".{again}" if again else "")


@dataclass(frozen=True)
class CallSite:
    """The line that issued an op, and the public function it called."""

    file: str
    line: int
    function: str
    api: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass
class Tables:
    """A ring's side tables, by id."""

    strings: dict[int, str] = field(default_factory=dict)
    groups: dict[int, Group] = field(default_factory=dict)
    sites: dict[int, CallSite] = field(default_factory=dict)
    # By shape hash: how many elements each tensor of a coalesced op has.
    numels: dict[int, tuple[int, ...]] = field(default_factory=dict)
    damaged: bool = False


@dataclass(frozen=True)
class Head:
    """What a ring file says of itself, without its records."""

    path: Path
    header: Header
    tables: Tables
    problem: str | None = None


@dataclass
class Ring:
    """One rank's ring as it was when it was read: records in issue order, and what is missing."""

    path: Path
    header: Header
    records: Records
    tables: Tables
    dropped: int
    problem: str | None = None


def read_ring(path: str | os.PathLike[str], newest: int | None = None) -> Ring:
    """Read one ring file, live or left behind; of its records only the ``newest``, where given.

    Raises ``CorruptRun`` where the file is no ring, is of another schema, or has no sound header.
    A file that was cut off yields what is left, with ``problem`` set.
    """
    path = Path(path)
    try:
        with path.open("rb", buffering=0) as file:
            return _read(path, file.fileno(), newest)
    except OSError as error:
        raise CorruptRun(f"{path}: cannot be read: {error.strerror}") from error


def read_head(path: str | os.PathLike[str]) -> Head:
    """Read a ring's header and side tables only; errors as ``read_ring``."""
    path = Path(path)
    try:
        with path.open("rb", buffering=0) as file:
            return _read_head(path, file.fileno(), os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise CorruptRun(f"{path}: cannot be read: {error.strerror}") from error


def _read_head(path: Path, fd: int, size: int) -> Head:
    raw = os.pread(fd, HEADER_BYTES, 0)
    header = parse_header(raw, str(path))
    shape = header.geometry
    problem = None
    if size < header.file_bytes:
        problem = f"{path}: truncated: {size:,} of {header.file_bytes:,} bytes are left"
    used = int(np.frombuffer(raw, HEADER)["tables_used"][0])
    used = min(used, shape.tables_bytes, max(0, size - shape.tables_offset))
    tables = parse_tables(os.pread(fd, used, shape.tables_offset))
    if tables.damaged and problem is None:
        problem = f"{path}: damaged side tables; some names are lost"
    return Head(path, header, tables, problem)


def _read(path: Path, fd: int, newest: int | None) -> Ring:
    size = os.fstat(fd).st_size
    head = _read_head(path, fd, size)
    header, shape = head.header, head.header.geometry
    live = header.closed_ns == 0
    bytes_there = _bytes_worth_reading(header, min(size, header.file_bytes))
    spans = _spans(header, bytes_there // RECORD.itemsize, newest)
    pieces = [
        _read_records(
            fd, shape.records_offset + first * RECORD.itemsize, count * RECORD.itemsize, live
        )
        for first, count in spans
    ]
    slots = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    parked_bytes = min(
        shape.inflight_capacity * RECORD.itemsize, max(0, size - shape.inflight_offset)
    )
    parked = _read_records(fd, shape.inflight_offset, parked_bytes, live)
    places = np.concatenate([np.arange(first, first + count) for first, count in spans])
    records, torn = _sound(slots, places[: len(slots)], parked, shape.capacity)
    last = int(records["commit"][-1] >> 2) if len(records) else 0
    kept = len(records)
    if newest is not None:  # what was not read is not lost: a lap's worth, and what was parked
        older = int(np.count_nonzero(records["commit"] >> 2 <= max(0, last - shape.capacity)))
        kept = min(last, shape.capacity) + older
    dropped = max(last - kept, torn)
    return Ring(path, header, records, head.tables, dropped, head.problem)


def _spans(header: Header, count: int, newest: int | None) -> list[tuple[int, int]]:
    """Return which slots to read, as (first, how many): all, or those of the newest records."""
    if newest is None or count <= newest + _AHEAD:
        return [(0, count)]
    capacity = header.geometry.capacity
    first, length = (header.head - newest) % capacity, min(newest + _AHEAD, capacity)
    before_end = max(0, min(length, count - first))
    return [(first, before_end), (0, min(length - before_end, first))]


def _bytes_worth_reading(header: Header, size: int) -> int:
    """Return how much of the record region can hold records: all of it once the ring has lapped.

    ``head`` may lag behind the writers by as many records as there are threads.
    """
    records = min(header.head + _AHEAD, header.geometry.capacity)
    return max(0, min(records * RECORD.itemsize, size - header.geometry.records_offset))


def parse_header(raw: bytes, name: str) -> Header:
    """Check and decode a header; ``name`` is for messages."""
    if len(raw) < HEADER_BYTES or not raw.startswith(MAGIC):
        raise CorruptRun(f"{name}: not a rankcall ring file")
    row = np.frombuffer(raw, HEADER, count=1)[0]
    if int(row["schema"]) != SCHEMA:
        raise CorruptRun(
            f"{name}: ring schema {int(row['schema'])}, this rankcall reads schema {SCHEMA}: "
            "read it with the rankcall version that wrote it"
        )
    shape = Geometry(int(row["capacity"]), int(row["inflight_capacity"]), int(row["tables_bytes"]))
    sizes_ok = (
        int(row["header_bytes"]) == HEADER_BYTES
        and int(row["record_bytes"]) == RECORD.itemsize
        and 0 < shape.capacity <= MAX_CAPACITY
        and shape.capacity & (shape.capacity - 1) == 0
        and shape.inflight_capacity <= MAX_CAPACITY
        and shape.tables_bytes <= MAX_TABLES_BYTES
        and shape.tables_bytes % 8 == 0
        # A file that was compacted when it was moved ends after its last record.
        and shape.records_offset <= int(row["file_bytes"]) <= shape.file_bytes
    )
    if not sizes_ok:
        raise CorruptRun(f"{name}: the ring's header is damaged (impossible sizes)")
    if not (-1 <= int(row["rank"]) < MAX_RANKS and -1 <= int(row["world_size"]) <= MAX_RANKS):
        raise CorruptRun(f"{name}: the ring's header is damaged (impossible rank)")
    numbers = {
        key: int(row[key])
        for key in (
            "rank", "world_size", "local_rank", "node", "attempt", "pid", "process_start",
            "anchor_mono_ns", "anchor_epoch_ns", "head", "step", "native_heartbeat_ns",
            "python_heartbeat_ns", "inflight_lost", "tables_lost", "closed_ns", "file_bytes",
            "expect_until_ns", "overdue_ns", "verdicts", "stack_fd",
            "left_ns",
        )
    }  # fmt: skip
    capture = int(row["capture"])
    return Header(
        host=row["host"].decode("utf-8", "replace"),
        boot_id=row["boot_id"].decode("utf-8", "replace"),
        expect_what=row["expect_what"].decode("utf-8", "replace"),
        capture=CAPTURES[capture] if capture < len(CAPTURES) else CAPTURES[0],
        geometry=shape,
        **numbers,
    )


def parse_tables(raw: bytes) -> Tables:
    """Decode the side tables up to the first entry that is not sound."""
    tables, offset, number, members = Tables(), 0, 0, 0
    while offset + ENTRY_HEADER.itemsize <= len(raw):
        commit, kind, length, crc32 = _ENTRY.unpack_from(raw, offset)
        start = offset + ENTRY_HEADER.itemsize
        payload = raw[start : start + length]
        number += 1
        whole = commit == number and len(payload) == length and zlib.crc32(payload) == crc32
        if not whole or not _keep_entry(tables, number, kind, payload):
            tables.damaged = True
            break
        if kind == ENTRY_GROUP:
            members += len(tables.groups[number].ranks)
            if members > MAX_MEMBERS:
                del tables.groups[number]
                tables.damaged = True
                break
        offset = start + (len(payload) + 7) // 8 * 8
    return tables


def _keep_entry(tables: Tables, number: int, kind: int, payload: bytes) -> bool:
    try:
        if kind == ENTRY_STRING:
            tables.strings[number] = payload.decode("utf-8", "replace")
        elif kind == ENTRY_GROUP:
            tables.groups[number] = _groups.get(payload)
        elif kind == ENTRY_SITE:
            tables.sites[number] = _site(json.loads(payload))
        elif kind == ENTRY_SIZES:
            fields = json.loads(payload)
            tables.numels[int(fields["hash"])] = tuple(_count(each) for each in fields["numels"])
        return True
    except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError):
        return False


class _Groups:
    """Groups by payload: all members of a group write the same, and share one object here.

    Without that, 16,384 rings that each name all ranks would take minutes and gigabytes.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, Group] = {}
        self._members = 0

    def get(self, payload: bytes) -> Group:
        """Return the group that a payload describes; raises ``ValueError`` and its like."""
        group = self._known.get(payload)
        if group is None:
            group = _group(json.loads(payload))
            self._members += len(group.ranks) + 1
            if self._members > _GROUPS_KEPT:
                self._known, self._members = {}, len(group.ranks) + 1
            self._known[payload] = group
        return group


_groups = _Groups()


def _site(fields: dict[str, Any]) -> CallSite:
    return CallSite(
        _text(fields["file"]),
        _small(fields["line"]),
        _text(fields["function"]),
        _text(fields["api"]),
    )


def _text(value: Any) -> str:
    """Return a name that can be written anywhere: JSON can say what is no Unicode."""
    return str(value).encode("utf-8", "replace").decode()


def _count(number: Any) -> int:
    """Return a number of elements; raises ``ValueError`` where it can be none."""
    if type(number) is not int or not 0 <= number < 1 << 62:
        raise ValueError(f"{number} is no number of elements")
    return number


def _small(number: Any) -> int:
    """Return a count that can be real; raises ``ValueError`` else."""
    if not 0 <= int(number) < 1 << 31:
        raise ValueError(f"{number} is no line and no epoch")
    return int(number)


def _group(fields: dict[str, Any]) -> Group:
    return Group(
        _text(fields["name"]),
        _small(fields["epoch"]),
        _text(fields["backend"]),
        _text(fields["description"]),
        expand_ranks(fields["ranks"]),
    )


def compress_ranks(ranks: list[int]) -> list[list[int]]:
    """Write ranks as runs ``[first, count, stride]``: a world of 100,000 is one run."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs:
            run = runs[-1]
            first, count, stride = run
            if count == 1:
                run[1:] = [2, rank - first]
                continue
            if rank == first + count * stride:
                run[1] += 1
                continue
        runs.append([rank, 1, 1])
    return runs


def expand_ranks(runs: list[list[int]]) -> tuple[int, ...]:
    """Undo ``compress_ranks``; raises ``ValueError`` where the ranks cannot be real."""
    if not all(type(number) is int for run in runs for number in run):
        raise ValueError("a rank is a whole number")
    if any(count < 0 for _, count, _ in runs) or sum(run[1] for run in runs) > MAX_RANKS:
        raise ValueError(f"more than {MAX_RANKS:,} ranks, or fewer than none")
    ranks = tuple(
        chain.from_iterable(
            range(first, first + count * stride, stride) if stride else [first] * count
            for first, count, stride in runs
        )
    )
    if ranks and not 0 <= min(ranks) <= max(ranks) < MAX_RANKS:
        raise ValueError(f"a rank is less than 0 or more than {MAX_RANKS:,}")
    return ranks


def _read_records(fd: int, offset: int, length: int, live: bool) -> Records:
    """Copy records out of the file; of those that change meanwhile keep only stable copies."""
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
    """Return the records that can be trusted, in issue order, and how many were half written.

    ``places`` are the slots' numbers.
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
        # A record killed while it moved stands in both places; the copy in the table is the newer.
        kept = kept[~np.isin(kept["commit"] >> 2, parked["commit"] >> 2)]
        kept = np.concatenate([parked, kept])
    order = kept["commit"] >> 2
    if np.any(order[1:] <= order[:-1]):
        kept = kept[np.unique(order, return_index=True)[1]]
    kept = _only(kept, _codes_known(kept))
    _blank_unfinished(kept)
    return kept, torn


def _undisturbed(words: npt.NDArray[np.uint64]) -> bool:
    """Return whether all records are finished and in their first lap, which most rings are."""
    finished = np.arange(4 | COMMIT_DONE, 4 * len(words) + 4, 4, dtype=np.uint64)
    return np.array_equal(words, finished)


def _only(records: Records, wanted: npt.NDArray[np.bool_]) -> Records:
    """Return the wanted records, without a copy where that is all of them."""
    return records if wanted.all() else records[wanted]


def _codes_known(records: Records) -> npt.NDArray[np.bool_]:
    return (
        (records["kind"] < len(KINDS))
        & (records["op"] < len(OPS))
        & (records["dtype"] < len(DTYPES))
        & (records["reduce_op"] < len(REDUCE_OPS))
        & (records["status"] < len(STATUSES))
        & (records["ndim"] <= MAX_DIMS)
        & (records["async_op"] <= 2)
        & (records["commit"] & 3 <= COMMIT_DONE)
    )


def _blank_unfinished(records: Records) -> None:
    """Clear the completion fields of records caught while those were being written."""
    rows = np.flatnonzero(records["commit"] & 3 == COMMIT_CLOSING)
    if len(rows):
        part = records[rows]
        part["completed_ns"], part["error"], part["device_ms"] = 0, 0, np.nan
        part["status"] = np.minimum(part["status"], STATUSES.index("started"))
        any_source = part["flags"] & FLAG_ANY_SOURCE != 0
        part["seq"][any_source], part["peer"][any_source] = 0, -1
        records[rows] = part
