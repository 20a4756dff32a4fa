"""Samples in a ring file: written round and round, read while they are written, and hostile."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import pytest

from rankcall.errors import CorruptRunError
from rankcall.ring.layout import (
    MAX_SAMPLES,
    SAMPLE,
    SAMPLE_COUNTERS,
    Geometry,
    offset_of,
)
from rankcall.ring.reader import read_ring
from rankcall.ring.samples import SampleWriter
from rankcall.ring.tail import tail_of
from rankcall.ring.writer import Identity, create, put

SHAPE = Geometry(64, 8, 4096, sample_capacity=4)
GC, FULL = (1 << SAMPLE_COUNTERS.index(name) for name in ("gc_ns", "full_gc_ns"))


def made(folder: Path, shape: Geometry = SHAPE) -> tuple[Path, mmap.mmap]:
    """Make a ring."""
    path = folder / "x.ring"
    return path, create(path, Identity(rank=0, world_size=1, host="h"), shape)


def test_the_newest_samples_are_read_oldest_first(tmp_path: Path) -> None:
    """A ring of four keeps the last four of six, with the counters that were known."""
    path, ring = made(tmp_path)
    writer = SampleWriter(ring, SHAPE)
    for number in range(1, 7):
        counters = {"gc_ns": 10 * number}
        if number % 2:
            counters["full_gc_ns"] = number
        writer.write(1000 * number, 7, counters)
    samples = read_ring(path).samples
    assert samples["number"].tolist() == [3, 4, 5, 6]
    assert samples["time_ns"].tolist() == [3000, 4000, 5000, 6000]
    assert samples["gc_ns"].tolist() == [30, 40, 50, 60]
    assert samples["known"].tolist() == [GC | FULL, GC, GC | FULL, GC]
    assert set(samples["thread"].tolist()) == {7}


@pytest.mark.parametrize("shape", [Geometry(64, 8, 4096), SHAPE.shrunk(2)])
def test_a_ring_without_room_has_none(tmp_path: Path, shape: Geometry) -> None:
    """As those of rankcall 0.1, and those that found little room."""
    path, ring = made(tmp_path, shape)
    SampleWriter(ring, shape).write(1000, 7, {"gc_ns": 5})
    assert len(read_ring(path).samples) == 0


def test_records_are_where_they_were(tmp_path: Path) -> None:
    """Without samples, a file has the layout of rankcall 0.1."""
    assert Geometry(64, 8, 4096).records_offset == 4096 + 8 * 192 + 4096
    assert SHAPE.records_offset - Geometry(64, 8, 4096).records_offset == 4 * SAMPLE.itemsize


def row_at(slot: int) -> int:
    """Return where a row begins."""
    return SHAPE.samples_offset + slot * SAMPLE.itemsize


@pytest.mark.parametrize("end", ["begin", "end"])
def test_a_torn_row_is_left_out(tmp_path: Path, end: str) -> None:
    """Its numbers differ while it is written."""
    path, ring = made(tmp_path)
    writer = SampleWriter(ring, SHAPE)
    for number in (1, 2, 3):
        writer.write(1000 * number, 7, {"gc_ns": number})
    at = row_at(1) if end == "begin" else row_at(2) - 8
    ring[at : at + 8] = bytes(8)
    assert read_ring(path).samples["number"].tolist() == [1, 3]


def test_times_that_run_backwards_are_damage(tmp_path: Path) -> None:
    """Rows after them that go on are kept."""
    path, ring = made(tmp_path)
    writer = SampleWriter(ring, SHAPE)
    for time_ns in (5000, 4000, 6000, -1):
        writer.write(time_ns, 7, {"gc_ns": 1})
    assert read_ring(path).samples["time_ns"].tolist() == [5000, 6000]


def test_hostile_headers(tmp_path: Path) -> None:
    """More samples than there is room for are not read; impossible sizes are damage."""
    path, ring = made(tmp_path)
    SampleWriter(ring, SHAPE).write(1000, 7, {"gc_ns": 5})
    put(ring, "samples", (1 << 64) - 1)
    assert read_ring(path).samples["number"].tolist() == [1]
    struct.pack_into("<I", ring, offset_of("sample_capacity"), MAX_SAMPLES + 1)
    with pytest.raises(CorruptRunError, match="impossible sizes"):
        read_ring(path)


def test_the_tail_of_a_ring_has_none(tmp_path: Path) -> None:
    """A tail goes through the job's store, and a verdict there has a summary of them."""
    path, ring = made(tmp_path)
    SampleWriter(ring, SHAPE).write(1000, 7, {"gc_ns": 5})
    short = tmp_path / "short.ring"
    short.write_bytes(tail_of(path))
    tail = read_ring(short)
    assert (len(tail.samples), tail.problem) == (0, None)
