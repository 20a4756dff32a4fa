"""The verdict ``straggler``: a rank, or a few, that come late all along."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankcall.analysis.arrivals import SYNC
from rankcall.analysis.charging import WaitTotals
from rankcall.analysis.clocks import HostClock
from rankcall.analysis.collectives import ISSUE, CollectiveTable, present
from rankcall.analysis.measuring import measure_collectives, measure_messages
from rankcall.analysis.snapshot import COLLECTIVE, Snapshot
from rankcall.analysis.stragglers import Parts, Stragglers, find_stragglers, parts_of
from rankcall.analysis.verdicts.facts import (
    CallFact,
    Fact,
    Relation,
    hosts_of,
    lines_of_site,
    ranks_of,
)
from rankcall.analysis.verdicts.finding import Finding, Predicate, less_sure
from rankcall.analysis.verdicts.kind import Kind
from rankcall.analysis.verdicts.reasons import (
    advice_for,
    have_only_bad_luck,
    reasons_for_lateness,
)
from rankcall.analysis.verdicts.recent_calls import RecentCalls
from rankcall.analysis.verdicts.slow_link import LinkTimes, slow_links
from rankcall.analysis.waiting import waits_of
from rankcall.record import FLAG_DEVICE, OPS
from rankcall.ring.tables import both_lines

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Straggler(Kind):
    """Ranks cause most of the waiting in a job that goes on, and do so all along.

    Not if a slow link does: it is a finding of its own.
    """

    kind = "straggler"
    order = 80
    stops = False
    predicate = Predicate("comes late", "come late")

    def in_running_job(self, recent: RecentCalls) -> Iterator[Finding]:
        """Yield the straggler, if there is one."""
        late = late_ranks(recent)
        if late is None:
            return
        snapshot, stragglers = recent.snapshot, late.stragglers
        if any(_is_due_to(link, stragglers) for link in slow_links(recent)):
            return
        reasons = reasons_for_lateness(snapshot, stragglers.ranks, stragglers.cost)
        if not recent.is_cut and have_only_bad_luck(snapshot, stragglers, reasons):
            return
        place = _place(snapshot, late)
        site = both_lines(place.get("call_site", ""), place.get("user_line", ""))
        yield self.finding(
            stragglers.ranks,
            victims=_peers(recent, stragglers.ranks),
            hosts=hosts_of(snapshot, stragglers.ranks),
            since_s=stragglers.span_s,
            confidence="likely" if not snapshot.problems else less_sure("likely"),
            said=[
                *_lateness_facts(snapshot, late, place, site),
                *reasons,
            ],
            shown=_causes(snapshot, late, is_cut=recent.is_cut),
            live=snapshot.live,
            advice=advice_for(reasons)
            or f"Look at what rank {stragglers.ranks[0]} does before "
            f"{'that line' if site else 'it communicates'}: its data, its CPU, its GPU's clock.",
            **place,
        )


def _is_due_to(link: LinkTimes, stragglers: Stragglers) -> bool:
    """Tell whether a slow link keeps the ranks for half of the time that others wait for them."""
    late_s = stragglers.cost * stragglers.span_s
    return set(stragglers.ranks) <= set(link.kept) and link.cost_s >= 0.5 * late_s


def _lateness_facts(
    snapshot: Snapshot, late: LateRanks, place: dict[str, Any], site: str
) -> list[Fact]:
    """Return what waiting for the ranks costs, and the call that they are latest to."""
    stragglers = late.stragglers
    ranks = ranks_of(snapshot, stragglers.ranks)
    step = stragglers.since_step
    values = (("since_step", str(step)),) if step is not None else ()
    facts = [
        Fact(Relation.MAKES_WAIT, ranks, values=values, number=100 * stragglers.cost, unit="%")
    ]
    if place:
        call = CallFact(place["op"], place["seq"], place["group"], line=site)
        facts.append(Fact(Relation.COMES_LATE, ranks, call, number=late.late_s, unit="s"))
    return facts


def _causes(snapshot: Snapshot, late: LateRanks, *, is_cut: bool) -> list[Fact]:
    """Return how much of all waiting the ranks cause, and how often they come last."""
    stragglers = late.stragglers
    ranks = ranks_of(snapshot, stragglers.ranks)
    values = [("span_s", repr(stragglers.span_s)), ("along", repr(100 * stragglers.along))]
    if (snapshot.calls["flags"] & FLAG_DEVICE).any():
        values.append(("times", "device"))
    if is_cut:
        values.append(("of", "newest"))
    if stragglers.slow_start_s:
        values.append(("slow_start_s", repr(stragglers.slow_start_s)))
    share = 100 * stragglers.share
    facts = [Fact(Relation.CAUSED_WAITING, ranks, values=tuple(values), number=share, unit="%")]
    if late.table is not None:
        of = (("collectives", str(late.collectives)),)
        last = 100 * late.last_in
        facts.append(Fact(Relation.CAME_LAST, ranks, values=of, number=last, unit="%"))
    return facts


def _place(snapshot: Snapshot, late: LateRanks) -> dict[str, Any]:
    """Return the fields of a finding that name the call that ranks are latest to."""
    table = late.table
    if table is None:
        return {}
    group, seq = snapshot.groups.index(table.group), int(table.seq[late.column])
    calls = snapshot.calls
    row = (
        (calls["group"] == group)
        & (calls["seq"] == seq)
        & (calls["rank"] == late.stragglers.ranks[0])
    )
    lines = lines_of_site(snapshot, int(calls["site"][row.argmax()]) if row.any() else 0)
    op = OPS[int(table.op[late.column])]
    return {"group": snapshot.labels[group], "seq": seq, "op": op, **lines}


def _peers(recent: RecentCalls, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks that share a group with some ranks, and so wait for them."""
    together: set[int] = set()
    used = [table.group for table in recent.tables] + [
        messages.group for messages in recent.messages
    ]
    for group in dict.fromkeys(used):
        if not set(ranks).isdisjoint(group.ranks):
            together.update(group.ranks)
    return tuple(sorted(together - set(ranks)))


@dataclass(frozen=True)
class LateRanks:
    """Ranks that come late.

    ``table`` and ``column``: the group and the collective that they are latest to. ``late_s``: by
    how much at the median of those that have its line, op and size. ``last_in``: in which part of
    the group's ``collectives`` of that time they come last. None without a group.
    """

    stragglers: Stragglers
    table: CollectiveTable | None = None
    column: int = 0
    late_s: float = 0.0
    last_in: float = 0.0
    collectives: int = 0


def late_ranks(recent: RecentCalls) -> LateRanks | None:
    """Return the ranks that make the others wait, and the call that they are latest to."""
    snapshot, tables, clocks = recent.snapshot, recent.tables, recent.clocks
    on_devices = bool((snapshot.calls["flags"] & FLAG_DEVICE).any())
    parts = parts_of(recent.step_begins, recent.turns, *recent.span, ahead=on_devices)
    totals = WaitTotals(len(snapshot.ranks), parts.edges)
    waits = waits_of(tables, recent.messages, clocks)
    for table, waited in zip(tables, waits.of_tables, strict=True):
        measure_collectives(table, waited, clocks, totals)
    for messages, waited in zip(recent.messages, waits.of_messages, strict=True):
        measure_messages(messages, waited, clocks, totals, waits.chains)
    stragglers = find_stragglers(totals, parts, [state.host for state in snapshot.ranks])
    if stragglers is None:
        return None
    latest = _latest_to(recent, stragglers, parts)
    if latest is None:
        return LateRanks(stragglers)
    table, lateness, columns, rows = latest
    return LateRanks(
        stragglers,
        table,
        int(columns[rows[0]]),
        float(np.median(lateness[rows])) / 1e9,
        float((lateness > 0).mean()),
        len(columns),
    )


def _latest_to(
    recent: RecentCalls, stragglers: Stragglers, parts: Parts
) -> tuple[CollectiveTable, Floats, npt.NDArray[np.intp], npt.NDArray[np.intp]] | None:
    """Return the group with the line that ranks come late to in most parts of the time.

    One long wait at another line, such as at the start, is in one part only. Of lines in equally
    many parts, the one that costs most is taken; and of its ops and sizes, the dearest one.

    Returns:
        The table, by how much (ns) the ranks came last in its collectives of that time (0: they did
        not), the columns of these, and which of them are of that op and size at that line, and were
        waited for.
    """
    late = list(stragglers.ranks)
    costs: dict[tuple[int, int], dict[int, float]] = {}  # of a line in a table, by part
    whole: dict[tuple[int, tuple[int, ...]], float] = {}  # of an op and a size at a line
    seen = []
    for number, table in enumerate(recent.tables):
        lateness, came, columns = _lateness(table, late, recent.clocks)
        inside = came >= stragglers.begin
        lateness, came, columns = lateness[inside], came[inside], columns[inside]
        lines = _lines(recent.snapshot, table, columns, late[0])
        seen.append((table, lateness, columns, lines))
        which = np.searchsorted(parts.edges, came, side="right")
        for line, part, cost in zip(lines, which.tolist(), lateness.tolist(), strict=True):
            if cost > 0:
                by_part = costs.setdefault((number, line[-1]), {})
                by_part[part] = by_part.get(part, 0.0) + cost
                whole[number, line] = whole.get((number, line), 0.0) + cost
    if not costs:
        return None
    dearest: dict[int, tuple[float, tuple[int, int]]] = {}
    for key, by_part in costs.items():
        for part, cost in by_part.items():
            dearest[part] = max(dearest.get(part, (0.0, key)), (cost, key))
    won = Counter(key for _, key in dearest.values())
    number, site = max(costs, key=lambda key: (won[key], sum(costs[key].values())))
    there = [key for key in whole if (key[0], key[1][-1]) == (number, site)]
    _, line = max(there, key=whole.__getitem__)
    table, lateness, columns, lines = seen[number]
    of_line = np.array([other == line for other in lines], bool)
    return table, lateness, columns, np.flatnonzero(of_line & (lateness > 0))


def _lines(
    snapshot: Snapshot, table: CollectiveTable, columns: npt.NDArray[np.intp], rank: int
) -> list[tuple[int, ...]]:
    """Return the op, the size and the call site at a rank of some collectives."""
    calls = snapshot.calls
    group = snapshot.groups.index(table.group)
    rows = (calls["group"] == group) & (calls["rank"] == rank) & (calls["kind"] == COLLECTIVE)
    site_of = dict(zip(calls["seq"][rows].tolist(), calls["site"][rows].tolist(), strict=True))
    return [
        (int(table.op[column]), int(table.bytes[column]), site_of.get(int(table.seq[column]), 0))
        for column in columns.tolist()
    ]


def _lateness(
    table: CollectiveTable, late: list[int], clocks: list[HostClock]
) -> tuple[Floats, Ints, npt.NDArray[np.intp]]:
    """Return by how much (ns) the last of ``late`` came after all others, when, and the columns."""
    mine = np.isin(table.ranks, late)
    known = SYNC[table.op] & (table.source != ISSUE)
    columns = np.flatnonzero(known & present(table.arrival).all(axis=0))
    nothing = np.zeros(0)
    if not mine.any() or mine.all() or not len(columns):
        return nothing, nothing.astype(np.int64), columns[:0]
    came = np.stack(
        [clocks[host].align(table.arrival[row, columns]) for row, host in enumerate(table.hosts)]
    )
    behind = (came[mine].max(axis=0) - came[~mine].max(axis=0)).astype(np.float64)
    return np.maximum(behind, 0.0), came.max(axis=0), columns
