"""Which ranks came last, which waited, and which rank's lateness a wait is charged to.

Each moment that members spend waiting is shared equally by those who have not come yet. So one
straggler bears all the waiting that it causes beyond the second-latest rank, two that come late
together bear half each, and what all ranks are charged adds up to what all ranks waited.

A member that waits for one collective already does not wait twice for the next of its group: an
async burst behind one late rank counts once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rankcall.analysis.timing.clocks import HostClock, RowClocks
from rankcall.analysis.timing.collectives import CollectiveTable, MessageTable, present
from rankcall.record import OPS, SYNCHRONISING

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]

_BLOCK = 1 << 17  # records: 1 MiB a column of times
SYNC = np.array([name in SYNCHRONISING for name in OPS])
FROM_ROOT = np.array([name in ("broadcast", "scatter") for name in OPS])
TO_ROOT = np.array([name in ("reduce", "gather") for name in OPS])


@dataclass
class Arrivals:
    """The times at which members came to some collectives: ``[collective, member]``, aligned ns.

    ``order`` sorts each row; absent members come first.
    """

    times: npt.NDArray[np.int64]
    here: Bools
    order: npt.NDArray[np.intp] = field(init=False)
    sorted: npt.NDArray[np.int64] = field(init=False)
    absent: npt.NDArray[np.intp] = field(init=False)  # of each collective

    def __post_init__(self) -> None:
        self.absent = self.times.shape[1] - np.count_nonzero(self.here, axis=1)
        if self.absent.any():
            self.times = np.where(self.here, self.times, np.iinfo(np.int64).min)
        self.order = np.argsort(self.times, axis=1)
        self.sorted = np.take_along_axis(self.times, self.order, axis=1)

    @property
    def last(self) -> npt.NDArray[np.int64]:
        """The time at which the last member came."""
        return self.sorted[:, -1]

    @property
    def last_member(self) -> npt.NDArray[np.intp]:
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
class Waits:
    """Waiting caused and suffered, in ns, by member, summed over the collectives."""

    caused: Floats
    suffered: Floats
    by_collective: Floats


def _by_member(who: npt.NDArray[np.intp], what: Floats, members: int) -> Floats:
    """Sum ``what`` by member."""
    sums = np.bincount(who.ravel(), weights=what.ravel(), minlength=members)
    return sums.astype(np.float64, copy=False)


def wait_for_all(came: Arrivals, not_before: npt.NDArray[np.int64]) -> Waits:
    """Share out the waiting of collectives that no member can leave before the last has come.

    ``not_before``: for each collective, the time until which members wait for an earlier one.
    """
    collectives, members = came.times.shape
    start = _first_moment(came, not_before)
    clipped = np.maximum(came.sorted, start[:, None])
    gaps = np.diff(clipped, axis=1).astype(np.float64)
    # After arrival k, the k ranks that have come, less the absent ones, wait for the others.
    waiting = np.maximum(np.arange(1, members) - came.absent[:, None], 0)
    shares = gaps * (waiting / np.arange(members - 1, 0, -1))
    charge = np.zeros((collectives, members))
    np.cumsum(shares, axis=1, out=charge[:, 1:])
    caused = _by_member(came.order, charge, members)
    waited = (clipped[:, -1:] - clipped).astype(np.float64)
    if came.absent.any():
        waited[np.arange(members) < came.absent[:, None]] = 0.0
    suffered = _by_member(came.order, waited, members)
    return Waits(caused, suffered, waited.sum(axis=1))


def _first_moment(came: Arrivals, not_before: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return when waiting begins: at the first arrival, or when earlier waiting is over."""
    first = np.take_along_axis(
        came.sorted, np.minimum(came.absent, came.times.shape[1] - 1)[:, None], axis=1
    )
    return np.maximum(first[:, 0], not_before)


def already_waiting(last: npt.NDArray[np.int64], before: int) -> npt.NDArray[np.int64]:
    """Return, for each collective in order, when the last member came to any earlier one."""
    return np.maximum.accumulate(np.concatenate([[np.int64(before)], last]))[:-1]


def wait_for_root(came: Arrivals, root: npt.NDArray[np.intp]) -> Waits:
    """Charge the root for what the others wait for it (broadcast, scatter).

    ``root`` is the root's row, by collective.
    """
    collectives, members = came.times.shape
    rows = np.arange(collectives)
    at = came.times[rows, root]
    waited = np.where(came.here, np.maximum(at[:, None] - came.times, 0), 0).astype(np.float64)
    by_collective = waited.sum(axis=1)
    caused = _by_member(root, by_collective, members)
    return Waits(caused, waited.sum(axis=0), by_collective)


def root_waits(came: Arrivals, root: npt.NDArray[np.intp]) -> Waits:
    """Charge the others for what the root waits for them (reduce, gather).

    ``root`` is the root's row, by collective.
    """
    collectives, members = came.times.shape
    at = came.times[np.arange(collectives), root]
    clipped = np.maximum(came.sorted, at[:, None])
    gaps = np.diff(clipped, axis=1).astype(np.float64)
    charge = np.zeros((collectives, members))
    np.cumsum(gaps / np.arange(members - 1, 0, -1), axis=1, out=charge[:, 1:])
    caused = _by_member(came.order, charge, members)
    waited = (clipped[:, -1] - at).astype(np.float64)
    return Waits(caused, _by_member(root, waited, members), waited)


def wait_for_sender(
    sent: npt.NDArray[np.int64], received: npt.NDArray[np.int64], longest: Floats
) -> Floats:
    """Return how long each receiver waited for its sender to begin, ``longest`` at most."""
    return np.clip((sent - received).astype(np.float64), 0.0, longest)


@dataclass
class Measured:
    """Some collectives or messages of one group, one element each. Times in ns.

    NaN if no member finished it.
    """

    op: npt.NDArray[np.uint8]
    bytes: npt.NDArray[np.int64]
    size: Floats  # S
    transfer: Floats  # t
    mean: Floats  # of its members' durations
    spent: Floats  # by all members together
    waited: Floats  # by all members together


@dataclass
class WaitTotals:
    """Waiting by global rank, summed over all that was measured."""

    ranks: int
    caused: Floats = field(init=False)
    suffered: Floats = field(init=False)
    came_last: npt.NDArray[np.int64] = field(init=False)
    late_by: Floats = field(init=False)  # summed over the collectives it came last to
    took_part: npt.NDArray[np.int64] = field(init=False)  # in collectives with a last arrival

    def __post_init__(self) -> None:
        self.caused, self.suffered, self.late_by = (np.zeros(self.ranks) for _ in range(3))
        self.came_last, self.took_part = (np.zeros(self.ranks, np.int64) for _ in range(2))

    def charge(self, ranks: Indices, waits: Waits) -> None:
        """Add the waiting of some members."""
        np.add.at(self.caused, ranks, waits.caused)
        np.add.at(self.suffered, ranks, waits.suffered)

    def note_last(self, ranks: Indices, came: Arrivals) -> None:
        """Count which rank came last, and by how much, if two or more came."""
        together = came.times.shape[1] - came.absent > 1
        last, behind = came.last_member[together], came.behind[together]
        members = len(ranks)
        self.came_last[ranks] += np.bincount(last, minlength=members)
        self.late_by[ranks] += np.bincount(last, weights=behind, minlength=members)
        self.took_part[ranks] += np.count_nonzero(came.here[together], axis=0)


@dataclass
class Block:
    """Some collectives of a table as ``[collective, member]``, aligned."""

    columns: Indices
    came: Arrivals
    duration: Floats  # NaN if it did not end
    ended: npt.NDArray[np.bool_]


def measure_collectives(
    table: CollectiveTable, clocks: Sequence[HostClock], totals: WaitTotals
) -> Measured:
    """Measure all collectives of a table and charge the waiting they show."""
    count = len(table.seq)
    result = Measured(
        table.op, table.bytes, table.size, *(np.full(count, np.nan) for _ in range(4))
    )
    result.waited[:] = 0.0
    for kind in (SYNC, FROM_ROOT, TO_ROOT, ~(SYNC | FROM_ROOT | TO_ROOT)):
        until = np.iinfo(np.int64).min
        for block in blocks(table, np.flatnonzero(kind[table.op]), clocks):
            _durations(block, result, slowest=kind is not SYNC)
            if kind is SYNC:
                until = _all_wait(table, block, result, totals, until)
            elif kind is FROM_ROOT or kind is TO_ROOT:
                _rooted_wait(table, block, result, totals, receive=kind is TO_ROOT)
    recorded = np.flatnonzero(present(table.arrival).any(axis=0))
    return result if len(recorded) == count else _only(result, recorded)


def _only(measured: Measured, rows: npt.NDArray[Any]) -> Measured:
    """Leave out sequence numbers that no member has a record of (a gap in all rings)."""
    return Measured(*(column[rows] for column in vars(measured).values()))


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


def _durations(block: Block, result: Measured, *, slowest: bool) -> None:
    """Fill in the columns that follow from the durations alone.

    ``slowest``: t is the longest duration, not the shortest.
    """
    spent, columns = block.duration, block.columns
    whole = bool(block.ended.all())
    least, most = (np.min, np.max) if whole else (np.fmin.reduce, np.fmax.reduce)
    total = spent.sum(axis=1) if whole else np.nansum(spent, axis=1)
    ends = np.count_nonzero(block.ended, axis=1)
    some = ends > 0
    result.spent[columns] = total
    result.mean[columns[some]] = total[some] / ends[some]
    result.transfer[columns] = (most if slowest else least)(spent, axis=1)


def _all_wait(
    table: CollectiveTable, block: Block, result: Measured, totals: WaitTotals, until: int
) -> int:
    """Handle ops that all members leave together.

    Returns the time at which the last member came to any of them so far.
    """
    columns = block.columns
    beyond = result.spent[columns] - result.transfer[columns] * np.count_nonzero(
        block.ended, axis=1
    )
    result.waited[columns] = np.nan_to_num(beyond)
    totals.note_last(table.ranks, block.came)
    if len(table.ranks) > 1:
        waits = wait_for_all(block.came, already_waiting(block.came.last, until))
        totals.charge(table.ranks, waits)
    return max(until, int(block.came.last.max()))


def _rooted_wait(
    table: CollectiveTable, block: Block, result: Measured, totals: WaitTotals, *, receive: bool
) -> None:
    """Handle ops with a root: t is the slowest receiver's; the arrivals show the waiting."""
    root = table.root[block.columns]
    rows = np.flatnonzero(root >= 0)
    rows = rows[block.came.here[rows, root[rows]]]
    if not len(rows):
        return
    root, columns = root[rows], block.columns[rows]
    is_root = np.arange(len(table.ranks)) == root[:, None]
    receivers = np.where(is_root == receive, block.duration[rows], np.nan)
    slowest = np.fmax.reduce(receivers, axis=1)
    # A scatter without records of its receivers still took as long as its root did.
    result.transfer[columns] = np.where(np.isnan(slowest), result.transfer[columns], slowest)
    if len(table.ranks) > 1:
        came = Arrivals(block.came.times[rows], block.came.here[rows])
        waits = (root_waits if receive else wait_for_root)(came, root)
        totals.charge(table.ranks, waits)
        result.waited[columns] = np.minimum(waits.by_collective, result.spent[columns])


def measure_messages(
    messages: MessageTable, clocks: Sequence[HostClock], totals: WaitTotals
) -> Measured:
    """Measure all messages of a group, its sends and its receives each as one element."""
    columns = messages.columns
    duration = (columns["completed"] - columns["started"]).astype(np.float64)
    duration[~present(columns["completed"])] = np.nan
    arrival = columns["arrival"].copy()
    for host in np.unique(columns["host"]):
        rows = columns["host"] == host
        arrival[rows] = clocks[host].align(arrival[rows])
    transfer, waited = duration.copy(), np.zeros(len(duration))
    both = (messages.sent >= 0) & (messages.received >= 0)
    sent, received = messages.sent[both], messages.received[both]
    transfer[sent] = np.where(np.isnan(duration[received]), duration[sent], duration[received])
    waits = wait_for_sender(arrival[sent], arrival[received], np.nan_to_num(duration[received]))
    waited[received] = waits
    np.add.at(totals.caused, columns["rank"][sent], waits)
    np.add.at(totals.suffered, columns["rank"][received], waits)
    return Measured(
        columns["op"], columns["bytes"], columns["size"], transfer, duration,
        np.nan_to_num(duration), waited,
    )  # fmt: skip
