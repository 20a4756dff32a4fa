"""The parts of a file that hold data: a hole of a sparse file reads as zeros, and is skipped.

A ring of the largest capacity has 3 GiB. As a sparse file it takes one block on disk, so to read
what its header promises would take a million times its size in memory.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator


def data_in(
    descriptor: int, status: os.stat_result, begin: int, end: int
) -> Iterator[tuple[int, int]]:
    """Yield where data begins and ends between two offsets of an open file, in order.

    A file system that knows no holes has data everywhere.
    """
    if begin < end and status.st_blocks * 512 >= status.st_size:  # as most rings: no look-ups
        yield begin, end
        return
    while begin < end:
        try:
            begin = os.lseek(descriptor, begin, os.SEEK_DATA)
            hole = os.lseek(descriptor, begin, os.SEEK_HOLE)
        except OSError as error:
            if error.errno != errno.ENXIO:  # else there is no data from here on
                yield begin, end
            return
        if begin >= end:
            return
        yield begin, min(hole, end)
        begin = hole
