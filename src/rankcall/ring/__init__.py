"""The ring file: one rank's records, which survive the process that wrote them.

::

    0              header, one page
    header_bytes   in-flight table: unfinished records whose slots were reused
    ...            side tables: an append-only log of strings, groups, call sites and their lines
    records_offset records: a power-of-two ring

All numbers are little endian. The header holds the sizes, so a file that was shortened when it was
moved into the run directory is read like one that is being written. A header may have been written
by any user, so every field is checked.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rankcall.errors import CorruptRun
from rankcall.process import Process, Viewpoint, open_regular
from rankcall.record import MAX_RANKS, RECORD, compress_ranks, expand_ranks

MAGIC = b"RANKCALL"
SCHEMA = 1
HEADER_BYTES = 4096
ENTRY_HEADER = np.dtype([("commit", "<u4"), ("kind", "<u4"), ("length", "<u4"), ("crc32", "<u4")])
ENTRY_STRING, ENTRY_GROUP, ENTRY_SITE, ENTRY_SIZES, ENTRY_LINE = range(1, 6)  # UTF-8 text; JSON

CAPTURES = ("unknown", "native", "python", "imported")
MAX_CAPACITY = 1 << 24  # 3 GiB of records; a header that claims more is damaged
MAX_TABLES_BYTES = 1 << 28
AHEAD = 64  # records that writers may be ahead of ``head``

DEFAULT_CAPACITY = 1 << 14
DEFAULT_INFLIGHT = 256
DEFAULT_TABLES_BYTES = 1 << 20

# How the room of the side tables is shared. Error texts and call sites must leave room for groups,
# because a record whose group is unknown is of little use.
GROUPS_SHARE = 2  # 1/2 of the room is for groups alone
ERRORS_SHARE = 8  # error texts get 1/8 of the room at most
MOST_ERROR_BYTES = 4096  # of one text; the rest is cut
UNLISTED_GROUPS = 1 << 31  # groups without room have ids from here on

_HEADER_FIELDS: dict[str, tuple[str, int]] = {
    "magic": ("S8", 0),
    "schema": ("<u4", 8),
    "header_bytes": ("<u4", 12),
    "record_bytes": ("<u4", 16),
    "capacity": ("<u4", 20),
    "inflight_capacity": ("<u4", 24),
    "tables_bytes": ("<u4", 28),
    "file_bytes": ("<u8", 32),
    "rank": ("<i4", 40),
    "world_size": ("<i4", 44),
    "local_rank": ("<i4", 48),
    "node": ("<i4", 52),  # torchrun's GROUP_RANK, -1 if not known
    "attempt": ("<i4", 56),  # torchrun's restart count
    "pid": ("<u4", 60),
    "process_start": ("<u8", 64),  # clock ticks since boot; differs if the pid is reused
    "anchor_mono_ns": ("<i8", 72),  # CLOCK_MONOTONIC and the epoch, read together at creation
    "anchor_epoch_ns": ("<i8", 80),
    "capture": ("u1", 88),
    "locked": ("u1", 89),  # 1: the writer holds a flock on the file for as long as it lives
    "host": ("S64", 96),
    "boot_id": ("S40", 160),
    "pid_namespace": ("<u8", 200),  # inode number; 0 in rings of rankcall 0.1
    # Fields that change while the job runs have a cache line each, away from constant fields.
    "head": ("<u8", 1024),  # records issued (a lower bound: commit words are exact)
    "tables_used": ("<u8", 1088),  # bytes
    "step": ("<u8", 1152),
    "native_heartbeat_ns": ("<i8", 1216),  # CLOCK_MONOTONIC; the process runs
    "python_heartbeat_ns": ("<i8", 1280),  # CLOCK_MONOTONIC; the GIL is free now and then
    "inflight_lost": (
        "<u8",
        1344,
    ),  # unfinished records overwritten: the in-flight table was full
    "tables_lost": ("<u8", 1408),  # entries for which there was no room
    "closed_ns": ("<i8", 1472),  # CLOCK_MONOTONIC; 0 while recording, or killed
    # Written by rankcall.watch and rankcall.expect; 0 in rings of processes without them.
    "expect_until_ns": ("<i8", 1536),  # CLOCK_MONOTONIC; until then silence was declared healthy
    "expect_what": ("S256", 1600),  # UTF-8: the declared reason
    "overdue_ns": ("<i8", 1856),  # CLOCK_MONOTONIC; when the oldest overdue op was issued
    "verdicts": ("<u8", 1920),  # that this process has written to the run so far
    "stack_fd": ("<i4", 1984),  # the descriptor into which it dumps its stacks on STACK_SIGNAL
    "left_ns": ("<i8", 2048),  # CLOCK_MONOTONIC; its program ended without an error
    "aborted_ns": ("<i8", 2112),  # CLOCK_MONOTONIC; its watcher ended it, because the job hung
    "run_dir": ("S1024", 2176),  # UTF-8: its run directory; empty if the path is longer
    "hang_after_ms": ("<u8", 3456),  # the threshold of its watcher; 0 without one
    "failure": ("S256", 3200),  # UTF-8: the exception that ended its program
    "train_thread": ("<u4", 3520),  # kernel id of the thread that trains; 0: not known
}
HEADER = np.dtype(
    {
        "names": list(_HEADER_FIELDS),
        "formats": [form for form, _ in _HEADER_FIELDS.values()],
        "offsets": [offset for _, offset in _HEADER_FIELDS.values()],
        "itemsize": HEADER_BYTES,
    }
)


def _fast_header() -> struct.Struct:
    """Return the same layout for ``struct``, which takes a header apart faster than numpy."""
    codes = {"<u4": "I", "<i4": "i", "<u8": "Q", "<i8": "q", "u1": "B"}
    text, at = "<", 0
    for form, offset in sorted(_HEADER_FIELDS.values(), key=lambda field: field[1]):
        code = f"{form[1:]}s" if form.startswith("S") else codes[form]
        text += f"{offset - at}x{code}"
        at = offset + np.dtype(form).itemsize
    return struct.Struct(text)


_FAST_HEADER = _fast_header()
_NAMES_BY_OFFSET = sorted(_HEADER_FIELDS, key=lambda name: _HEADER_FIELDS[name][1])


def offset_of(field: str) -> int:
    """Return the offset of a header field, in bytes from the start of the file."""
    return _HEADER_FIELDS[field][1]


# In ``expect_until_ns``: the rank waits for work, for as long as it takes.
FOREVER_NS = 1 << 62


@dataclass(frozen=True)
class Geometry:
    """The sizes a ring file is made of, and the offsets that follow from them."""

    capacity: int = DEFAULT_CAPACITY
    inflight_capacity: int = DEFAULT_INFLIGHT
    tables_bytes: int = DEFAULT_TABLES_BYTES

    @cached_property
    def inflight_offset(self) -> int:
        """Bytes before the in-flight table."""
        return HEADER_BYTES

    @cached_property
    def tables_offset(self) -> int:
        """Bytes before the side tables."""
        return self.inflight_offset + self.inflight_capacity * RECORD.itemsize

    @cached_property
    def records_offset(self) -> int:
        """Bytes before the first record."""
        return self.tables_offset + self.tables_bytes

    @cached_property
    def file_bytes(self) -> int:
        """Bytes of a whole file."""
        return self.records_offset + self.capacity * RECORD.itemsize

    @classmethod
    def fitting(cls, total_bytes: int) -> Geometry:
        """Return the largest geometry of at most ``total_bytes`` (at least 64 records)."""
        capacity = 64
        while cls(capacity * 2).file_bytes <= total_bytes:
            capacity *= 2
        return cls(capacity)


_geometry = lru_cache(maxsize=64)(Geometry)  # most rings of a run have the same


@dataclass(frozen=True)
class Header:
    """A ring file's header, decoded. Times are in ns; ``mono`` is its host's CLOCK_MONOTONIC."""

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
    aborted_ns: int = 0
    locked: int = 0
    pid_namespace: int = 0
    run_dir: str = ""
    failure: str = ""
    hang_after_ms: int = 0
    train_thread: int = 0
    tables_used: int = 0  # bytes

    @property
    def process(self) -> Process:
        """The process that writes the ring, or wrote it."""
        return Process(self.boot_id, self.pid_namespace, self.pid, self.process_start, self.host)

    def process_state(self, here: Viewpoint | None = None) -> str:
        """Return what the ring's process is doing now; see ``Process.state``."""
        return self.process.state(here)

    @property
    def last_sign_epoch_ns(self) -> int:
        """The last time the process is known to have run, in ns of its host's wall clock."""
        last = max(self.native_heartbeat_ns, self.python_heartbeat_ns, self.closed_ns)
        return self.anchor_epoch_ns + last - self.anchor_mono_ns

    @property
    def used_bytes(self) -> int:
        """The number of bytes of the file that can be in use."""
        records = min(self.head + AHEAD, self.geometry.capacity)
        return self.geometry.records_offset + records * RECORD.itemsize


# The attributes that are header fields of the same name.
_DIRECT = tuple(field.name for field in fields(Header) if field.name not in ("geometry", "capture"))
_TEXTS = tuple(name for name in _DIRECT if HEADER[name].kind == "S")


def make_header(geometry: Geometry, values: Mapping[str, Any]) -> bytes:
    """Return the header of a file of this geometry. ``values`` are all fields except the sizes."""
    row = np.zeros(1, HEADER)
    sizes = {
        "magic": MAGIC,
        "schema": SCHEMA,
        "header_bytes": HEADER_BYTES,
        "record_bytes": RECORD.itemsize,
        "capacity": geometry.capacity,
        "inflight_capacity": geometry.inflight_capacity,
        "tables_bytes": geometry.tables_bytes,
        "file_bytes": geometry.file_bytes,
    }
    for name, value in {**sizes, **values}.items():
        row[name] = value
    return row.tobytes()


def parse_header(raw: bytes, name: str) -> Header:
    """Check and decode a header. ``name`` is the file's name in the message of ``CorruptRun``."""
    if len(raw) < HEADER_BYTES or not raw.startswith(MAGIC):
        raise CorruptRun(f"{name}: not a rankcall ring file")
    header = dict(zip(_NAMES_BY_OFFSET, _FAST_HEADER.unpack_from(raw), strict=True))
    if header["schema"] != SCHEMA:
        raise CorruptRun(
            f"{name}: ring schema {header['schema']}; this rankcall reads schema {SCHEMA}: "
            "read it with the rankcall version that wrote it"
        )
    shape = _geometry(header["capacity"], header["inflight_capacity"], header["tables_bytes"])
    sizes_ok = (
        header["header_bytes"] == HEADER_BYTES
        and header["record_bytes"] == RECORD.itemsize
        and 0 < shape.capacity <= MAX_CAPACITY
        and shape.capacity & (shape.capacity - 1) == 0
        and shape.inflight_capacity <= MAX_CAPACITY
        and shape.tables_bytes <= MAX_TABLES_BYTES
        and shape.tables_bytes % 8 == 0
        # A file that was compacted when it was moved ends after its last record.
        and shape.records_offset <= header["file_bytes"] <= shape.file_bytes
    )
    if not sizes_ok:
        raise CorruptRun(f"{name}: the ring's header is damaged (impossible sizes)")
    if not (-1 <= header["rank"] < MAX_RANKS and -1 <= header["world_size"] <= MAX_RANKS):
        raise CorruptRun(f"{name}: the ring's header is damaged (impossible rank)")
    values = {column: header[column] for column in _DIRECT}
    for column in _TEXTS:
        values[column] = values[column].partition(b"\0")[0].decode("utf-8", "replace")
    capture = header["capture"] if header["capture"] < len(CAPTURES) else 0
    return Header(geometry=shape, capture=CAPTURES[capture], **values)


def read_header(path: Path) -> Header | None:
    """Return the header of a ring file, or None if it cannot be read."""
    try:
        with open_regular(path) as file:
            return parse_header(file.read(HEADER_BYTES), str(path))
    except (OSError, CorruptRun):
        return None


# The lock that shows other processes that a ring has a living writer.
#
# A process id means nothing in another pid namespace, but a ``flock`` does. The kernel drops it
# when the last descriptor of its open file description is closed, at the latest when the writer
# ends. A command that moves or removes a ring takes the lock first, and never waits for it while
# the writer may be alive.


_held: set[WriterLock] = set()
_registered = False


class WriterLock:
    """An exclusive flock on a ring file, held until ``release`` or the end of the process.

    It has an open file description of its own: the descriptor that ``mmap`` keeps would go to every
    forked child, which then holds the lock for as long as it lives. The child closes ours instead.
    """

    def __init__(self, ring_fd: int) -> None:
        self._fd = -1
        self._file = (0, 0)
        if ring_fd < 0:
            return
        fd = -1
        try:
            fd = os.open(f"/proc/self/fd/{ring_fd}", os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # a file system without flock: the ring says that it is not locked
            if fd >= 0:
                os.close(fd)
            return
        self._fd, self._file = fd, _identity(fd)
        _held.add(self)
        _register_once()

    @property
    def held(self) -> bool:
        """Whether this process holds the lock."""
        return self._fd >= 0

    def release(self) -> None:
        """Give the lock up. A second call does nothing."""
        fd, self._fd = self._fd, -1
        _held.discard(self)
        # A program that closes all descriptors, as daemons do, may have reused the number since.
        with contextlib.suppress(OSError):
            if fd >= 0 and _identity(fd) == self._file:
                os.close(fd)


def try_lock(fd: int) -> bool:
    """Take the lock on an open ring at once if it is free; closing ``fd`` releases it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _identity(fd: int) -> tuple[int, int]:
    about = os.fstat(fd)
    return about.st_dev, about.st_ino


def _in_forked_child() -> None:
    """Close the parent's locks. The files stay locked, because the parent has them open, too."""
    for lock in list(_held):
        lock.release()


def _register_once() -> None:
    global _registered
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_in_forked_child)


# A ring file's side tables: process groups, call sites, strings, sizes.
#
# Every length, count and number is checked, because any user may have written the file.


_ENTRY = struct.Struct("<IIII")
assert _ENTRY.size == ENTRY_HEADER.itemsize
_MOST_OF_A_LINE = 400  # characters
MAX_MEMBERS = 1 << 23  # of all groups of a ring together: bounds what a small file can expand to
_GROUPS_KEPT = 1 << 20  # members of the groups that rings share: 8 MiB of them
ERA = 1000  # epochs of one init_process_group; a name used again within it adds one


@dataclass(frozen=True)
class Group:
    """A process group, as one of its members knew it. ``ranks`` are global, in group order."""

    name: str
    epoch: int
    backend: str
    description: str
    ranks: tuple[int, ...]

    @property
    def label(self) -> str:
        """Torch's name for the group, with a suffix if earlier groups had the same name.

        ``#2`` means after the second init_process_group, and ``.1`` that the name was used again
        after the same init_process_group.
        """
        era, again = divmod(self.epoch, ERA)
        return self.name + (f"#{era + 1}" if era else "") + (f".{again}" if again else "")


@dataclass(frozen=True)
class UserLine:
    """A line of the user's own code: neither installed nor Python's."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class CallSite:
    """The line that issued an op, and the public function it called.

    If that line is a framework's, ``user`` is the nearest line of the user's own that led there, or
    None if only installed code did.
    """

    file: str
    line: int
    function: str
    api: str
    user: UserLine | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def user_line(self) -> str:
        """The user's line behind a framework's, as ``file:line``; else empty."""
        return str(self.user or "")

    @property
    def own(self) -> CallSite | UserLine:
        """The line to show first: the user's, or the only one that is known."""
        return self.user or self

    @property
    def shown(self) -> str:
        """Both lines, the user's first: ``train.py:12 (through .../trainer.py:340)``."""
        return both_lines(str(self), self.user_line)


def both_lines(call_site: str, user_line: str) -> str:
    """Write a call site, with the user's line before the framework's if there are two."""
    return f"{user_line} (through {call_site})" if user_line else call_site


@dataclass
class Tables:
    """A ring's side tables, by id."""

    strings: dict[int, str] = field(default_factory=dict)
    groups: dict[int, Group] = field(default_factory=dict)
    sites: dict[int, CallSite] = field(default_factory=dict)
    lines: dict[int, str] = field(default_factory=dict)  # the source lines of call sites
    # By shape hash: the number of elements of each tensor of a coalesced op.
    numels: dict[int, tuple[int, ...]] = field(default_factory=dict)
    damaged: bool = False


class Entry(NamedTuple):
    """One entry of the side tables. ``end`` is where the next one begins."""

    number: int
    kind: int
    payload: bytes
    end: int


def entries(raw: bytes, number: int = 0) -> Iterator[Entry]:
    """Yield the entries after the ``number``-th, up to the first damaged one."""
    offset = 0
    while offset + ENTRY_HEADER.itemsize <= len(raw):
        commit, kind, length, crc32 = _ENTRY.unpack_from(raw, offset)
        start = offset + ENTRY_HEADER.itemsize
        payload = raw[start : start + length]
        number += 1
        if commit != number or len(payload) != length or zlib.crc32(payload) != crc32:
            return
        offset = start + (length + 7) // 8 * 8
        yield Entry(number, kind, payload, offset)


def parse_tables(raw: bytes) -> Tables:
    """Decode the side tables up to the first damaged entry."""
    tables, members, end = Tables(), 0, 0
    for number, kind, payload, begins_next in entries(raw):
        if not _keep_entry(tables, number, kind, payload):
            break
        if kind == ENTRY_GROUP:
            members += len(tables.groups[number].ranks)
            if members > MAX_MEMBERS:
                del tables.groups[number]
                break
        end = begins_next
    tables.damaged = end + ENTRY_HEADER.itemsize <= len(raw)
    return tables


def _keep_entry(tables: Tables, number: int, kind: int, payload: bytes) -> bool:
    try:
        if kind == ENTRY_STRING:
            tables.strings[number] = payload.decode("utf-8", "replace")
        elif kind == ENTRY_GROUP:
            tables.groups[number] = _groups.get(payload)
        elif kind == ENTRY_SITE:
            tables.sites[number] = decode_site(payload)
        elif kind == ENTRY_LINE:
            fields = json.loads(payload)
            tables.lines[int(fields["site"])] = _text(fields["text"])[:_MOST_OF_A_LINE]
        elif kind == ENTRY_SIZES:
            fields = json.loads(payload)
            tables.numels[int(fields["hash"])] = tuple(_count(numel) for numel in fields["numels"])
        return True
    except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError):
        return False


class _Groups:
    """Groups by payload. All members of a group write the same payload, and share one object here.

    Otherwise 16,384 rings that each list all ranks would take minutes and gigabytes to read.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, Group] = {}
        self._members = 0

    def get(self, payload: bytes) -> Group:
        """Return the group that a payload describes; raises ``ValueError`` or the like."""
        group = self._known.get(payload)
        if group is None:
            group = _group(json.loads(payload))
            self._members += len(group.ranks) + 1
            if self._members > _GROUPS_KEPT:
                self._known, self._members = {}, len(group.ranks) + 1
            self._known[payload] = group
        return group


_groups = _Groups()


def decode_site(payload: bytes) -> CallSite:
    """Return the call site that a payload describes; raises ``ValueError`` or the like."""
    return site_from(json.loads(payload))


def site_from(fields: Mapping[str, Any]) -> CallSite:
    """Return a call site from the object that ``site_object`` made; checks every field."""
    user = fields.get("user")  # absent in rings of earlier versions
    return CallSite(
        *_line_from(fields),
        _text(fields["api"]),
        UserLine(*_line_from(user)) if user is not None else None,
    )


def _line_from(fields: Mapping[str, Any]) -> tuple[str, int, str]:
    return _text(fields["file"]), _small(fields["line"]), _text(fields["function"])


def _text(value: Any) -> str:
    """Return a text that can be encoded: JSON can contain lone surrogates, which UTF-8 cannot."""
    return str(value).encode("utf-8", "replace").decode()


def _count(number: Any) -> int:
    """Return a number of elements. Raises ``ValueError`` if it is impossible."""
    if type(number) is not int or not 0 <= number < 1 << 62:
        raise ValueError(f"{number} is not a number of elements")
    return number


def _small(number: Any) -> int:
    """Return a line or epoch number. Raises ``ValueError`` if it is impossible."""
    if not 0 <= int(number) < 1 << 31:
        raise ValueError(f"{number} is not a line or epoch number")
    return int(number)


def _group(fields: dict[str, Any]) -> Group:
    return Group(
        _text(fields["name"]),
        _small(fields["epoch"]),
        _text(fields["backend"]),
        _text(fields["description"]),
        expand_ranks(fields["ranks"]),
    )


# --- encoding ---


def encode_group(group: Group) -> bytes:
    """Return a group's side-table payload."""
    fields = {
        "name": group.name,
        "epoch": group.epoch,
        "backend": group.backend,
        "description": group.description,
        "ranks": compress_ranks(list(group.ranks)),
    }
    return json.dumps(fields).encode()


def encode_site(site: CallSite) -> bytes:
    """Return a call site's side-table payload."""
    return json.dumps(site_object(site)).encode()


def site_object(site: CallSite) -> dict[str, Any]:
    """Return a call site as an object for JSON; without a user's line, that key is absent."""
    fields = vars(site) | {"user": vars(site.user) if site.user is not None else None}
    return {key: value for key, value in fields.items() if value is not None}


def encode_line(site: int, text: str) -> bytes:
    """Return the side-table payload of a call site's source line."""
    return json.dumps({"site": site, "text": text}).encode()
