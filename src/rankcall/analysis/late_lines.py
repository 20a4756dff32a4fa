"""The lines of the program at which ranks come late, and what that costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rankcall.analysis.collectives import UNKNOWN_SITE, sessions_of
from rankcall.analysis.lateness import LastSeen
from rankcall.record import KINDS, OPS
from rankcall.ring.reader import Ring
from rankcall.ring.tables import CallSite
from rankcall.run.load import Run

# By line and op: the cost of each time (ns), and the line of the op before.
Costs = dict[tuple[CallSite, str], list[tuple[float, CallSite | None]]]

_COLLECTIVE = KINDS.index("collective")


@dataclass(frozen=True)
class LateLine:
    """One line at which a rank came last, and what that cost the others.

    The cause lies before that line: after ``since``, the line of the op that the rank issued
    before (None: it differs, or there is none).
    """

    rank: int
    site: CallSite
    op: str
    since: CallSite | None
    times: int
    cost_ms: float
    share: float  # of all that this rank cost by coming last


def late_lines(run: Run, lasts: Iterable[LastSeen], ranks: Iterable[int]) -> list[LateLine]:
    """Find the lines at which some ranks came last, the most costly first; read their rings."""
    lasts, sessions, all_lines = list(lasts), sessions_of(run), []
    for rank in ranks:
        costs: Costs = {}
        for head in run.heads:
            if head.header.rank == rank:
                ring = run.read(head)
                mine = [seen for seen in lasts if seen.table.session == sessions[head.path.name]]
                if ring is not None:
                    _add_ring(ring, mine, costs)
        lines = [_line(rank, *key, occasions) for key, occasions in costs.items()]
        total = sum(line.cost_ms for line in lines)
        lines = [replace(line, share=line.cost_ms / total) for line in lines if total]
        all_lines += sorted(lines, key=lambda line: (-line.cost_ms, str(line.site), line.op))
    return all_lines


def _line(
    rank: int, site: CallSite, op: str, occasions: list[tuple[float, CallSite | None]]
) -> LateLine:
    since, times = Counter(before for _, before in occasions).most_common(1)[0]
    usual = since if 2 * times > len(occasions) else None
    return LateLine(
        rank, site, op, usual, len(occasions), sum(cost for cost, _ in occasions) / 1e6, 0.0
    )


def _add_ring(ring: Ring, lasts: list[LastSeen], costs: Costs) -> None:
    records = ring.records
    sites, before = records["call_site"], np.roll(records["call_site"], 1)
    before[:1] = 0
    for key, group in ring.tables.groups.items():
        rows = np.flatnonzero((records["group"] == key) & (records["kind"] == _COLLECTIVE))
        for seen in lasts:
            if seen.table.group != group or not len(rows):
                continue
            cost = _cost(seen, ring.header.rank, records["seq"][rows].astype(np.int64))
            for row, cost_ns in zip(rows[cost > 0].tolist(), cost[cost > 0].tolist(), strict=True):
                since = ring.tables.sites.get(int(before[row]))
                site = ring.tables.sites.get(int(sites[row]), UNKNOWN_SITE)
                costs.setdefault((site, OPS[records["op"][row]]), []).append((cost_ns, since))


def _cost(seen: LastSeen, rank: int, seq: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return what a rank cost the others by coming last to each collective; 0 if it did not."""
    table = seen.table
    at = np.minimum(np.searchsorted(table.seq, seq), len(table.seq) - 1)
    came_last = (table.seq[at] == seq) & (seen.last[at] == rank)
    cost: npt.NDArray[np.float64] = np.where(came_last, seen.cost_ns[at], 0.0)
    return cost
