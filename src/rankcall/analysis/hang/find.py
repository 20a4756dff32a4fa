"""From where the ranks stand to what is wrong: ``find``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rankcall.analysis.finding import Finding, in_order, less_sure
from rankcall.analysis.hang.culprits import Case, cases, halted_ranks, together
from rankcall.analysis.hang.cycles import Cycle, cycles
from rankcall.analysis.hang.deaths import BEATS_S, deaths
from rankcall.analysis.hang.disagree import Disagreement, disagreements, slipped
from rankcall.analysis.hang.graph import Graph
from rankcall.analysis.hang.tell import of_cases, of_vanished
from rankcall.analysis.hang.tell_clash import of_cycle, of_disagreement, of_stuck
from rankcall.analysis.hang.waits import BLOCKING, Wait, waits
from rankcall.analysis.state.snapshot import (
    COMPLETED,
    P2P,
    Snapshot,
    failed_for_good,
    median_step_s,
    unfinished,
)

HANG_AFTER_S = 60.0
_FIRST_STEP = 5.0  # so many times longer may the first step take
_STEPS = 10.0  # and so many steps at the median may anything take later
# A call in flight for this part of the threshold is followed to whom it waits for. It began when
# the trouble did, or somewhat later; a shorter one may be on its way.
_FOLLOWED = 0.1
# Where one call hangs, another that nobody of that hang holds up counts at this part of its
# patience: two troubles seldom begin in the same moment, and the first verdict is the one read.
_BESIDE = 0.5
_LOOKED_AT = 64  # ranks whose calls are compared with those of the ranks that wait for them

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def find(snapshot: Snapshot, hang_after: float = HANG_AFTER_S) -> list[Finding]:
    """Say what is wrong with a job, the likeliest root cause first; nothing where it is healthy.

    ``hang_after``, s: how long a call must be in flight before it counts as hung. It is five times
    that in the first step, and at least ten times the median step later; half as long beside a
    call that hangs. Where all processes are gone, whatever never ended counts, unless it had only
    just begun when they ended.
    """
    calls = snapshot.calls
    in_flight, failed = unfinished(calls), failed_for_good(calls)
    in_flight &= ~_left_behind(snapshot)
    allowed = np.full(len(calls), _just_begun_s(snapshot, hang_after))
    if snapshot.live:
        allowed = patience(snapshot, hang_after)
    lasted = np.minimum(calls["age_s"], _still_for(snapshot))
    hung = in_flight & (lasted >= allowed)
    if hung.any():
        hung = in_flight & (lasted >= allowed * _BESIDE)
    hung |= failed
    followed = hung | (in_flight & (lasted >= allowed * (_FOLLOWED if snapshot.live else 0.0)))
    blind = {each.rank for each in snapshot.ranks if each.blind}
    graph = Graph(waits(snapshot, followed, hung), blind)
    gone = deaths(snapshot, {int(rank) for rank in calls["rank"][failed]})
    clashes = disagreements(snapshot, in_flight | failed)
    explained = _Explained(snapshot, clashes)
    halted = halted_ranks(snapshot, graph, gone)
    circles = [each for each in cycles(graph.waits, halted) if _new(each, explained)]
    clashing = {int(rank) for each in clashes if each.open for rank in calls["rank"][each.rows]}
    found = cases(snapshot, graph, gone, hang_after, explained, clashing)
    slips = _slips(snapshot, found, circles)
    if slips:
        clashes += slips
        explained = _Explained(snapshot, clashes)
        circles = [each for each in circles if _new(each, explained)]
        found = cases(snapshot, graph, gone, hang_after, explained, clashing)
    findings = [of_disagreement(snapshot, graph, each) for each in clashes]
    findings += [of_cycle(snapshot, graph, each) for each in circles]
    findings += [of_cases(snapshot, graph, alike) for alike in together(found)]
    findings = findings or _stuck(snapshot, graph)
    if not findings and in_flight.any():  # who is in no call may have ended well
        findings = of_vanished(snapshot, gone.together)
    if snapshot.mixed:
        findings = [replace(each, confidence=less_sure(each.confidence, 2)) for each in findings]
    nameless = {state.rank for state in snapshot.ranks if state.tables_lost}
    findings = [
        replace(each, confidence=less_sure(each.confidence))
        if nameless & {*each.ranks, *each.victims}
        else each
        for each in findings
    ]
    return in_order(findings)


def _just_begun_s(snapshot: Snapshot, hang_after: float) -> float:
    """Return from which age on a call of a dead run counts, s.

    Killed at any moment, a sound job leaves some in a call that others had not come to yet. That
    takes no longer than a step; and when it ended is known to three heartbeats.
    """
    return min(max(BEATS_S, median_step_s(snapshot)), hang_after)


def settles_in(snapshot: Snapshot, findings: Sequence[Finding], hang_after: float) -> float:
    """Return in how many s it will be clear whether a rank that is missing is on its way.

    It has just come to another call: either that ends soon, or it waits for somebody itself. 0:
    all that are named are in none.
    """
    calls = snapshot.calls
    named = [rank for each in findings if each.kind == "missing" for rank in each.ranks]
    lasted = np.minimum(calls["age_s"], _still_for(snapshot))
    left = np.minimum(patience(snapshot, hang_after), hang_after) * _FOLLOWED - lasted
    mine = unfinished(calls) & np.isin(calls["rank"], named)
    return float(np.max(left[mine], initial=0.0))


def _slips(
    snapshot: Snapshot, found: Sequence[Case], circles: Sequence[Cycle]
) -> list[Disagreement]:
    """Return the desyncs behind ranks that did not come, one a group."""
    pairs = [
        (case.longest, case.rank)
        for case in found
        if case.longest is not None and case.kind in ("missing", "exhausted")
    ]
    pairs += [
        (wait, rank)
        for circle in circles
        for wait in circle.waits
        for rank in wait.absent
        if rank in circle.ranks
    ]
    slips: dict[int, Disagreement] = {}
    for wait, rank in pairs[:_LOOKED_AT]:
        slip = slipped(snapshot, wait, rank)
        if slip is not None:
            slips.setdefault(slip.group, slip)
    return list(slips.values())


class _Explained:
    """Tells which waits are behind a disagreement: their group never gets in step again."""

    def __init__(self, snapshot: Snapshot, clashes: Sequence[Disagreement]) -> None:
        self._from: dict[int, int] = {}
        self._ends: set[tuple[int, int, int, int]] = set()
        for clash in clashes:
            if clash.message:
                calls = snapshot.calls[clash.rows]
                self._ends.update(
                    (clash.group, int(call["rank"]), int(call["tag"]), clash.seq) for call in calls
                )
            elif clash.open or clash.kind == "desync":
                self._from[clash.group] = clash.seq

    def __call__(self, wait: Wait) -> bool:
        if wait.channel is None:
            return wait.seq >= self._from.get(wait.group, wait.seq + 1)
        tag = wait.channel.tag
        return (wait.group, wait.waiters[0], tag, wait.seq) in self._ends


def _new(circle: Cycle, explained: Callable[[Wait], bool]) -> bool:
    return any(wait.hung for wait in circle.waits) and not any(map(explained, circle.waits))


def _stuck(snapshot: Snapshot, graph: Graph) -> list[Finding]:
    """Say of the longest wait that all have come to that nobody gets out."""
    found = [wait for wait in graph.waits if wait.hung and not wait.absent and not wait.soft]
    longest = max(found, key=lambda wait: wait.age_s, default=None)
    return [of_stuck(snapshot, graph, longest)] if longest is not None else []


def _still_for(snapshot: Snapshot) -> Floats:
    """Return how long each call's rank has done nothing else, s, where it need not wait for it.

    A message that was issued to be waited for later holds nobody up while its rank goes on.
    """
    calls = snapshot.calls
    waited = np.full(len(calls), np.inf)
    loose = (calls["kind"] == P2P) & ~np.isin(calls["site"], _blocking_sites(snapshot))
    if loose.any() and snapshot.live:
        quiet = np.full(len(snapshot.ranks), np.inf)
        recent = np.fmin(calls["age_s"], calls["ended_s"])
        np.minimum.at(quiet, calls["rank"], recent)
        waited[loose] = quiet[calls["rank"][loose]]
    return waited


def _blocking_sites(snapshot: Snapshot) -> list[int]:
    return [number for number, site in enumerate(snapshot.sites) if site.api in BLOCKING]


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
