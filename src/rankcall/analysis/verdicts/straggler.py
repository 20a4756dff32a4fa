"""The verdict ``straggler``: a rank, or a few, that come late all along."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankcall.analysis.state.snapshot import Snapshot
from rankcall.analysis.timing.clocks import HostClock
from rankcall.analysis.timing.collectives import CollectiveTable, present
from rankcall.analysis.timing.waiting import WaitTotals, measure_collectives
from rankcall.analysis.verdicts.finding import (
    Finding,
    begin_sentence,
    duration,
    hosts_of,
    less_sure,
    name_ranks,
    short_duration,
)
from rankcall.analysis.verdicts.kinds import Verdict
from rankcall.analysis.verdicts.slowness import SYNC, RecentCalls
from rankcall.record import OPS

Floats = npt.NDArray[np.float64]

# A rank is a straggler if it causes most of the waiting, if that costs the others much of their
# time, and if it does so all along.
_SHARE = 0.5  # of all waiting, by the stragglers together
_TIMES_OTHERS = 4.0  # waiting caused by each straggler, over the median of the others
_COST = 0.1  # of the time on record: the others wait for them so long
_ALONG = 0.6  # of the collectives: one of the stragglers is last to them
_ENOUGH = 24  # collectives; fewer do not show a habit
_MOST = 0.25  # of the ranks; if more come late, they are the rule


class Straggler(Verdict):
    """Ranks cause most of the waiting in a job that goes on, and do so all along."""

    kind = "straggler"
    order = 80
    stops = False
    predicate = "come late"

    def in_running_job(self, recent: RecentCalls) -> Iterator[Finding]:
        """Yield the straggler, if there is one."""
        late = late_ranks(recent)
        if late is None:
            return
        snapshot, table = recent.snapshot, late.table
        group = snapshot.groups.index(table.group)
        label, calls, seq = snapshot.labels[group], snapshot.calls, int(table.seq[late.column])
        row = (calls["group"] == group) & (calls["seq"] == seq) & (calls["rank"] == late.ranks[0])
        site = snapshot.site(int(calls["site"][row.argmax()])) if row.any() else ""
        op = OPS[int(table.op[late.column])]
        verb = "comes" if len(late.ranks) == 1 else "come"
        since = f", since step {late.since_step:,}" if late.since_step is not None else ""
        yield self.finding(
            late.ranks,
            victims=tuple(rank for rank in table.ranks.tolist() if rank not in late.ranks),
            hosts=hosts_of(snapshot, late.ranks), group=label, seq=seq, op=op, call_site=site,
            since_s=late.span_s,
            confidence="likely" if not snapshot.problems else less_sure("likely"),
            summary=f"{begin_sentence(name_ranks(snapshot, late.ranks))} {verb} late to {op} of "
            f"group {label}{f' at {site}' if site else ''}, by {short_duration(late.late_s)} at "
            f"the median, last of all in {late.last_in:.0%}{since}: {late.share:.0%} of all "
            f"waiting, which costs the others {late.cost:.0%} of their time.",
            evidence=(
                f"on record: {len(table.seq):,} collectives of the group, {duration(late.span_s)}",
            ),
            advice=f"Look at what rank {late.ranks[0]} does before that line: its data, its CPU, "
            "its GPU's clock; rankcall report has the figures.",
        )  # fmt: skip


@dataclass(frozen=True)
class LateRanks:
    """Ranks that come late. ``cost`` is the share of the time on record that others wait for them.

    ``table`` and ``column``: the group and the call that they are latest to. ``since_step``: None
    if they have been late in all of the time on record.
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


def late_ranks(recent: RecentCalls) -> LateRanks | None:
    """Return the ranks that come late all along; None without such ranks or enough records."""
    snapshot, tables, clocks = recent.snapshot, recent.tables, recent.clocks
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
    # The newer half decides: a single long pause is not a habit, but lateness since midway is.
    tail = last[len(last) // 2 :]
    if tail.mean() < _ALONG or np.median(lateness[len(last) // 2 :]) <= 0:
        return None
    return LateRanks(
        tuple(late), share, cost, float(np.median(lateness[last])) / 1e9, float(last.mean()), table,
        int(columns[_worst(table, columns, lateness)]),
        _since(snapshot, table, columns, lateness, late[0]), span,
    )  # fmt: skip


def _span(snapshot: Snapshot) -> float:
    """Return the time from the first call on record to the newest end, s; 0 if no call ended."""
    calls = snapshot.calls
    ended = calls["ended_s"][~np.isnan(calls["ended_s"])]
    return float(calls["age_s"].max() - ended.min()) if len(ended) else 0.0


def _stand_out(totals: WaitTotals) -> list[int]:
    """Return the ranks that cause far more waiting than the others; empty if they are many."""
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
    """Return by how much (ns), and whether, the last of ``late`` came after all others."""
    mine = np.isin(table.ranks, late)
    columns = np.flatnonzero(SYNC[table.op] & present(table.arrival).all(axis=0))
    nothing = np.zeros(0)
    if not mine.any() or mine.all() or not len(columns):
        return nothing, nothing.astype(bool), columns[:0]
    came = np.stack([
        clocks[host].align(table.arrival[row, columns]) for row, host in enumerate(table.hosts)
    ])  # fmt: skip
    behind = (came[mine].max(axis=0) - came[~mine].max(axis=0)).astype(np.float64)
    return np.maximum(behind, 0.0), behind > 0, columns


def _worst(table: CollectiveTable, columns: npt.NDArray[np.intp], lateness: Floats) -> int:
    """Return a column of the op and size with the most lateness in all."""
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
    """Return the first step in which they are late; None if they always were."""
    edge = _edge(lateness)
    if edge == 0:
        return None
    calls = snapshot.calls
    rows = (calls["rank"] == rank) & (calls["seq"] == table.seq[columns[edge]])
    steps = calls["step"][rows]
    return int(steps[0]) if len(steps) else None


def _edge(lateness: Floats) -> int:
    """Return the index at which a series steps up, by least squares around two levels; 0: none."""
    if len(lateness) < 2 * (_ENOUGH // 4):
        return 0
    # Clip the values, so that a single long pause does not count as a level.
    values = np.minimum(lateness, 4 * np.median(lateness) + 1)
    count = np.arange(1, len(values))
    before, after = np.cumsum(values)[:-1], values.sum() - np.cumsum(values)[:-1]
    gain = before**2 / count + after**2 / (len(values) - count)
    edge = int(np.argmax(gain)) + 1
    low, high = values[:edge].mean(), values[edge:].mean()
    return edge if low < 0.3 * high and edge >= 4 else 0
