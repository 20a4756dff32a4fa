"""The durations, the bandwidth's time and the waiting of each collective and message of a group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankcall.analysis.arrivals import (
    FROM_ROOT,
    SYNC,
    TO_ROOT,
    Block,
    Floats,
    Ints,
    blocks,
)
from rankcall.analysis.charging import WaitTotals, shares
from rankcall.analysis.clocks import HostClock
from rankcall.analysis.collectives import ISSUE, CollectiveTable, MessageTable, present
from rankcall.analysis.wait_chains import WaitChains, message_waits
from rankcall.analysis.waiting import covered


@dataclass
class Measured:
    """Some collectives or messages of one group, one element each. Times in ns.

    NaN if no member finished it. ``ranks``: of a message its rank, of collectives the members.
    ``began`` and ``ended``: of each message, or ``[member, collective]``.
    """

    op: npt.NDArray[np.uint8]
    bytes: Ints
    size: Floats  # S
    transfer: Floats  # t
    mean: Floats  # of its members' durations
    spent: Floats  # by all members together
    waited: Floats  # by all members together
    source: npt.NDArray[np.uint8]  # of its times: HOST, DEVICE or ISSUE
    ranks: npt.NDArray[Any]
    began: Ints
    ended: Ints

    def spent_by_rank(self, rows: npt.NDArray[np.intp]) -> Iterator[tuple[int, float]]:
        """Yield how long each rank was in any of some ops, ns; leave out ranks that ended none."""
        if self.began.ndim == 2:
            # Rank by rank: the rows of a large job do not fit into the processor's caches together.
            whole = len(rows) == self.began.shape[1]
            for rank, began, ended in zip(self.ranks.tolist(), self.began, self.ended, strict=True):
                if not whole:
                    began, ended = began[rows], ended[rows]
                here = present(ended)
                if not here.all():
                    began, ended = began[here], ended[here]
                if len(ended):
                    yield rank, _covered(began, ended)
            return
        rows = rows[present(self.ended[rows])]
        for rank in np.unique(self.ranks[rows]).tolist():
            mine = rows[self.ranks[rows] == rank]
            yield rank, _covered(self.began[mine], self.ended[mine])


def _covered(began: Ints, ended: Ints) -> float:
    """Return how much time intervals cover together."""
    if np.any(began[1:] < began[:-1]):
        order = np.argsort(began, kind="stable")
        began, ended = began[order], ended[order]
    return covered(began, ended)


def measure_collectives(
    table: CollectiveTable, waited: Ints, clocks: Sequence[HostClock], totals: WaitTotals
) -> Measured:
    """Measure all collectives of a table and charge the waiting in them (see ``waits_of``)."""
    count = len(table.seq)
    transfer, mean, spent, waits = (np.full(count, np.nan) for _ in range(4))
    measured = Measured(
        table.op,
        table.bytes,
        table.size,
        transfer,
        mean,
        spent,
        waits,
        table.source,
        table.ranks,
        table.started,
        table.completed,
    )
    measured.waited[:] = waited.sum(axis=0)
    for kind in (SYNC, FROM_ROOT, TO_ROOT, ~(SYNC | FROM_ROOT | TO_ROOT)):
        for block in blocks(table, np.flatnonzero(kind[table.op]), clocks):
            _durations(block, measured, slowest=kind is not SYNC)
            if kind is FROM_ROOT or kind is TO_ROOT:
                _slowest_receiver(table, block, measured, receive=kind is TO_ROOT)
            mine = np.ascontiguousarray(waited[:, block.columns].T)
            if kind is SYNC:
                issued = table.source[block.columns] == ISSUE
                totals.lasts.add(table.ranks, block.came, ~issued)
                totals.issue_lasts.add(table.ranks, block.came, issued)
            if mine.any():
                caused = (
                    _shares_of_root(table, block, mine)
                    if kind is FROM_ROOT
                    else shares(block.came, mine)
                )
                totals.charge(table.ranks, block.came.last, caused, mine)
    recorded = np.flatnonzero(present(table.arrival).any(axis=0))
    return measured if len(recorded) == count else _only(measured, recorded)


def _shares_of_root(table: CollectiveTable, block: Block, waited: Ints) -> Floats:
    """Charge the root for all waiting in a broadcast or scatter."""
    caused = np.zeros(waited.shape)
    root = table.root[block.columns]
    known = np.flatnonzero(root >= 0)
    caused[known, root[known]] = waited[known].sum(axis=1)
    return caused


def _only(measured: Measured, rows: npt.NDArray[Any]) -> Measured:
    """Leave out sequence numbers that no member has a record of (a gap in all rings)."""
    columns = {
        name: column[..., rows] for name, column in vars(measured).items() if name != "ranks"
    }
    return Measured(**columns, ranks=measured.ranks)


def _durations(block: Block, measured: Measured, *, slowest: bool) -> None:
    """Fill in the columns that follow from the durations alone.

    ``slowest``: t is the longest duration, not the shortest.
    """
    spent, columns = block.duration, block.columns
    whole = bool(block.ended.all())
    least, most = (np.min, np.max) if whole else (np.fmin.reduce, np.fmax.reduce)
    total = spent.sum(axis=1) if whole else np.nansum(spent, axis=1)
    ends = np.count_nonzero(block.ended, axis=1)
    some = ends > 0
    measured.spent[columns] = total
    measured.mean[columns[some]] = total[some] / ends[some]
    measured.transfer[columns] = (most if slowest else least)(spent, axis=1)


def _slowest_receiver(
    table: CollectiveTable, block: Block, measured: Measured, *, receive: bool
) -> None:
    """Set t of ops with a root: the slowest receiver's duration."""
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
    measured.transfer[columns] = np.where(np.isnan(slowest), measured.transfer[columns], slowest)


def measure_messages(
    messages: MessageTable,
    waited: Ints,
    clocks: Sequence[HostClock],
    totals: WaitTotals,
    chains: WaitChains,
) -> Measured:
    """Measure all messages of a group, its sends and its receives each as one element.

    Each wait is charged to the rank at the end of its chain.
    """
    columns = messages.columns
    duration = (columns["completed"] - columns["started"]).astype(np.float64)
    duration[~present(columns["completed"])] = np.nan
    transfer = duration.copy()
    both = (messages.sent >= 0) & (messages.received >= 0)
    sent, received = messages.sent[both], messages.received[both]
    transfer[sent] = np.where(np.isnan(duration[received]), duration[sent], duration[received])
    waits = message_waits(messages, clocks)
    is_wait = waited[waits.rows] > 0
    rows, others, until = waits.rows[is_wait], waits.others[is_wait], waits.until[is_wait]
    waiters, begin = columns["rank"][rows], until - waited[rows]
    causes = chains.causes(waiters, columns["rank"][others], begin, until)
    totals.charge_messages(waiters, until, waited[rows], causes)
    return Measured(
        columns["op"],
        columns["bytes"],
        columns["size"],
        transfer,
        duration,
        np.nan_to_num(duration),
        waited.astype(np.float64),
        columns["source"],
        columns["rank"],
        columns["started"],
        columns["completed"],
    )
