"""What it may cost to read the files that others left: one budget of memory and time for all.

Some bytes of a file stand for much more than themselves. ``[[0, 1048576, 1]]`` is a group of a
million ranks, and the world size in a header is a state for each rank. A bound on each such place
is not enough, because many small files together would still fill any memory. So whatever reads a
run spends from one ``Budget`` before it makes something large, and a file that asks for more than
is left is refused.

A budget grows with the bytes that the files take on disk: a byte becomes a few bytes in memory,
whatever it means, and large runs need much. The holes of a sparse file bring nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path

from rankcall.errors import CorruptRunError

# What there is before any file is read: room for a world of 100,000 ranks and its groups, of which
# a few small files may be all that is left.
_FIRST_BYTES = 256 << 20
# More than a byte on disk becomes. The smallest entry of a side table takes 16 bytes, and is kept
# as an object of some 170.
_BYTES_OF_BYTE = 16
# Rings take 10 ns a byte to read and dumps 100 ns; some machines are much slower. This is time on a
# CPU: what a file costs depends on its author, and how long it waits for a busy machine does not.
_FIRST_S, _S_OF_BYTE = 60.0, 1e-6

RANK_BYTES = 1024  # of a rank of the world, of which nothing is known: it costs 450 in a diagnosis
MEMBER_BYTES = 64  # of a member of a group: its number, and its places in the tables of groups


class Budget:
    """The memory and the time that are left for reading one run. For one thread.

    Args:
        clock: Returns the time in seconds; by default, what this thread has had of a CPU.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._bytes_left = _FIRST_BYTES
        self._until = clock() + _FIRST_S
        self._world = 0
        self._paid: set[Hashable] = set()
        self._paid_for_file: list[Hashable] = []
        self._file: Path | str = "this run"

    @contextlib.contextmanager
    def reading(self, path: Path, status: os.stat_result) -> Iterator[None]:
        """Read one file in the block. ``status`` is that of the open file.

        If the block raises, nothing of the file is kept, and what it has spent is given back: one
        hostile file among sound ones is the only one that is left out.
        """
        size = min(status.st_size, status.st_blocks * 512)
        before = self._bytes_left, self._world
        self._file, self._paid_for_file = path, []
        self._bytes_left += size * _BYTES_OF_BYTE
        self._until += size * _S_OF_BYTE
        try:
            yield
        except BaseException:
            self._bytes_left, self._world = before
            self._paid.difference_update(self._paid_for_file)
            raise

    def spend(self, size: int) -> None:
        """Spend so many bytes of memory before they are taken.

        Raises:
            CorruptRunError: There are not as many left, or the time is over. It names the file
                that was read last.
        """
        if size > self._bytes_left:
            raise CorruptRunError(
                f"{self._file}: damaged: it stands for more memory than a run of this size needs"
            )
        self.check_time()
        self._bytes_left -= size

    def check_time(self) -> None:
        """Raise ``CorruptRunError`` if the time is over. For loops that may be long."""
        if self._clock() > self._until:
            raise CorruptRunError(
                f"{self._file}: damaged: this run takes longer to read than any of this size"
            )

    def spend_once(self, what: Hashable, size: int) -> None:
        """Spend bytes for something that the files of the run share; later calls cost nothing."""
        key = hash(what)  # a group's text may be long, and is not kept for this
        if key not in self._paid:
            self.spend(size)
            self._paid.add(key)
            self._paid_for_file.append(key)

    def spend_on_world(self, ranks: int) -> None:
        """Spend what a world of so many ranks costs; a smaller one costs nothing more."""
        if ranks > self._world:
            self.spend((ranks - self._world) * RANK_BYTES)
            self._world = ranks
