"""A ring file's header: made for a new file, and decoded, whoever may have written it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from rankcall.errors import CorruptRun
from rankcall.process import Process
from rankcall.record import RECORD
from rankcall.ring.layout import (
    CAPTURES,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MAX_CAPACITY,
    MAX_TABLES_BYTES,
    SCHEMA,
    Geometry,
)
from rankcall.ring.tables import MAX_RANKS


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
    aborted_ns: int = 0
    locked: int = 0
    pid_namespace: int = 0
    run_dir: str = ""

    @property
    def process(self) -> Process:
        """The process that writes the ring, or wrote it."""
        return Process(self.boot_id, self.pid_namespace, self.pid, self.process_start, self.host)

    @property
    def last_sign_epoch_ns(self) -> int:
        """The last time the process is known to have run, in ns of its host's wall clock."""
        last = max(self.native_heartbeat_ns, self.python_heartbeat_ns, self.closed_ns)
        return self.anchor_epoch_ns + last - self.anchor_mono_ns


# All but what is made of several fields, or stands in the file as a code.
_DIRECT = tuple(each.name for each in fields(Header) if each.name not in ("geometry", "capture"))


def make_header(geometry: Geometry, values: Mapping[str, Any]) -> bytes:
    """Return the header of a file of this geometry; ``values`` are its fields' other than sizes."""
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
    """Check and decode a header; ``name`` is for messages."""
    if len(raw) < HEADER_BYTES or not raw.startswith(MAGIC):
        raise CorruptRun(f"{name}: not a rankcall ring file")
    (row,) = np.frombuffer(raw, HEADER, count=1)
    found = dict(zip(HEADER.names or (), row.item(), strict=True))
    if found["schema"] != SCHEMA:
        raise CorruptRun(
            f"{name}: ring schema {found['schema']}, this rankcall reads schema {SCHEMA}: "
            "read it with the rankcall version that wrote it"
        )
    shape = Geometry(found["capacity"], found["inflight_capacity"], found["tables_bytes"])
    sizes_ok = (
        found["header_bytes"] == HEADER_BYTES
        and found["record_bytes"] == RECORD.itemsize
        and 0 < shape.capacity <= MAX_CAPACITY
        and shape.capacity & (shape.capacity - 1) == 0
        and shape.inflight_capacity <= MAX_CAPACITY
        and shape.tables_bytes <= MAX_TABLES_BYTES
        and shape.tables_bytes % 8 == 0
        # A file that was compacted when it was moved ends after its last record.
        and shape.records_offset <= found["file_bytes"] <= shape.file_bytes
    )
    if not sizes_ok:
        raise CorruptRun(f"{name}: the ring's header is damaged (impossible sizes)")
    if not (-1 <= found["rank"] < MAX_RANKS and -1 <= found["world_size"] <= MAX_RANKS):
        raise CorruptRun(f"{name}: the ring's header is damaged (impossible rank)")
    values = {each: _text(found[each]) for each in _DIRECT}
    capture = found["capture"] if found["capture"] < len(CAPTURES) else 0
    return Header(geometry=shape, capture=CAPTURES[capture], **values)


def _text(value: Any) -> Any:
    """Return bytes as text, and a number as it is."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
