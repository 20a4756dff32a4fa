"""Where everything stands in a ring file: header, in-flight table, side tables, records.

::

    0              header, one page
    header_bytes   in-flight table: records that the ring lapped before they finished
    ...            side tables: an append-only log of strings, groups, call sites and their lines
    records_offset records: a power-of-two ring

All numbers are little endian. Sizes stand in the header, so a file that was compacted when it was
moved to the run directory reads like one that is being written.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankcall.record import RECORD

MAGIC = b"RANKCALL"
SCHEMA = 1
HEADER_BYTES = 4096
ENTRY_HEADER = np.dtype([("commit", "<u4"), ("kind", "<u4"), ("length", "<u4"), ("crc32", "<u4")])
ENTRY_STRING, ENTRY_GROUP, ENTRY_SITE, ENTRY_SIZES, ENTRY_LINE = range(1, 6)  # UTF-8 text; JSON

CAPTURES = ("unknown", "native", "python")
MAX_CAPACITY = 1 << 24  # 3 GiB of records; a header that claims more is not believed
MAX_TABLES_BYTES = 1 << 28

DEFAULT_CAPACITY = 1 << 14
DEFAULT_INFLIGHT = 256
DEFAULT_TABLES_BYTES = 1 << 20

# How the room of the side tables is shared. Error texts and call sites must not crowd out groups,
# because a record whose group is unknown says nothing.
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
    "node": ("<i4", 52),  # torchrun's GROUP_RANK, -1 when not known
    "attempt": ("<i4", 56),  # torchrun's restart count
    "pid": ("<u4", 60),
    "process_start": ("<u8", 64),  # clock ticks since boot: tells a reused pid
    "anchor_mono_ns": ("<i8", 72),  # CLOCK_MONOTONIC and the epoch, read together at creation
    "anchor_epoch_ns": ("<i8", 80),
    "capture": ("u1", 88),
    "locked": ("u1", 89),  # 1: the writer holds a flock on the file for as long as it lives
    "host": ("S64", 96),
    "boot_id": ("S40", 160),
    "pid_namespace": ("<u8", 200),  # inode number; 0 in rings of rankcall 0.1
    # What changes while the job runs: a cache line each, away from what is only read.
    "head": ("<u8", 1024),  # records issued (a lower bound: commit words are exact)
    "tables_used": ("<u8", 1088),  # bytes
    "step": ("<u8", 1152),
    "native_heartbeat_ns": ("<i8", 1216),  # CLOCK_MONOTONIC; the process runs
    "python_heartbeat_ns": ("<i8", 1280),  # CLOCK_MONOTONIC; the GIL can be had
    "inflight_lost": ("<u8", 1344),  # unfinished records lapped while the table was full
    "tables_lost": ("<u8", 1408),  # entries that found no room
    "closed_ns": ("<i8", 1472),  # CLOCK_MONOTONIC; 0 while recording, or killed
    # Written by rankcall.watch and rankcall.expect; 0 in rings of processes without them.
    "expect_until_ns": ("<i8", 1536),  # CLOCK_MONOTONIC; until then silence was declared healthy
    "expect_what": ("S256", 1600),  # UTF-8: what was declared
    "overdue_ns": ("<i8", 1856),  # CLOCK_MONOTONIC; when the oldest overdue op was issued
    "verdicts": ("<u8", 1920),  # that this process has written to the run so far
    "stack_fd": ("<i4", 1984),  # its descriptor that stacks are dumped to on STACK_SIGNAL
    "left_ns": ("<i8", 2048),  # CLOCK_MONOTONIC; its program came to its end, without an error
    "aborted_ns": ("<i8", 2112),  # CLOCK_MONOTONIC; its watcher ended it, because the job hung
    "run_dir": ("S1024", 2176),  # UTF-8: the run directory it belongs to; empty if that is longer
}
HEADER = np.dtype(
    {
        "names": list(_HEADER_FIELDS),
        "formats": [form for form, _ in _HEADER_FIELDS.values()],
        "offsets": [offset for _, offset in _HEADER_FIELDS.values()],
        "itemsize": HEADER_BYTES,
    }
)


def offset_of(field: str) -> int:
    """Return where a header field starts, in bytes from the start of the file."""
    return _HEADER_FIELDS[field][1]


@dataclass(frozen=True)
class Geometry:
    """The sizes a ring file is made of, and the offsets that follow from them."""

    capacity: int = DEFAULT_CAPACITY
    inflight_capacity: int = DEFAULT_INFLIGHT
    tables_bytes: int = DEFAULT_TABLES_BYTES

    @property
    def inflight_offset(self) -> int:
        """Bytes before the in-flight table."""
        return HEADER_BYTES

    @property
    def tables_offset(self) -> int:
        """Bytes before the side tables."""
        return self.inflight_offset + self.inflight_capacity * RECORD.itemsize

    @property
    def records_offset(self) -> int:
        """Bytes before the first record."""
        return self.tables_offset + self.tables_bytes

    @property
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
