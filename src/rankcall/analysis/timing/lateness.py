"""How late each rank came, over time: what a map of rank by time is drawn from.

A rank is as late to a collective as it came after the median member (the lower one, where their
number is even), and not late where it came before. Only ops that no member leaves before the last
has come are looked at: in the others the members need not meet.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rankcall.analysis.timing.collectives import Lane, present
from rankcall.analysis.timing.gather import Gathered
from rankcall.analysis.timing.measure import SYNC, Block, blocks

Floats = npt.NDArray[np.float64]

MOST_ROWS = 512
_MOST_CELLS = 1 << 20
_MOST_BINS, _LEAST_BINS = 480, 60
_MOST_FAMILIES = 12


@dataclass
class LateMap:
    """Mean lateness in ms, ``[row, bin]``; NaN where no such collective began.

    A row is ``fold`` ranks from ``row * fold`` on, the latest of them shown.
    """

    title: str
    late_ms: Floats
    fold: int


@dataclass
class LastSeen:
    """One lane's collectives, by who came last: for finding the lines it came late to."""

    lane: Lane
    last: npt.NDArray[np.intp]  # rank; -1: nobody was last
    cost_ns: Floats  # what the others waited for that rank alone


@dataclass
class Lateness:
    """The maps (all groups first), the time they span, and who was last to what."""

    begin_ns: int
    bin_ns: float
    maps: list[LateMap]
    lasts: list[LastSeen]


@dataclass
class _Sums:
    """Lateness and how many collectives, by rank and bin."""

    late: Floats
    count: Floats
    lanes: list[str] = field(default_factory=list)


def lateness(gathered: Gathered) -> Lateness:
    """Draw the maps of a run: one of all groups, one for each set of groups of one purpose."""
    ranks = 1 + max((row.rank for row in gathered.ranks), default=-1)
    families = _families(gathered.lanes)
    rows = max(1, ranks) * (len(families) + 1)
    most = max((len(lane.seq) for lane in gathered.lanes), default=0)
    bins = int(np.clip(min(_MOST_CELLS // rows, most // 2), _LEAST_BINS, _MOST_BINS))
    begin, end = _span(gathered)
    width = max(1.0, (end - begin) / bins)
    every = _Sums(np.zeros((ranks, bins)), np.zeros((ranks, bins)))
    sums = {name: _Sums(np.zeros((ranks, bins)), np.zeros((ranks, bins))) for name in families}
    lasts = []
    for lane in gathered.lanes:
        mine = [every, *(sums[name] for name in [_family(lane)] if name in sums)]
        lasts.append(_add(lane, gathered, mine, begin, width))
    maps = [_map("all groups", every)]
    maps += [_map(name, sums[name]) for name in families] if len(families) > 1 else []
    return Lateness(begin, width, maps, lasts)


def _span(gathered: Gathered) -> tuple[int, int]:
    """Return the first and the last arrival at any collective, aligned ns."""
    first, last = [], []
    for lane in gathered.lanes:
        for row, host in enumerate(lane.hosts):
            here = lane.arrival[row][present(lane.arrival[row])]
            if len(here):
                ends = np.array([here.min(), here.max()])
                aligned = gathered.clocks.hosts[host].align(ends)
                first.append(int(aligned[0]))
                last.append(int(aligned[1]))
    return (min(first), max(last)) if first else (0, 0)


def _family(lane: Lane) -> str:
    """Name the purpose of a lane's group: its description, or else its size."""
    about = lane.group.description
    if not about or about == "undefined":
        about = "groups"
    return f"{about} ({len(lane.group.ranks)} ranks)"


def _families(lanes: list[Lane]) -> list[str]:
    """Return the purposes of all groups in which members meet, the most used first."""
    used: dict[str, int] = {}
    for lane in lanes:
        if SYNC[lane.op].any() and len(lane.ranks) > 1:
            used[_family(lane)] = used.get(_family(lane), 0) + lane.arrival.size
    return sorted(used, key=lambda name: -used[name])[:_MOST_FAMILIES]


def _add(lane: Lane, gathered: Gathered, sums: list[_Sums], begin: int, width: float) -> LastSeen:
    found = LastSeen(lane, np.full(len(lane.seq), -1, np.intp), np.zeros(len(lane.seq), np.float64))
    if len(lane.ranks) < 2:
        return found
    for block in blocks(lane, np.flatnonzero(SYNC[lane.op]), gathered.clocks.hosts):
        came = block.came
        members = came.times.shape[1] - came.absent
        together = members > 1
        found.last[block.columns] = np.where(together, lane.ranks[came.last_member], -1)
        found.cost_ns[block.columns] = np.where(together, came.behind * (members - 1), 0.0)
        late, middle = _late(block)
        rows = np.flatnonzero(together)
        bins = np.clip((middle[rows] - begin) / width, 0, sums[0].late.shape[1] - 1).astype(np.intp)
        _accumulate(late[rows], came.here[rows], bins, lane.ranks, sums)
    return found


def _late(block: Block) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Return each member's lateness (ns, ``[collective, member]``) and when the median came."""
    came = block.came
    members = came.times.shape[1] - came.absent
    at = np.minimum(came.absent + np.maximum(members - 1, 0) // 2, came.times.shape[1] - 1)
    middle = np.take_along_axis(came.sorted, at[:, None], axis=1)
    late = np.maximum(came.times, middle) - middle
    return np.where(came.here, late, 0).astype(np.float64), middle[:, 0]


def _accumulate(
    late: Floats,
    here: npt.NDArray[np.bool_],
    bins: npt.NDArray[np.intp],
    ranks: npt.NDArray[np.intp],
    sums: list[_Sums],
) -> None:
    """Add rows to the bins they fall in."""
    if not len(bins):
        return
    order = np.argsort(bins, kind="stable")
    first = np.concatenate([[0], np.flatnonzero(np.diff(bins[order])) + 1])
    which = bins[order][first]
    added = np.add.reduceat(late[order], first, axis=0).T
    counted = np.add.reduceat(here[order].astype(np.float64), first, axis=0).T
    for each in sums:
        each.late[np.ix_(ranks, which)] += added
        each.count[np.ix_(ranks, which)] += counted


def _map(title: str, sums: _Sums) -> LateMap:
    with np.errstate(invalid="ignore", divide="ignore"):
        late = np.where(sums.count > 0, sums.late / sums.count / 1e6, np.nan)
    ranks = len(late)
    fold = max(1, -(-ranks // MOST_ROWS))
    if fold > 1:
        padded = np.full((-(-ranks // fold) * fold, late.shape[1]), np.nan)
        padded[:ranks] = late
        late = np.fmax.reduce(padded.reshape(-1, fold, late.shape[1]), axis=1)
    return LateMap(title, late, fold)
