"""The layout of the ring file: one rank's records, which survive the process that wrote them.

::

    0              header, one page
    header_bytes   in-flight table: unfinished records whose slots were reused
    ...            side tables: an append-only log of strings, groups, call sites and their lines
    samples_offset samples: a ring of what the rank measured of itself; none in older files
    records_offset records: a power-of-two ring

All numbers are little endian. The header holds the sizes, so a file that was shortened when it was
moved into the run directory is read like one that is being written. A header may have been written
by any user, so every field is checked.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from rankcall.errors import CorruptRunError
from rankcall.files import open_regular
from rankcall.process import Process, Viewpoint
from rankcall.ranks import MAX_RANKS
from rankcall.record import RECORD

MAGIC = b"RANKCALL"
SCHEMA = 1
HEADER_BYTES = 4096

CAPTURES = ("unknown", "native", "python", "imported")
MAX_CAPACITY = 1 << 24  # 3 GiB of records; a header that claims more is damaged
MAX_TABLES_BYTES = 1 << 28  # the same of side tables
# How many records writers may be ahead of ``head``. A thread that has written record 8 stores 8 in
# that field even if another thread has stored 9 there already, because to compare first would cost
# time in each op. So the field may be too low by as many records as threads issue at the same
# moment, which no process does with more than 64.
AHEAD = 64

# 3 MiB of records, 1 MiB of names and the in-flight table. A container has 64 MiB of shared memory
# by default, of which eight ranks take half.
DEFAULT_CAPACITY = 1 << 14
DEFAULT_INFLIGHT = 256
DEFAULT_TABLES_BYTES = 1 << 20
# The least that a ring shrinks to if there is little room: 126 KiB in all.
_LEAST_CAPACITY = 1 << 8
_LEAST_INFLIGHT = 1 << 6
_LEAST_TABLES_BYTES = 1 << 16
DEFAULT_SAMPLES = 1 << 8  # 48 KiB: two minutes at two a second
MAX_SAMPLES = 1 << 16
_SAMPLE_BYTES_BEFORE = 88  # in rings of rankcall 0.2.0, which have no phases
_MOST_SAMPLE_BYTES = 1 << 12

# What a sample counts, since some moment in the past. Times are in ns.
_MEASURED = (
    "gc_ns",  # in garbage collections of the young generations, of the whole process
    "full_gc_ns",  # in full collections
    "running_ns",  # the thread that trains was on a CPU
    "runnable_ns",  # it was ready to run, and not on a CPU
    "woken_ns",  # of that, after it had slept; the rest: after it was preempted
    "disk_wait_ns",  # it waited for a disk, as far as the kernel counts that
    "throttled_ns",  # the quota of the process's cgroup was used up, summed over CPUs
    "memory_stall_ns",  # tasks of the cgroup waited for memory
    "io_stall_ns",  # tasks of the cgroup waited for I/O
    "stopped_ns",  # the process stood still: a signal, a debugger, a machine that paused
    # Seen at moments, each of which stands for the time since the one before.
    "blocked_ns",  # the thread that trains was in uninterruptible sleep (state D),
    "sleeping_ns",  # or in sleep that a signal ends (state S)
    "gil_ns",  # a thread that did not run Python code kept the others from the GIL
    "data_loader_ns",  # the thread that trains was in its data loader,
    "checkpoint_ns",  # saved or loaded a checkpoint,
    "compilation_ns",  # or compiled
)
# How long the thread that trains was in each phase that the program has named; see ``phase_names``.
PHASE_COUNTERS = ("phase_0_ns", "phase_1_ns", "phase_2_ns", "phase_3_ns")
SAMPLE_COUNTERS = (*_MEASURED, *PHASE_COUNTERS)
SAMPLE = np.dtype(
    [
        ("number", "<u8"),  # from 1; 0: being written
        ("time_ns", "<i8"),  # CLOCK_MONOTONIC
        ("thread", "<u4"),  # kernel id of the thread that trains; 0: not known
        ("known", "<u4"),  # a bit for each counter that could be read
        *((name, "<u8") for name in SAMPLE_COUNTERS),
        ("again", "<u8"),  # the number once more
    ]
)

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
    "rpc": ("S768", 256),  # what its RPC agent waits for and runs, as in ``rpc_state``
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
    "sample_capacity": ("<u4", 3524),  # 0 in rings of rankcall 0.1
    "samples": ("<u8", 3528),  # written so far
    "sample_bytes": ("<u4", 3648),  # of one; 0 in rings of rankcall 0.2.0
    "phase_names": ("S144", 3712),  # UTF-8: the phases that the program names, a line each
    "gc_since_ns": ("<i8", 3536),  # CLOCK_MONOTONIC; a full collection runs since then; 0: none
    "saved": ("<u8", 3544),  # 1 + the step that the program last saved; 0: it has not said so
    "saved_at": ("<u8", 3552),  # ``step`` when it said so
    # Written by its watcher, on CLOCK_MONOTONIC; 0: it does not.
    "in_store_ns": ("<i8", 3560),  # since when the thread that trains waits for the job's store
    "idle_ns": ("<i8", 3568),  # since when the process has used hardly any CPU time
    # The oldest call in flight, for the leader of the node. Ranks in one call have one number.
    "in_call_ns": ("<i8", 3584),  # CLOCK_MONOTONIC; when it was issued; 0: in none
    "in_call": ("<u8", 3592),
    # CLOCK_MONOTONIC; what ended on its devices before then is on record. 0 in rings of 0.2.0.
    "devices_known_ns": ("<i8", 3600),
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
    sample_capacity: int = 0  # without room for them, a ring has none
    sample_bytes: int = SAMPLE.itemsize

    @cached_property
    def inflight_offset(self) -> int:
        """Bytes before the in-flight table."""
        return HEADER_BYTES

    @cached_property
    def tables_offset(self) -> int:
        """Bytes before the side tables."""
        return self.inflight_offset + self.inflight_capacity * RECORD.itemsize

    @cached_property
    def samples_offset(self) -> int:
        """Bytes before the samples."""
        return self.tables_offset + self.tables_bytes

    @cached_property
    def records_offset(self) -> int:
        """Bytes before the first record."""
        return self.samples_offset + self.sample_capacity * self.sample_bytes

    @cached_property
    def file_bytes(self) -> int:
        """Bytes of a whole file."""
        return self.records_offset + self.capacity * RECORD.itemsize

    def shrunk(self, fraction: int) -> Geometry:
        """Return the sizes of a ring that takes about this fraction of the memory.

        Every part shrinks: with side tables of their usual size, the smallest ring would not fit
        into 1 MiB. No part falls below the room that a small job needs, except that for samples,
        which a verdict can do without.

        Args:
            fraction: A power of two.
        """
        return Geometry(
            min(self.capacity, max(self.capacity // fraction, _LEAST_CAPACITY)),
            min(self.inflight_capacity, max(self.inflight_capacity // fraction, _LEAST_INFLIGHT)),
            min(self.tables_bytes, max(self.tables_bytes // fraction, _LEAST_TABLES_BYTES)),
            self.sample_capacity if fraction == 1 else 0,
        )


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
    rpc: str = ""
    tables_used: int = 0  # bytes
    samples: int = 0
    gc_since_ns: int = 0
    saved: int = 0
    saved_at: int = 0
    in_call_ns: int = 0
    in_call: int = 0
    devices_known_ns: int = 0
    in_store_ns: int = 0
    idle_ns: int = 0
    phase_names: str = ""

    @property
    def process(self) -> Process:
        """The process that writes the ring, or wrote it."""
        return Process(self.boot_id, self.pid_namespace, self.pid, self.process_start, self.host)

    def process_state(self, here: Viewpoint | None = None) -> str:
        """Return what the ring's process is doing now; see ``Process.state``."""
        return self.process.state(here)

    @property
    def last_sign_ns(self) -> int:
        """The last time the process is known to have run, CLOCK_MONOTONIC."""
        return max(self.native_heartbeat_ns, self.python_heartbeat_ns, self.closed_ns)

    @property
    def last_sign_epoch_ns(self) -> int:
        """The same in ns of its host's wall clock."""
        return self.anchor_epoch_ns + self.last_sign_ns - self.anchor_mono_ns

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
        "sample_capacity": geometry.sample_capacity,
        "sample_bytes": geometry.sample_bytes,
        "file_bytes": geometry.file_bytes,
    }
    for name, value in {**sizes, **values}.items():
        row[name] = value
    return row.tobytes()


class HeaderMissingError(CorruptRunError):
    """Raised for a ring whose header is not written yet, and may never be.

    A process makes the file, reserves and touches its pages, and writes the header last.
    """


def parse_header(raw: bytes, name: str) -> Header:
    """Check and decode a header. ``name`` is the file's name in ``CorruptRunError``."""
    if len(raw) < HEADER_BYTES or not raw.startswith(MAGIC):
        if not raw.strip(b"\0"):
            raise HeaderMissingError(
                f"{name}: not a rankcall ring file: it has no header. Its process is about to "
                "write it, or was killed before it did"
            )
        raise CorruptRunError(f"{name}: not a rankcall ring file")
    header = dict(zip(_NAMES_BY_OFFSET, _FAST_HEADER.unpack_from(raw), strict=True))
    if header["schema"] != SCHEMA:
        raise CorruptRunError(
            f"{name}: ring schema {header['schema']}; this rankcall reads schema {SCHEMA}: "
            "read it with the rankcall version that wrote it"
        )
    shape = _geometry(
        header["capacity"],
        header["inflight_capacity"],
        header["tables_bytes"],
        header["sample_capacity"],
        header["sample_bytes"] or _SAMPLE_BYTES_BEFORE,
    )
    sizes_ok = (
        header["header_bytes"] == HEADER_BYTES
        and header["record_bytes"] == RECORD.itemsize
        and 0 < shape.capacity <= MAX_CAPACITY
        and shape.capacity & (shape.capacity - 1) == 0
        and shape.inflight_capacity <= MAX_CAPACITY
        and shape.tables_bytes <= MAX_TABLES_BYTES
        and shape.tables_bytes % 8 == 0
        and shape.sample_capacity <= MAX_SAMPLES
        and shape.sample_bytes <= _MOST_SAMPLE_BYTES
        # A file that was compacted when it was moved ends after its last record.
        and shape.records_offset <= header["file_bytes"] <= shape.file_bytes
    )
    if not sizes_ok:
        raise CorruptRunError(f"{name}: the ring's header is damaged (impossible sizes)")
    if not (-1 <= header["rank"] < MAX_RANKS and -1 <= header["world_size"] <= MAX_RANKS):
        raise CorruptRunError(f"{name}: the ring's header is damaged (impossible rank)")
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
    except (OSError, CorruptRunError):
        return None
