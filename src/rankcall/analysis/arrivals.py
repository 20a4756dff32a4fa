"""When the members of a group came to its collectives, and which of them came last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rankcall import record
from rankcall.analysis.clocks import HostClock, RowClocks
from rankcall.analysis.collectives import OP_NAMES, CollectiveTable, present

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]

# Records in a block: 1 MiB a column of times, so that a block's columns stay in the caches.
_BLOCK = 1 << 17
NEVER = np.iinfo(np.int64).min
SYNC = np.array([name in record.SYNCHRONISING for name in OP_NAMES])
FROM_ROOT = np.array([name in record.FROM_ROOT for name in OP_NAMES])
TO_ROOT = np.array([name in record.TO_ROOT for name in OP_NAMES])


@dataclass
class Arrivals:
    """The times at which members came to some collectives: ``[collective, member]``, aligned ns.

    ``order`` sorts each row; absent members come first.
    """

    times: Ints
    here: Bools
    order: Indices = field(init=False)
    sorted: Ints = field(init=False)
    absent: Indices = field(init=False)  # of each collective

    def __post_init__(self) -> None:
        self.absent = self.times.shape[1] - np.count_nonzero(self.here, axis=1)
        if self.absent.any():
            self.times = np.where(self.here, self.times, NEVER)
        self.order = np.argsort(self.times, axis=1)
        self.sorted = np.take_along_axis(self.times, self.order, axis=1)

    @property
    def last(self) -> Ints:
        """The time at which the last member came."""
        return self.sorted[:, -1]

    @property
    def last_member(self) -> Indices:
        """The member that came last."""
        return self.order[:, -1]

    @property
    def behind(self) -> Floats:
        """By how much the last came after the second-latest; 0 if it was alone."""
        count = self.times.shape[1] - self.absent
        if self.times.shape[1] < 2:
            return np.zeros(len(self.times))
        gap = (self.sorted[:, -1] - self.sorted[:, -2]).astype(np.float64)
        return np.where(count > 1, gap, 0.0)


@dataclass
class Block:
    """Some collectives of a table as ``[collective, member]``, aligned."""

    columns: Indices
    came: Arrivals
    duration: Floats  # NaN if it did not end
    ended: Bools


def blocks(
    table: CollectiveTable, columns: Indices, clocks: Sequence[HostClock]
) -> Iterator[Block]:
    """Yield some of a table's collectives, a block at a time, with their arrivals sorted."""
    width = max(1, _BLOCK // len(table.ranks))
    clock = RowClocks([clocks[host] for host in table.hosts])
    for start in range(0, len(columns), width):
        part = columns[start : start + width]
        run = slice(int(part[0]), int(part[-1]) + 1)
        pick: Any = run if run.stop - run.start == len(part) else part
        arrival, completed = table.arrival[:, pick], table.completed[:, pick]
        here, ended = present(arrival), present(completed)
        aligned = clock.align(np.ascontiguousarray(arrival.T))
        spent = (completed - table.started[:, pick]).T.astype(np.float64, order="C")
        if not ended.all():
            spent[~ended.T] = np.nan
        yield Block(part, Arrivals(aligned, np.ascontiguousarray(here.T)), spent, ended.T)
