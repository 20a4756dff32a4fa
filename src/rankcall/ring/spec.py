"""Write a whole ring file at once, from records in memory.

Readers of other tools' evidence make such files, and so do synthetic runs. The result is a ring
like one that a process wrote, so everything that reads rings reads it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rankcall.record import (
    COMMIT_DONE,
    RECORD,
)
from rankcall.ring.layout import (
    CAPTURES,
    Geometry,
    make_header,
)
from rankcall.ring.tables import (
    ENTRY_GROUP,
    ENTRY_LINE,
    ENTRY_SITE,
    ENTRY_STRING,
    CallSite,
    Group,
    encode_group,
    encode_line,
    encode_site,
)

# The rings of a large world are written one after the other, and all contain the same groups.
_encoded = functools.lru_cache(maxsize=256)(encode_group)


@dataclass
class RingSpec:
    """One rank's records and side tables, in memory."""

    rank: int
    world_size: int
    host: str
    attempt: int = 0
    capture: str = "native"
    anchor_mono_ns: int = 0
    anchor_epoch_ns: int = 0
    closed: bool = True  # False: recording was never switched off
    left: bool = False  # the program reached its end
    aborted: bool = False  # the watcher ended the process
    native_beat_ns: int = 0  # 0: the time when the last op ended
    python_beat_ns: int = 0
    pid: int = 0  # 0: not known
    lost: int = 0  # records that were issued before the first one of ``records``
    records: npt.NDArray[Any] = field(default_factory=lambda: np.zeros(0, RECORD))
    entries: dict[tuple[int, bytes], int] = field(default_factory=dict)

    def string(self, text: str) -> int:
        """Return the id of a string, adding it if it is new."""
        return self._entry(ENTRY_STRING, text.encode())

    def group(self, group: Group) -> int:
        """Return the id of a process group, adding it if it is new."""
        return self._entry(ENTRY_GROUP, _encoded(group))

    def site(self, site: CallSite) -> int:
        """Return the id of a call site, adding it if it is new."""
        return self._entry(ENTRY_SITE, encode_site(site))

    def line(self, site: CallSite, text: str) -> int:
        """Return the id of a call site's source line, adding it if it is new."""
        return self._entry(ENTRY_LINE, encode_line(self.site(site), text))

    def _entry(self, kind: int, payload: bytes) -> int:
        return self.entries.setdefault((kind, payload), len(self.entries) + 1)

    def tables(self) -> bytes:
        """Return the bytes of the side tables."""
        parts = []
        for (kind, payload), number in self.entries.items():
            parts.append(struct.pack("<IIII", number, kind, len(payload), zlib.crc32(payload)))
            parts.append(payload.ljust((len(payload) + 7) // 8 * 8, b"\0"))
        return b"".join(parts)


def write_ring(path: Path, spec: RingSpec, capacity: int | None = None) -> Path:
    """Write a ring file, and return its path.

    Args:
        path: The file.
        spec: The ring's contents.
        capacity: How many records the ring holds, a power of two; older records are overwritten.
            By default it holds all of them.
    """
    count, tables = len(spec.records), spec.tables()
    fitting = 1 << max(count - 1, 63).bit_length()  # a power of two, and 64 at least
    shape = Geometry(capacity or fitting, 0, (len(tables) + 4095) // 4096 * 4096)
    records = spec.records
    first = spec.lost + 1
    records["commit"] = (np.arange(first, first + count, dtype=np.uint64) << 2) | COMMIT_DONE
    if spec.lost or count > shape.capacity:
        kept = records[-shape.capacity :]
        records = np.zeros(shape.capacity, RECORD)
        records[((kept["commit"] >> 2).astype(np.int64) - 1) % shape.capacity] = kept
    header = _ring_header(spec, shape, len(records))
    # Mode 0600 from the start, as a ring that is recorded: it holds paths and error texts.
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(header)
        file.write(tables.ljust(shape.tables_bytes, b"\0"))
        file.write(records.data.cast("B") if len(records) else b"")
    return path


def _ring_header(spec: RingSpec, shape: Geometry, kept: int) -> bytes:
    ends = spec.records["completed_ns"]
    last = int(ends.max()) if len(ends) else spec.anchor_mono_ns
    steps = int(spec.records["step"].max()) + 1 if len(spec.records) else 0
    boot = hashlib.sha256(spec.host.encode()).hexdigest()
    values = {
        "file_bytes": shape.records_offset + kept * RECORD.itemsize,
        "rank": spec.rank,
        "world_size": spec.world_size,
        "local_rank": -1,
        "node": -1,
        "attempt": spec.attempt,
        "pid": spec.pid,
        "anchor_mono_ns": spec.anchor_mono_ns,
        "anchor_epoch_ns": spec.anchor_epoch_ns,
        "capture": CAPTURES.index(spec.capture),
        "host": spec.host.encode()[:63],
        "boot_id": boot[:36].encode(),
        "head": spec.lost + len(spec.records),
        "tables_used": len(spec.tables()),
        "step": 0 if spec.capture == "imported" else steps,
        "native_heartbeat_ns": spec.native_beat_ns or last,
        "python_heartbeat_ns": spec.python_beat_ns or last,
        "closed_ns": last + 1 if spec.closed else 0,
        "left_ns": last + 1 if spec.left else 0,
        "aborted_ns": last + 1 if spec.aborted else 0,
    }
    return make_header(shape, values)
