"""Where each rank's time went: computing, waiting for others, transferring.

At any moment a rank is in some collective or message, or in none. The time in none is computing
(or whatever else the script does). Of the time in some, waiting is until the op could begin: for
ops that no member leaves before the last has come, what goes beyond the shortest duration over
the members; at a root or a receiver, until the others or the sender have come. The rest is
transfer. Ops that overlap count once, so the three add up to the rank's time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankcall.analysis.timing.clocks import HostClock
from rankcall.analysis.timing.collectives import Lane, present
from rankcall.analysis.timing.gather import Gathered
from rankcall.analysis.timing.measure import FROM_ROOT, SYNC, TO_ROOT, blocks
from rankcall.analysis.timing.p2p import Mail

Ints = npt.NDArray[np.int64]
Spans = tuple[Ints, Ints, Ints]  # begin, end (the host's own ns) and how long of it was waiting


@dataclass(frozen=True)
class RankSplit:
    """One rank's time, over all its attempts. ``steps``: optimizer steps it finished."""

    rank: int
    compute_ms: float
    waiting_ms: float
    transfer_ms: float
    steps: int

    @property
    def total_ms(self) -> float:
        """From its first op to the end of its last."""
        return self.compute_ms + self.waiting_ms + self.transfer_ms


def split(gathered: Gathered) -> list[RankSplit]:
    """Split every rank's time; ranks without a finished op are left out."""
    spans: dict[tuple[int, object], list[Spans]] = {}
    for lane in gathered.lanes:
        for rank, found in _of_lane(lane, gathered.clocks.hosts):
            spans.setdefault((rank, lane.session), []).append(found)
    for mail in gathered.mail:
        for rank, found in _of_mail(mail, gathered.clocks.hosts):
            spans.setdefault((rank, mail.session), []).append(found)
    totals: dict[int, npt.NDArray[np.float64]] = {}
    for (rank, _), parts in spans.items():
        totals[rank] = totals.get(rank, np.zeros(3)) + _measure(parts)
    steps: dict[int, int] = {}
    for row in gathered.ranks:
        steps[row.rank] = steps.get(row.rank, 0) + row.steps
    table = []
    for rank in sorted(totals):
        compute, waiting, transfer = (totals[rank] / 1e6).tolist()
        table.append(RankSplit(rank, compute, waiting, transfer, steps.get(rank, 0)))
    return table


def _measure(parts: Sequence[Spans]) -> npt.NDArray[np.float64]:
    """Return computing, waiting and transferring, ns."""
    begin, end, waited = (np.concatenate(column) for column in zip(*parts, strict=True))
    if not len(begin):
        return np.zeros(3)
    order = np.argsort(begin, kind="stable")
    begin, end, waited = begin[order], end[order], waited[order]
    busy, waiting = covered(begin, end), covered(begin, begin + waited)
    return np.array([end.max() - begin[0] - busy, waiting, busy - waiting], np.float64)


def covered(begin: Ints, end: Ints) -> float:
    """Return how much time intervals cover together; ``begin`` ascends."""
    reach = np.maximum.accumulate(end)
    fresh = end.copy()
    fresh -= begin
    fresh[1:] = end[1:] - np.maximum(begin[1:], reach[:-1])
    return float(np.maximum(fresh, 0).sum(dtype=np.float64))


def _of_lane(lane: Lane, clocks: Sequence[HostClock]) -> Iterable[tuple[int, Spans]]:
    waited = np.zeros(lane.started.shape, np.int64)
    for kind in (SYNC, FROM_ROOT, TO_ROOT):
        for block in blocks(lane, np.flatnonzero(kind[lane.op]), clocks):
            if kind is SYNC:
                part = block.duration - np.fmin.reduce(block.duration, axis=1)[:, None]
            else:
                part = _rooted(lane, block.columns, block.came.times, block.came.here, kind)
            whole = np.nan_to_num(block.duration)
            # What is not a number did not end, and is not counted below.
            waited[:, block.columns] = np.clip(np.nan_to_num(part), 0, whole).T.astype(np.int64)
    done = present(lane.completed) & present(lane.arrival) & (lane.completed >= lane.started)
    for row, rank in enumerate(lane.ranks.tolist()):
        some = done[row]
        yield rank, (lane.started[row, some], lane.completed[row, some], waited[row, some])


def _rooted(
    lane: Lane,
    columns: npt.NDArray[np.intp],
    came: Ints,
    here: npt.NDArray[np.bool_],
    kind: npt.NDArray[np.bool_],
) -> npt.NDArray[np.float64]:
    """Return how long each member waited: all for the root, or the root for all."""
    root = lane.root[columns]
    known = (root >= 0) & here[np.arange(len(root)), root]
    is_root = np.arange(came.shape[1]) == root[:, None]
    at_root = came[np.arange(len(root)), root]
    if kind is FROM_ROOT:
        waited = (at_root[:, None] - came).astype(np.float64)
    else:
        last = np.where(here, came, np.iinfo(np.int64).min).max(axis=1)
        waited = np.where(is_root, last[:, None] - came, 0).astype(np.float64)
    return np.where(known[:, None] & here, waited, 0.0)


def _of_mail(mail: Mail, clocks: Sequence[HostClock]) -> Iterable[tuple[int, Spans]]:
    columns = mail.columns
    aligned = columns["arrival"].copy()
    for host in np.unique(columns["host"]):
        rows = columns["host"] == host
        aligned[rows] = clocks[host].align(aligned[rows])
    waited = np.zeros(len(aligned), np.int64)
    both = (mail.sent >= 0) & (mail.received >= 0)
    sent, received = mail.sent[both], mail.received[both]
    lasted = columns["completed"] - columns["started"]
    waited[received] = np.clip(
        aligned[sent] - aligned[received], 0, np.maximum(lasted[received], 0)
    )
    done = present(columns["completed"]) & (lasted >= 0)
    for rank in np.unique(columns["rank"]).tolist():
        rows = (columns["rank"] == rank) & done
        yield rank, (columns["started"][rows], columns["completed"][rows], waited[rows])
