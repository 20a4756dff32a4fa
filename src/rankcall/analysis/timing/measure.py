"""Walk over a group's collectives in blocks that fit the cache, and measure each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rankcall.analysis.timing.clocks import HostClock, RowClocks
from rankcall.analysis.timing.collectives import Lane, present
from rankcall.analysis.timing.p2p import Mail
from rankcall.analysis.timing.skew import (
    Arrivals,
    Waits,
    already_waiting,
    root_waits,
    wait_for_all,
    wait_for_root,
    wait_for_sender,
)
from rankcall.record import OPS, SYNCHRONISING

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

_BLOCK = 1 << 17  # records: 1 MiB a column of times
SYNC = np.array([name in SYNCHRONISING for name in OPS])
FROM_ROOT = np.array([name in ("broadcast", "scatter") for name in OPS])
TO_ROOT = np.array([name in ("reduce", "gather") for name in OPS])
_SEND, _RECV = OPS.index("send"), OPS.index("recv")


@dataclass
class Measured:
    """Some collectives or messages of one group, one element each. Times in ns.

    NaN where none of its members finished it.
    """

    op: npt.NDArray[np.uint8]
    bytes: npt.NDArray[np.int64]
    size: Floats  # S
    transfer: Floats  # t
    mean: Floats  # of its members' durations
    spent: Floats  # by all members together
    waited: Floats  # by all members together


@dataclass
class Blame:
    """Waiting by rank, over everything measured; the index is the global rank."""

    ranks: int
    caused: Floats = field(init=False)
    suffered: Floats = field(init=False)
    came_last: npt.NDArray[np.int64] = field(init=False)
    late_by: Floats = field(init=False)  # summed over the collectives it came last to
    took_part: npt.NDArray[np.int64] = field(init=False)  # in collectives one can be last to

    def __post_init__(self) -> None:
        self.caused, self.suffered, self.late_by = (np.zeros(self.ranks) for _ in range(3))
        self.came_last, self.took_part = (np.zeros(self.ranks, np.int64) for _ in range(2))

    def charge(self, ranks: Indices, waits: Waits) -> None:
        """Add the waiting of some members."""
        np.add.at(self.caused, ranks, waits.caused)
        np.add.at(self.suffered, ranks, waits.suffered)

    def note_last(self, ranks: Indices, came: Arrivals) -> None:
        """Count who came last, and by how much, where two or more came."""
        together = came.times.shape[1] - came.absent > 1
        last, behind = came.last_member[together], came.behind[together]
        members = len(ranks)
        self.came_last[ranks] += np.bincount(last, minlength=members)
        self.late_by[ranks] += np.bincount(last, weights=behind, minlength=members)
        self.took_part[ranks] += np.count_nonzero(came.here[together], axis=0)


@dataclass
class Block:
    """Some collectives of a lane as ``[collective, member]``, aligned."""

    columns: Indices
    came: Arrivals
    duration: Floats  # NaN where it did not end
    ended: npt.NDArray[np.bool_]


def measure_lane(lane: Lane, clocks: Sequence[HostClock], blame: Blame) -> Measured:
    """Measure all collectives of a lane and charge the waiting they show."""
    count = len(lane.seq)
    result = Measured(lane.op, lane.bytes, lane.size, *(np.full(count, np.nan) for _ in range(4)))
    result.waited[:] = 0.0
    for kind in (SYNC, FROM_ROOT, TO_ROOT, ~(SYNC | FROM_ROOT | TO_ROOT)):
        until = np.iinfo(np.int64).min
        for block in blocks(lane, np.flatnonzero(kind[lane.op]), clocks):
            _durations(block, result, slowest=kind is not SYNC)
            if kind is SYNC:
                until = _all_wait(lane, block, result, blame, until)
            elif kind is FROM_ROOT or kind is TO_ROOT:
                _rooted_wait(lane, block, result, blame, receive=kind is TO_ROOT)
    recorded = np.flatnonzero(present(lane.arrival).any(axis=0))
    return result if len(recorded) == count else _only(result, recorded)


def _only(measured: Measured, rows: npt.NDArray[Any]) -> Measured:
    """Leave out numbers that no member has a record of (a gap in all rings)."""
    return Measured(*(column[rows] for column in vars(measured).values()))


def blocks(lane: Lane, columns: Indices, clocks: Sequence[HostClock]) -> Iterator[Block]:
    """Yield some of a lane's collectives, a block at a time, with their arrivals sorted."""
    width = max(1, _BLOCK // len(lane.ranks))
    clock = RowClocks([clocks[host] for host in lane.hosts])
    for start in range(0, len(columns), width):
        part = columns[start : start + width]
        run = slice(int(part[0]), int(part[-1]) + 1)
        pick: Any = run if run.stop - run.start == len(part) else part
        arrival, completed = lane.arrival[:, pick], lane.completed[:, pick]
        here, ended = present(arrival), present(completed)
        aligned = clock.align(np.ascontiguousarray(arrival.T))
        spent = (completed - lane.started[:, pick]).T.astype(np.float64, order="C")
        if not ended.all():
            spent[~ended.T] = np.nan
        yield Block(part, Arrivals(aligned, np.ascontiguousarray(here.T)), spent, ended.T)


def _durations(block: Block, result: Measured, *, slowest: bool) -> None:
    """Fill in what the durations alone show; ``slowest``: t is the longest, not the shortest."""
    spent, columns = block.duration, block.columns
    whole = bool(block.ended.all())
    least, most = (np.min, np.max) if whole else (np.fmin.reduce, np.fmax.reduce)
    total = spent.sum(axis=1) if whole else np.nansum(spent, axis=1)
    ends = np.count_nonzero(block.ended, axis=1)
    some = ends > 0
    result.spent[columns] = total
    result.mean[columns[some]] = total[some] / ends[some]
    result.transfer[columns] = (most if slowest else least)(spent, axis=1)


def _all_wait(lane: Lane, block: Block, result: Measured, blame: Blame, until: int) -> int:
    """Handle ops that all members leave together; return when the last came to any so far."""
    columns = block.columns
    beyond = result.spent[columns] - result.transfer[columns] * np.count_nonzero(
        block.ended, axis=1
    )
    result.waited[columns] = np.nan_to_num(beyond)
    blame.note_last(lane.ranks, block.came)
    if len(lane.ranks) > 1:
        waits = wait_for_all(block.came, already_waiting(block.came.last, until))
        blame.charge(lane.ranks, waits)
    return max(until, int(block.came.last.max()))


def _rooted_wait(
    lane: Lane, block: Block, result: Measured, blame: Blame, *, receive: bool
) -> None:
    """Handle ops with a root: t is the slowest receiver's; waiting is what arrivals show."""
    root = lane.root[block.columns]
    rows = np.flatnonzero(root >= 0)
    rows = rows[block.came.here[rows, root[rows]]]
    if not len(rows):
        return
    root, columns = root[rows], block.columns[rows]
    is_root = np.arange(len(lane.ranks)) == root[:, None]
    receivers = np.where(is_root == receive, block.duration[rows], np.nan)
    slowest = np.fmax.reduce(receivers, axis=1)
    # A scatter whose receivers left no records still took as long as its root did.
    result.transfer[columns] = np.where(np.isnan(slowest), result.transfer[columns], slowest)
    if len(lane.ranks) > 1:
        came = Arrivals(block.came.times[rows], block.came.here[rows])
        waits = (root_waits if receive else wait_for_root)(came, root)
        blame.charge(lane.ranks, waits)
        result.waited[columns] = np.minimum(waits.by_collective, result.spent[columns])


def measure_mail(mail: Mail, clocks: Sequence[HostClock], blame: Blame) -> Measured:
    """Measure all messages of a group, its sends and its receives each as one element."""
    columns = mail.columns
    duration = (columns["completed"] - columns["started"]).astype(np.float64)
    duration[~present(columns["completed"])] = np.nan
    arrival = columns["arrival"].copy()
    for host in np.unique(columns["host"]):
        rows = columns["host"] == host
        arrival[rows] = clocks[host].align(arrival[rows])
    transfer, waited = duration.copy(), np.zeros(len(duration))
    both = (mail.sent >= 0) & (mail.received >= 0)
    sent, received = mail.sent[both], mail.received[both]
    transfer[sent] = np.where(np.isnan(duration[received]), duration[sent], duration[received])
    waits = wait_for_sender(arrival[sent], arrival[received], np.nan_to_num(duration[received]))
    waited[received] = waits
    np.add.at(blame.caused, columns["rank"][sent], waits)
    np.add.at(blame.suffered, columns["rank"][received], waits)
    return Measured(
        columns["op"], columns["bytes"], columns["size"], transfer, duration,
        np.nan_to_num(duration), waited,
    )  # fmt: skip
