"""How late each rank came to each part of a run: the maps of lateness of a page.

A rank is as late to a collective as it came after the median member (the lower one of the two, if
their number is even), and not late if it came before. Only ops that no member leaves before the
last has come count, because in the others the members need not meet; and on devices only those
with device times, because an op that was issued has not begun.

Waiting is charged by another rule: for whom the others waited (``arrivals``, ``charging``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rankcall.analysis.arrivals import SYNC, Block, Floats, blocks
from rankcall.analysis.collectives import ISSUE, CollectiveTable, present
from rankcall.analysis.dimensions import purpose_of
from rankcall.analysis.folds import Fold, folds_of
from rankcall.analysis.run_tables import RunTables

MOST_ROWS = 512  # of a map: a page shows one in so many pixels
_MOST_CELLS = 1 << 20  # of all maps: 16 MiB of sums and counts, if the fewest bins allow it
_MOST_BINS, _LEAST_BINS = 480, 60  # of time: half the width of a page; fewer show no course
_MOST_FAMILIES = 12  # maps beside that of all groups
_MOST_FOLDS = 9  # by host, and by place and group of four dimensions
_LEAST_FOLDED = 8  # ranks: fewer are seen at a glance


@dataclass
class LateMap:
    """Mean lateness in ms, ``[row, bin]``; NaN if no such collective began in a bin.

    A row stands for the ``fold`` ranks from ``row * fold`` on, and shows the latest of them. If it
    has a name, it stands for the ranks that this names, and shows their mean.
    """

    title: str
    late_ms: Floats
    fold: int
    names: list[str] = field(default_factory=list)


@dataclass
class LastSeen:
    """The rank that came last to each of a group's collectives, and what that cost the others."""

    table: CollectiveTable
    last: npt.NDArray[np.intp]  # rank; -1: no rank came last
    cost_ns: Floats  # waiting of the others for that rank alone


@dataclass
class Lateness:
    """The maps (all groups first), the width of their bins, and the ranks that came last.

    ``folded``: the map of all groups with ranks of one host, or of one place in a parallel
    dimension, in one row.
    """

    bin_ns: float
    maps: list[LateMap]
    folded: list[LateMap]
    lasts: list[LastSeen]


@dataclass
class _Sums:
    """Lateness and number of collectives, by rank and bin."""

    late: Floats
    count: Floats


def lateness(run_tables: RunTables) -> Lateness:
    """Draw the maps of a run: one of all groups, and one for each set of groups of one purpose."""
    ranks = 1 + max((row.rank for row in run_tables.ranks), default=-1)
    families = _families(run_tables.tables)
    rows = max(1, ranks) * (len(families) + 1)
    most = max((len(table.seq) for table in run_tables.tables), default=0)
    bins = int(np.clip(min(_MOST_CELLS // rows, most // 2), _LEAST_BINS, _MOST_BINS))
    begin, end = _span(run_tables)
    width = max(1.0, (end - begin) / bins)
    every = _Sums(np.zeros((ranks, bins)), np.zeros((ranks, bins)))
    sums = {name: _Sums(np.zeros((ranks, bins)), np.zeros((ranks, bins))) for name in families}
    lasts = []
    for table in run_tables.tables:
        mine = [every, *(sums[name] for name in [_family(table)] if name in sums)]
        lasts.append(_add_table(table, run_tables, mine, begin, width))
    maps = [_map("all groups", every)]
    maps += [_map(name, sums[name]) for name in families] if len(families) > 1 else []
    return Lateness(width, maps, _folded(every, run_tables), lasts)


def _span(run_tables: RunTables) -> tuple[int, int]:
    """Return the first and the last arrival at any collective, aligned ns."""
    first, last = [], []
    for table in run_tables.tables:
        for row, host in enumerate(table.hosts):
            here = table.arrival[row][present(table.arrival[row])]
            if len(here):
                ends = np.array([here.min(), here.max()])
                aligned = run_tables.clocks.hosts[host].align(ends)
                first.append(int(aligned[0]))
                last.append(int(aligned[1]))
    return (min(first), max(last)) if first else (0, 0)


def _family(table: CollectiveTable) -> str:
    """Name the purpose of a group: its description, or else its size."""
    return f"{purpose_of(table.group) or 'groups'} ({len(table.group.ranks)} ranks)"


def _families(tables: list[CollectiveTable]) -> list[str]:
    """Return the purposes of all groups in which members meet, the most used first."""
    used: dict[str, int] = {}
    for table in tables:
        if _shows_arrivals(table).any() and len(table.ranks) > 1:
            used[_family(table)] = used.get(_family(table), 0) + table.arrival.size
    return sorted(used, key=lambda name: -used[name])[:_MOST_FAMILIES]


def _shows_arrivals(table: CollectiveTable) -> npt.NDArray[np.bool_]:
    """Tell which collectives show when their members came, and that they waited there."""
    shows: npt.NDArray[np.bool_] = SYNC[table.op] & (table.source != ISSUE)
    return shows


def _add_table(
    table: CollectiveTable, run_tables: RunTables, sums: list[_Sums], begin: int, width: float
) -> LastSeen:
    last_seen = LastSeen(
        table, np.full(len(table.seq), -1, np.intp), np.zeros(len(table.seq), np.float64)
    )
    if len(table.ranks) < 2:
        return last_seen
    for block in blocks(table, np.flatnonzero(_shows_arrivals(table)), run_tables.clocks.hosts):
        came = block.came
        members = came.times.shape[1] - came.absent
        together = members > 1
        last_seen.last[block.columns] = np.where(together, table.ranks[came.last_member], -1)
        last_seen.cost_ns[block.columns] = np.where(together, came.behind * (members - 1), 0.0)
        late, middle = _late(block)
        rows = np.flatnonzero(together)
        bins = np.clip((middle[rows] - begin) / width, 0, sums[0].late.shape[1] - 1).astype(np.intp)
        _accumulate(late[rows], came.here[rows], bins, table.ranks, sums)
    return last_seen


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
    for map_sums in sums:
        map_sums.late[np.ix_(ranks, which)] += added
        map_sums.count[np.ix_(ranks, which)] += counted


def _mean_ms(sums: _Sums) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        mean: Floats = np.where(sums.count > 0, sums.late / sums.count / 1e6, np.nan)
    return mean


def _map(title: str, sums: _Sums) -> LateMap:
    late = _mean_ms(sums)
    ranks = len(late)
    fold = max(1, -(-ranks // MOST_ROWS))
    if fold > 1:
        padded = np.full((-(-ranks // fold) * fold, late.shape[1]), np.nan)
        padded[:ranks] = late
        late = np.fmax.reduce(padded.reshape(-1, fold, late.shape[1]), axis=1)
    return LateMap(title, late, fold)


def _folded(every: _Sums, run_tables: RunTables) -> list[LateMap]:
    """Return the maps whose rows are several ranks that belong together.

    Left out are those that have hardly fewer rows than the map of all ranks, of which a page would
    only grow.
    """
    ranks = len(every.late)
    most = min(ranks, MOST_ROWS) // 2
    if ranks < _LEAST_FOLDED:
        return []
    host_of = {row.rank: row.host for row in sorted(run_tables.ranks, key=lambda row: row.rank)}
    used = {table.group for table in run_tables.tables}
    used |= {messages.group for messages in run_tables.messages}
    folds = [fold for fold in folds_of(host_of, used) if 1 < len(fold.names) <= most]
    return [_fold(every, fold) for fold in folds[:_MOST_FOLDS]]


def _fold(every: _Sums, fold: Fold) -> LateMap:
    """Return the mean of the ranks of each row."""
    members = [rank for rank in fold.row_of if rank < len(every.late)]
    rows = [fold.row_of[rank] for rank in members]
    folded = _Sums(*(np.zeros((len(fold.names), every.late.shape[1])) for _ in range(2)))
    np.add.at(folded.late, rows, every.late[members])
    np.add.at(folded.count, rows, every.count[members])
    return LateMap(fold.title, _mean_ms(folded), 1, fold.names)
