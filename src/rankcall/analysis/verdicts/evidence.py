"""The evidence that verdicts rest on: which calls are overdue, and who waits for whom.

For a hang it is the calls that are overdue, and the waits behind them (``HangEvidence``). It is
worked out once for a snapshot, and every kind of verdict that can be behind a hang reads it. For a
job that goes on it is the newest calls, lined up (``RecentCalls``): they show slow ranks and links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rankcall.analysis.pace import usual_step_s
from rankcall.analysis.snapshot import (
    COLLECTIVE,
    COMPLETED,
    GONE,
    LACKS,
    P2P,
    PEER_CLOSED,
    RECV,
    SEND,
    Bools,
    Calls,
    Snapshot,
    failed_for_good,
    invalid_calls,
    unfinished,
)
from rankcall.analysis.verdicts.arrivals import waits_of
from rankcall.analysis.verdicts.disagreements import Disagreement, disagreements_in, off_by_n
from rankcall.analysis.verdicts.ends import BEATS_S, Exits, ended_well, exits_of
from rankcall.analysis.verdicts.lasting import (
    FOLLOWED,
    Floats,
    held_for,
    idle_calls,
    patience,
    since_look,
    unseen_calls,
)
from rankcall.analysis.verdicts.suspects import Case, Classifier, Suspects, culprit_cases
from rankcall.analysis.verdicts.wait import Wait
from rankcall.analysis.verdicts.wait_graph import Cycle, WaitGraph
from rankcall.record import FLAG_ABANDONED, FLAG_DEVICE

# Beside a call that hangs, another one that the same hang does not hold up counts at this part of
# its patience: two troubles seldom begin at the same moment, and the first verdict is the one read.
_BESIDE = 0.5
_SEVERAL = 2  # other members; of a pair, neither is the one that differs
_COMPARED = 64  # ranks whose calls are compared with those of the ranks that wait for them


@dataclass
class HangEvidence:
    """The waits of a job, and their likely causes. All lists are empty if nothing hangs."""

    snapshot: Snapshot
    hang_after: float
    in_flight: Bools  # by call
    allowed: Floats  # how long each call may be in flight, in s
    graph: WaitGraph
    exits: Exits
    disagreements: list[Disagreement]
    cycles: list[Cycle]  # that no disagreement explains
    cases: list[Case]  # ranks that others wait for and that wait for no other rank
    unsure: Bools  # by call: in flight on a device, and not known to have been for long

    @property
    def stuck(self) -> Wait | None:
        """The longest overdue wait that all members have arrived at.

        Not one that failed because a process closed its connections: that was not stuck, it ended.
        Nor one that its ranks have issued behind another such wait: that one comes first.
        """
        full = [wait for wait in self.graph.waits if not (wait.absent or wait.soft or wait.queued)]
        first = [wait for wait in full if self.graph.is_first(wait)]
        for wait in sorted(first or full, key=lambda wait: -wait.age_s):
            if not wait.hung:
                continue
            ends = self.snapshot.calls[ends_of(self.snapshot.calls, wait)]
            if (ends["flags"] & PEER_CLOSED).any() or self._ended_with_it(wait):
                continue
            if self._is_overdue_for_all(wait):
                return wait
        return None

    def _ended_with_it(self, wait: Wait) -> bool:
        """Tell whether a call on a device is one that ranks could not issue, and have ended after.

        A device that is lost refuses it, for example. What is in flight on a device never fails.
        """
        calls = self.snapshot.calls[wait.rows]
        refused = (calls["status"] > COMPLETED) & (calls["flags"] & FLAG_DEVICE != 0)
        has_ended = all(self.snapshot.ranks[rank].state == GONE for rank in wait.waiters)
        return has_ended and bool(refused.all())

    def _is_overdue_for_all(self, wait: Wait) -> bool:
        """Tell whether a wait is overdue since its last member, or its other end, has come.

        Until then, the first ones waited for that one, and nothing was stuck. A call that has
        failed need not become any older.
        """
        if not (self.snapshot.live or self.snapshot.dumped) or wait.behind:
            return True
        ends = self.snapshot.calls[ends_of(self.snapshot.calls, wait)]
        if (ends["status"] > COMPLETED).any():
            return True
        if self.snapshot.dumped:
            may_be_over = (ends["status"] < COMPLETED) & (ends["flags"] & FLAG_ABANDONED != 0)
            return not may_be_over.any()
        least = float(self.allowed[wait.rows].min())
        if ends["flags"][0] & FLAG_DEVICE:
            least += float(since_look(self.snapshot.calls[wait.rows]).min())
        return bool((ends["age_s"] >= least).all())

    def may_be_held_elsewhere(self, wait: Wait) -> bool:
        """Tell whether a rank's device may be in a call before this one, which is what hangs.

        Either it is not known how long the device has been in that call: its rank has not looked
        for long, or has only just noticed the end of the one before. Or the device is in that call
        for certain, and the rank has not looked since it issued this one.
        """
        if not self.snapshot.live:
            return False
        calls = self.snapshot.calls
        own = ends_of(calls, wait)
        index = np.full(len(self.snapshot.ranks), -1, np.int64)
        index[calls["rank"][own]] = calls["index"][own]
        before = self.in_flight & (calls["flags"] & FLAG_DEVICE != 0)
        before &= calls["index"] < index[calls["rank"]]
        unsure_of_this = np.isin(calls["rank"], calls["rank"][own & self.unsure])
        return bool((before & (self.unsure | unsure_of_this)).any())

    def is_alone_in(self, wait: Wait) -> bool:
        """Tell whether dumps show one rank in a collective that none of several members came to.

        The others wait for nothing on record. So it is not known whether all of them are late, or
        whether the one rank has issued a call too many; but it is the one that differs. Of a job
        that lives, the stacks of the others tell more.
        """
        return (
            self.snapshot.dumped
            and wait.channel is None
            and len(wait.waiters) == 1
            and len(wait.absent) == len(self.snapshot.groups[wait.group].ranks) - 1 >= _SEVERAL
            and not any(
                self.graph.blocked(rank) or self.snapshot.ranks[rank].blind for rank in wait.absent
            )
        )


def hang_evidence(
    snapshot: Snapshot,
    hang_after: float,
    kinds: Sequence[Classifier],
    endless: Bools | None = None,
) -> HangEvidence:
    """Follow the calls that are in flight for long to the ranks that they wait for.

    Args:
        snapshot: Where the ranks stand.
        hang_after: How long a call must be in flight before it counts as hung, in s. It is five
            times that in the first step, and at least ten times the median step later; half as
            long beside a call that hangs. If all processes are gone, all calls that never ended
            count, unless they had only just begun.
        kinds: The kinds that classify ranks, in order.
        endless: The calls that are proved never to end (``final``). Then these alone count as hung.
    """
    calls = snapshot.calls
    in_flight, invalid = unfinished(calls), invalid_calls(calls)
    failed = failed_for_good(calls) & ~invalid
    in_flight &= ~_left_behind(snapshot)
    allowed = np.full(len(calls), _just_begun_s(snapshot, hang_after))
    if snapshot.dumped:
        allowed[:] = 0.0  # calls that had only just begun are abandoned in dumps
    if snapshot.live:
        allowed = patience(snapshot, hang_after)
    lasted = held_for(snapshot)
    hung = in_flight & (lasted >= allowed)
    if hung.any():
        hung = in_flight & (lasted >= allowed * _BESIDE)
    unseen = np.zeros(len(calls), bool) if snapshot.dumped else unseen_calls(snapshot)
    may_be_over = unseen & (calls["flags"] & LACKS == 0)
    hung = (hung & ~may_be_over) | failed
    followed = hung | (in_flight & (lasted >= allowed * (FOLLOWED if snapshot.live else 0.0)))
    followed &= ~may_be_over | failed  # a rank may have left these, as its position says
    unsure = in_flight & ~followed & (calls["flags"] & FLAG_DEVICE != 0)
    if endless is not None:
        hung, followed = in_flight & endless, in_flight
    # A rank that has ended is in no call, whether it left records or not.
    blind = {state.rank for state in snapshot.ranks if state.blind and state.state != GONE}
    graph = WaitGraph(
        waits_of(snapshot, followed, hung, idle_calls(snapshot, unseen, allowed)), blind
    )
    victims = {int(rank) for rank in calls["rank"][failed]}
    exits = exits_of(snapshot, victims, _just_begun_s(snapshot, hang_after), hang_after)
    clashes = [
        clash
        for clash in disagreements_in(snapshot, in_flight | failed)
        if not _after_the_stop(snapshot, clash)
    ]
    clashing = {int(rank) for clash in clashes if clash.open for rank in calls["rank"][clash.rows]}
    explained = _Explained(snapshot, clashes)
    suspects = Suspects(snapshot, graph, exits, hang_after, clashing, explained)
    cycles = graph.cycles(suspects.halted)
    cycles = [cycle for cycle in cycles if _is_cause(cycle, explained)]
    cases = culprit_cases(suspects, kinds)
    shifts = _shifts(suspects, cases, cycles)
    if shifts:
        clashes += shifts
        suspects.explained = explained = _Explained(snapshot, clashes)
        cycles = [cycle for cycle in cycles if _is_cause(cycle, explained)]
        cases = culprit_cases(suspects, kinds)
    return HangEvidence(
        snapshot,
        hang_after,
        in_flight,
        allowed,
        graph,
        exits,
        clashes,
        cycles,
        cases,
        unsure,
    )


def ends_of(calls: Calls, wait: Wait) -> Bools:
    """Return which calls are those of a collective's members, or of a message's two ends."""
    here = (calls["group"] == wait.group) & (calls["seq"] == wait.seq)
    if wait.channel is None:
        return np.asarray(here & (calls["kind"] == COLLECTIVE))
    source, target, tag = wait.channel
    here &= (calls["kind"] == P2P) & (calls["tag"] == tag)
    sent = (calls["op"] == SEND) & (calls["rank"] == source) & (calls["peer"] == target)
    received = (calls["op"] == RECV) & (calls["rank"] == target) & (calls["peer"] == source)
    return np.asarray(here & (sent | received))


def _left_behind(snapshot: Snapshot) -> Bools:
    """Return which calls are of ranks that ended well: no rank waits for their ends any more.

    A rank that Ctrl-C ended closed its ring as well, and had waited until then.
    """
    well = np.array([ended_well(state) for state in snapshot.ranks], bool)
    left_behind: Bools = well[snapshot.calls["rank"]]
    return left_behind


def _after_the_stop(snapshot: Snapshot, clash: Disagreement) -> bool:
    """Tell whether a member issued its call after its launcher had got a signal to stop.

    A program may issue calls of its own then, for example to save what it has.
    """
    calls = snapshot.calls[clash.rows]
    signal_ages = [snapshot.ranks[rank].told_s for rank in calls["rank"]]
    return any(
        since is not None and age <= since
        for since, age in zip(signal_ages, calls["age_s"].tolist(), strict=True)
    )


def _just_begun_s(snapshot: Snapshot, hang_after: float) -> float:
    """Return the age from which a call of a dead run counts, in s.

    A sound job that is killed leaves some ranks in a call that others had not arrived at yet. That
    takes no longer than a step, and the time of the end is known to three heartbeats.
    """
    return min(max(BEATS_S, usual_step_s(snapshot)), hang_after)


def _shifts(
    suspects: Suspects, cases: Sequence[Case], cycles: Sequence[Cycle]
) -> list[Disagreement]:
    """Return the shifts behind ranks that did not arrive, one for each group."""
    pairs = [
        (case.longest, case.rank)
        for case in cases
        if case.longest is not None and case.kind.may_have_skipped
    ]
    pairs += [
        (wait, rank)
        for cycle in cycles
        for wait in cycle.waits
        for rank in wait.absent
        if rank in cycle.ranks
    ]
    shifts: dict[int, Disagreement] = {}
    for wait, rank in pairs[:_COMPARED]:
        shift = off_by_n(suspects.snapshot, wait, rank, has_left=suspects.has_left(rank))
        if shift is not None:
            shifts.setdefault(shift.group, shift)
    return list(shifts.values())


class _Explained:
    """Tells which waits a disagreement explains: its group never gets in step again."""

    def __init__(self, snapshot: Snapshot, clashes: Sequence[Disagreement]) -> None:
        self._from: dict[int, int] = {}
        self._ends: set[tuple[int, int, int, int]] = set()
        for clash in clashes:
            if clash.message:
                calls = snapshot.calls[clash.rows]
                self._ends.update(
                    (clash.group, int(call["rank"]), int(call["tag"]), clash.seq) for call in calls
                )
            elif clash.open or clash.order_differs:
                self._from[clash.group] = clash.seq

    def __call__(self, wait: Wait) -> bool:
        if wait.channel is None:
            return wait.seq >= self._from.get(wait.group, wait.seq + 1)
        return (wait.group, wait.waiters[0], wait.channel.tag, wait.seq) in self._ends


def _is_cause(cycle: Cycle, explained: _Explained) -> bool:
    return any(wait.hung for wait in cycle.waits) and not any(map(explained, cycle.waits))
