"""From where the ranks stand to what is wrong: ``find``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rankcall.analysis.culprits import name_culprits
from rankcall.analysis.deaths import deaths
from rankcall.analysis.finding import Finding, in_order
from rankcall.analysis.snapshot import Snapshot
from rankcall.analysis.waits import COMPLETED, failed_for_good, unfinished, waits

HANG_AFTER_S = 60.0
_FIRST_STEP = 5.0  # so many times longer may the first step take
_STEPS = 10.0  # and so many steps at the median may anything take later
# A call in flight for this part of the threshold is followed to whom it waits for. It began when
# the trouble did, or somewhat later; a shorter one may be on its way.
_FOLLOWED = 0.1

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def find(snapshot: Snapshot, hang_after: float = HANG_AFTER_S) -> list[Finding]:
    """Say what is wrong with a job, the likeliest root cause first; nothing where it is healthy.

    ``hang_after``, s: how long a call must be in flight before it counts as hung. It is five times
    that in the first step, and at least ten times the median step later. Where all processes are
    gone, whatever never ended counts.
    """
    calls = snapshot.calls
    in_flight, failed = unfinished(calls), failed_for_good(calls)
    in_flight &= ~_left_behind(snapshot)
    allowed = np.zeros(len(calls))
    if snapshot.live:
        allowed = patience(snapshot, hang_after)
    hung = failed | (in_flight & (calls["age_s"] >= allowed))
    followed = hung | (in_flight & (calls["age_s"] >= allowed * _FOLLOWED))
    graph = waits(snapshot, followed, hung)
    gone = deaths(snapshot, {int(rank) for rank in calls["rank"][failed]})
    return in_order(name_culprits(snapshot, graph, gone, hang_after))


def _left_behind(snapshot: Snapshot) -> Bools:
    """Return which calls are of ranks that ended well: nobody waits for their ends any more."""
    closed = np.array([each.closed or each.exit == 0 for each in snapshot.ranks], bool)
    result: Bools = closed[snapshot.calls["rank"]]
    return result


def patience(snapshot: Snapshot, hang_after: float) -> Floats:
    """Return how long each call may be in flight, s.

    A rank is in its first step while it has finished none and the call in flight is the first from
    its line to take place. What a rank declared to take long may.
    """
    calls = snapshot.calls
    later = max(float(hang_after), _STEPS * median_step_s(snapshot))
    allowed = np.full(len(calls), later)
    stepless = np.array([each.steps == 0 for each in snapshot.ranks], bool)[calls["rank"]]
    done = calls["status"] == COMPLETED
    place = calls["rank"].astype(np.int64) * (len(snapshot.sites) + 1) + calls["site"]
    seen = np.isin(place, place[done]) & (calls["site"] > 0)
    allowed[stepless & ~seen] = _FIRST_STEP * hang_after
    declared = np.array([each.may_be_silent(hang_after) for each in snapshot.ranks], bool)
    allowed[declared[calls["rank"]]] = np.inf
    return allowed


def median_step_s(snapshot: Snapshot) -> float:
    """Return the median length of a step, s; 0 where fewer than three are on record."""
    calls = snapshot.calls
    order = np.lexsort((calls["index"], calls["rank"]))
    rank, step, age = (calls[name][order] for name in ("rank", "step", "age_s"))
    begins = np.concatenate([[True], (rank[1:] != rank[:-1]) | (step[1:] > step[:-1])])
    rank, step, age = rank[begins], step[begins], age[begins]
    lasts = (age[:-1] - age[1:])[(rank[1:] == rank[:-1]) & (step[1:] == step[:-1] + 1)]
    return float(np.median(lasts)) if len(lasts) >= 2 else 0.0
