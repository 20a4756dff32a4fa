"""To which lines a rank comes late: where to look for what slows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rankcall.analysis.timing.extract import UNKNOWN_SITE
from rankcall.analysis.timing.gather import sessions_of
from rankcall.analysis.timing.lateness import LastSeen
from rankcall.record import KINDS, OPS
from rankcall.ring.reader import Ring
from rankcall.ring.tables import CallSite
from rankcall.run import Run

# By line and op: what each time cost (ns), and the line of the op before.
Costs = dict[tuple[CallSite, str], list[tuple[float, CallSite | None]]]

_COLLECTIVE = KINDS.index("collective")


@dataclass(frozen=True)
class LateLine:
    """One line at which a rank came last, and what that cost the others.

    The cause lies before it: after ``since``, the line of the op that it issued before (None:
    it differs, or there is none).
    """

    rank: int
    site: CallSite
    op: str
    since: CallSite | None
    times: int
    cost_ms: float
    share: float  # of what this rank's being last cost


def late_lines(run: Run, lasts: Iterable[LastSeen], ranks: Iterable[int]) -> list[LateLine]:
    """Find the lines of some ranks, the dearest first; their rings are read once more."""
    lasts, sessions, found = list(lasts), sessions_of(run), []
    for rank in ranks:
        costs: Costs = {}
        for head in run.heads:
            if head.header.rank == rank:
                ring = run.read(head)
                mine = [each for each in lasts if each.lane.session == sessions[head.path.name]]
                if ring is not None:
                    _add(ring, mine, costs)
        lines = [_line(rank, *key, each) for key, each in costs.items()]
        total = sum(line.cost_ms for line in lines)
        lines = [replace(line, share=line.cost_ms / total) for line in lines if total]
        found += sorted(lines, key=lambda line: (-line.cost_ms, str(line.site), line.op))
    return found


def _line(
    rank: int, site: CallSite, op: str, each: list[tuple[float, CallSite | None]]
) -> LateLine:
    since, times = Counter(before for _, before in each).most_common(1)[0]
    usual = since if 2 * times > len(each) else None
    return LateLine(rank, site, op, usual, len(each), sum(cost for cost, _ in each) / 1e6, 0.0)


def _add(ring: Ring, lasts: list[LastSeen], costs: Costs) -> None:
    records = ring.records
    sites, before = records["call_site"], np.roll(records["call_site"], 1)
    before[:1] = 0
    for key, group in ring.tables.groups.items():
        rows = np.flatnonzero((records["group"] == key) & (records["kind"] == _COLLECTIVE))
        for seen in lasts:
            if seen.lane.group != group or not len(rows):
                continue
            cost = _cost(seen, ring.header.rank, records["seq"][rows].astype(np.int64))
            for row, each in zip(rows[cost > 0].tolist(), cost[cost > 0].tolist(), strict=True):
                since = ring.tables.sites.get(int(before[row]))
                site = ring.tables.sites.get(int(sites[row]), UNKNOWN_SITE)
                costs.setdefault((site, OPS[records["op"][row]]), []).append((each, since))


def _cost(seen: LastSeen, rank: int, seq: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return what a rank's being last to some collectives of a lane cost; 0 where it was not."""
    lane = seen.lane
    at = np.minimum(np.searchsorted(lane.seq, seq), len(lane.seq) - 1)
    its = (lane.seq[at] == seq) & (seen.last[at] == rank)
    cost: npt.NDArray[np.float64] = np.where(its, seen.cost_ns[at], 0.0)
    return cost
