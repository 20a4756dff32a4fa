"""Cut the tail of a ring: a small ring file with its newest records and all that are in flight.

A tail is written beside the run while its process lives, and is sent to other nodes. It is a ring
file like any other, so no reader knows the difference: the records that it lacks count as
dropped.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rankcall.errors import CorruptRunError
from rankcall.files import open_regular
from rankcall.record import (
    COMMIT_DONE,
    RECORD,
)
from rankcall.ring.layout import (
    HEADER,
    HEADER_BYTES,
    Geometry,
    parse_header,
)
from rankcall.ring.reader import read_ring, read_tables

# Records of a tail, a power of two; they are 48 KiB. Verdicts need the ops in flight, which are
# kept however old they are, and the last ops of each group, to see who is behind. The tails of all
# ranks of a node go through the job's store, so they hold no more.
NEWEST = 256


def tail_of(path: Path, newest: int = NEWEST) -> bytes:
    """Return the tail of a ring file, also of a living process. Raises ``CorruptRunError``.

    Args:
        path: The ring.
        newest: The number of newest records to keep, a power of two.
    """
    raw = _read_header(path)
    ring = read_ring(path)
    # The tables come last: they have each group and line that a record names before the record.
    tables = _read_tables(path)
    tables = tables.ljust((len(tables) + 7) // 8 * 8, b"\0")
    capacity = min(newest, ring.header.geometry.capacity)
    slots, parked = _placed(ring.records, capacity)
    header = _tail_header(raw, Geometry(capacity, len(parked), len(tables)), len(slots))
    return b"".join((header, parked.tobytes(), tables, slots.tobytes()))


def _read_header(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(HEADER_BYTES)
    except OSError as error:
        raise CorruptRunError(f"{path}: cannot be read: {error.strerror}") from error


def _read_tables(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            fd, header = file.fileno(), parse_header(file.read(HEADER_BYTES), str(path))
            return read_tables(fd, os.fstat(fd), header)
    except OSError as error:
        raise CorruptRunError(f"{path}: cannot be read: {error.strerror}") from error


def _placed(records: npt.NDArray[Any], capacity: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the slots of a smaller ring, and the older records that have not ended."""
    if not len(records):
        return np.zeros(0, RECORD), np.zeros(0, RECORD)
    index = (records["commit"] >> 2).astype(np.int64) - 1
    last = int(index[-1])
    is_recent = index > last - capacity
    slots = np.zeros(min(last + 1, capacity), RECORD)
    slots[index[is_recent] % capacity] = records[is_recent]
    is_open = records["commit"] & 3 != COMMIT_DONE
    return slots, records[~is_recent & is_open]


def _tail_header(raw: bytes, shape: Geometry, kept: int) -> bytes:
    """Return a ring's header with the sizes of its tail."""
    # Not a copy of the row: it would have whatever was in memory in the gaps between the fields.
    row = np.frombuffer(bytearray(raw), HEADER, count=1)
    row["capacity"], row["inflight_capacity"] = shape.capacity, shape.inflight_capacity
    row["tables_bytes"], row["tables_used"] = shape.tables_bytes, shape.tables_bytes
    row["sample_capacity"] = row["samples"] = 0
    row["file_bytes"] = shape.records_offset + kept * RECORD.itemsize
    return bytes(row.tobytes())
