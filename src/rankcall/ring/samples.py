"""Samples: what a rank measured of itself, some times a second, as counters that only grow.

They stand in the ring file between the side tables and the records, in a ring of their own. A row
is written by one thread while others read it, so its number stands at its begin and at its end: a
reader takes a row only if both are the number that belongs there.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rankcall.ring.extents import data_in
from rankcall.ring.layout import SAMPLE, SAMPLE_COUNTERS, Geometry, Header, offset_of

Samples = npt.NDArray[Any]

_ROW = struct.Struct("<QqII" + "Q" * (len(SAMPLE_COUNTERS) + 1))
assert _ROW.size == SAMPLE.itemsize


def no_samples() -> Samples:
    """Return an empty table."""
    return np.zeros(0, SAMPLE)


class SampleWriter:
    """Writes the samples of the process that owns a ring, from one thread."""

    def __init__(self, ring: mmap.mmap, geometry: Geometry) -> None:
        self._ring, self._geometry = ring, geometry
        self._written = 0

    def write(self, time_ns: int, thread: int, counters: Mapping[str, int]) -> None:
        """Write one row.

        Args:
            time_ns: When the counters were read (CLOCK_MONOTONIC).
            thread: The kernel's id of the thread that the counters of a thread are of.
            counters: The counters that are known, by name.
        """
        capacity = self._geometry.sample_capacity
        if not capacity:
            return
        known, values = 0, []
        for bit, name in enumerate(SAMPLE_COUNTERS):
            value = counters.get(name)
            known |= (value is not None) << bit
            values.append(0 if value is None else value & 0xFFFF_FFFF_FFFF_FFFF)
        number = self._written + 1
        at = self._geometry.samples_offset + (self._written % capacity) * SAMPLE.itemsize
        self._ring[at : at + 8] = bytes(8)  # no reader takes the row until it is whole
        row = _ROW.pack(number, time_ns, thread, known, *values, number)
        self._ring[at + 8 : at + len(row)] = row[8:]
        self._ring[at : at + 8] = row[:8]
        self._written = number
        struct.pack_into("<Q", self._ring, offset_of("samples"), number)


def read_samples(fd: int, status: os.stat_result, header: Header) -> Samples:
    """Return the samples of a ring file, oldest first, without damaged and torn rows."""
    shape, width = header.geometry, SAMPLE.itemsize
    rows = min(header.samples, shape.sample_capacity)
    if not rows or shape.sample_bytes != width:
        return no_samples()  # none yet, or those of another version of rankcall
    begin = shape.samples_offset
    end = min(begin + rows * width, status.st_size)
    pieces = [no_samples()]
    for first, last in data_in(fd, status, begin, end):
        # An extent may begin or end within a row, which is then left out.
        first += -(first - begin) % width
        last -= (last - begin) % width
        if first < last:
            raw = os.pread(fd, last - first, first)
            pieces.append(np.frombuffer(raw[: len(raw) // width * width], SAMPLE))
    samples = np.concatenate(pieces)
    whole = (samples["number"] > 0) & (samples["number"] == samples["again"])
    samples = samples[whole & (samples["time_ns"] > 0)]
    samples = samples[np.argsort(samples["number"], kind="stable")]
    # Time goes on from one row to the next; rows that say otherwise are damaged.
    later = np.ones(len(samples), bool)
    later[1:] = samples["time_ns"][1:] > np.maximum.accumulate(samples["time_ns"])[:-1]
    sound: Samples = samples[later]
    return sound
