"""Who keeps a job that goes on from going faster: a rank, or a few, that come late every time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankcall.analysis.state.snapshot import Snapshot
from rankcall.analysis.timing.clocks import HostClock
from rankcall.analysis.timing.collectives import CollectiveTable, present
from rankcall.analysis.timing.waiting import WaitTotals, measure_collectives
from rankcall.record import OPS, SYNCHRONISING

Floats = npt.NDArray[np.float64]

# A rank is a straggler when it causes most of the waiting, which costs the others much of their
# time, and does so all along.
_SHARE = 0.5  # of all waiting, by the stragglers together
_TIMES_OTHERS = 4.0  # what each of them causes, against the median of the others
_COST = 0.1  # of the time on record, that the others wait for them
_ALONG = 0.6  # of the collectives, that one of them is last to
_ENOUGH = 24  # collectives; fewer show no habit
_MOST = 0.25  # of the ranks; more are not the exception

_SYNC = np.array([name in SYNCHRONISING for name in OPS])


@dataclass(frozen=True)
class Straggler:
    """Ranks that come late. ``cost`` is the share of the time on record that others wait for them.

    ``table`` and ``column``: the group and the call that they are latest to. ``since_step``: None
    where they have been late for as long as is on record.
    """

    ranks: tuple[int, ...]
    share: float
    cost: float
    late_s: float
    last_in: float
    table: CollectiveTable
    column: int
    since_step: int | None
    span_s: float


def straggler(
    snapshot: Snapshot, tables: list[CollectiveTable], clocks: list[HostClock]
) -> Straggler | None:
    """Find who comes late all along; None where nobody does, or too little is on record."""
    totals = WaitTotals(len(snapshot.ranks))
    waited = sum(float(measure_collectives(table, clocks, totals).waited.sum()) for table in tables)
    span = _span(snapshot)
    total = float(totals.caused.sum())
    if total <= 0 or waited <= 0 or span <= 0:
        return None
    late = _stand_out(totals)
    if not late:
        return None
    others = max(1, len(snapshot.ranks) - len(late))
    share = float(totals.caused[late].sum()) / total
    cost = float(totals.caused[late].sum()) / others / 1e9 / span
    table = max(tables, key=lambda each: _lateness(each, late, clocks)[0].sum())
    lateness, last, columns = _lateness(table, late, clocks)
    if len(columns) < _ENOUGH or share < _SHARE or cost < _COST:
        return None
    # In both halves: a single pause, however long, is no habit; one that began midway is.
    tail = last[len(last) // 2 :]
    if tail.mean() < _ALONG or np.median(lateness[len(last) // 2 :]) <= 0:
        return None
    return Straggler(
        tuple(late), share, cost, float(np.median(lateness[last])) / 1e9, float(last.mean()), table,
        int(columns[_worst(table, columns, lateness)]),
        _since(snapshot, table, columns, lateness, late[0]), span,
    )  # fmt: skip


def _span(snapshot: Snapshot) -> float:
    """Return from the first call on record to the newest end, s; 0 where none has ended."""
    calls = snapshot.calls
    ended = calls["ended_s"][~np.isnan(calls["ended_s"])]
    return float(calls["age_s"].max() - ended.min()) if len(ended) else 0.0


def _stand_out(totals: WaitTotals) -> list[int]:
    """Return the ranks that cause far more than the others do; none where they are many."""
    order = np.argsort(-totals.caused)
    most = max(1, int(len(order) * _MOST))
    for count in range(1, most + 1):
        ranks, rest = order[:count], order[count:]
        fair = float(np.median(totals.caused[rest])) if len(rest) else 0.0
        clear = totals.caused[ranks].min() > _TIMES_OTHERS * fair
        next_one = float(totals.caused[rest].max()) if len(rest) else 0.0
        if clear and next_one < totals.caused[ranks].min() / 2:
            return sorted(ranks.tolist())
    return []


def _lateness(
    table: CollectiveTable, late: list[int], clocks: list[HostClock]
) -> tuple[Floats, npt.NDArray[np.bool_], npt.NDArray[np.intp]]:
    """Return by how much the last of ``late`` came after all others, and whether; by column, ns."""
    mine = np.isin(table.ranks, late)
    columns = np.flatnonzero(_SYNC[table.op] & present(table.arrival).all(axis=0))
    nothing = np.zeros(0)
    if not mine.any() or mine.all() or not len(columns):
        return nothing, nothing.astype(bool), columns[:0]
    came = np.stack([
        clocks[host].align(table.arrival[row, columns]) for row, host in enumerate(table.hosts)
    ])  # fmt: skip
    behind = (came[mine].max(axis=0) - came[~mine].max(axis=0)).astype(np.float64)
    return np.maximum(behind, 0.0), behind > 0, columns


def _worst(table: CollectiveTable, columns: npt.NDArray[np.intp], lateness: Floats) -> int:
    """Return a column of the kind (op and size) that is come to latest in all."""
    kinds = np.stack([table.op[columns].astype(np.int64), table.bytes[columns]])
    _, first, which = np.unique(kinds, axis=1, return_index=True, return_inverse=True)
    return int(first[np.argmax(np.bincount(which.ravel(), weights=lateness))])


def _since(
    snapshot: Snapshot,
    table: CollectiveTable,
    columns: npt.NDArray[np.intp],
    lateness: Floats,
    rank: int,
) -> int | None:
    """Return the step from which on they are late; None where they always were."""
    edge = _edge(lateness)
    if edge == 0:
        return None
    calls = snapshot.calls
    rows = (calls["rank"] == rank) & (calls["seq"] == table.seq[columns[edge]])
    steps = calls["step"][rows]
    return int(steps[0]) if len(steps) else None


def _edge(lateness: Floats) -> int:
    """Return where a series steps up, by the least sum of squares around two levels; 0: nowhere."""
    if len(lateness) < 2 * (_ENOUGH // 4):
        return 0
    # A single long pause must not be taken for a level.
    values = np.minimum(lateness, 4 * np.median(lateness) + 1)
    count = np.arange(1, len(values))
    before, after = np.cumsum(values)[:-1], values.sum() - np.cumsum(values)[:-1]
    gain = before**2 / count + after**2 / (len(values) - count)
    edge = int(np.argmax(gain)) + 1
    low, high = values[:edge].mean(), values[edge:].mean()
    return edge if low < 0.3 * high and edge >= 4 else 0
