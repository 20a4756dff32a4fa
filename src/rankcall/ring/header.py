"""Decode a ring file's header, which may have been written by anybody."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankcall.errors import CorruptRun
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
            "expect_until_ns", "overdue_ns", "verdicts", "stack_fd", "left_ns",
            "aborted_ns",
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
