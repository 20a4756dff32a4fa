"""The evidence that verdicts rest on: which calls are overdue, and who waits for whom.

For a hang it is the calls that are overdue, and the waits behind them (``HangEvidence``). It is
worked out once for a snapshot, and every kind of verdict that can be behind a hang reads it. For a
job that goes on it is the newest calls, lined up (``RecentCalls``): they show slow ranks and links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankcall.analysis.collectives import BLOCKING
from rankcall.analysis.pace import usual_step_s
from rankcall.analysis.snapshot import (
    COLLECTIVE,
    COMPLETED,
    GONE,
    LACKS,
    LONGEST_UNNOTICED_S,
    P2P,
    PEER_CLOSED,
    RECV,
    SEND,
    Bools,
    Calls,
    Snapshot,
    after_first,
    failed_for_good,
    invalid_calls,
    not_started,
    unfinished,
)
from rankcall.analysis.verdicts.disagreements import Disagreement, disagreements_in, off_by_n
from rankcall.analysis.verdicts.ends import BEATS_S, Exits, ended_well, exits_of
from rankcall.analysis.verdicts.suspects import Case, Classifier, Suspects, culprit_cases
from rankcall.analysis.verdicts.wait_graph import (
    Cycle,
    Wait,
    WaitGraph,
    cycles_in,
    waits_of,
)
from rankcall.record import FLAG_ABANDONED, FLAG_DEVICE

HANG_AFTER_S = 60.0
FIRST_STEP = 5.0  # the first step may take so many times longer
LONG_STEPS = 10.0  # a later call may take so many times the median step
# A call in flight for this part of the threshold is followed to the ranks that it waits for. It
# began with the trouble, or somewhat later; a shorter call may be on its way.
_FOLLOWED = 0.1
# Beside a call that hangs, another one that the same hang does not hold up counts at this part of
# its patience: two troubles seldom begin at the same moment, and the first verdict is the one read.
_BESIDE = 0.5
_SEVERAL = 2  # other members; of a pair, neither is the one that differs
_COMPARED = 64  # ranks whose calls are compared with those of the ranks that wait for them

Floats = npt.NDArray[np.float64]


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
        Nor one that a rank has issued behind another call that does not end: that one comes first.
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
            least += float(_since_look(self.snapshot.calls[wait.rows]).min())
        return bool((ends["age_s"] >= least).all())

    def may_be_held_elsewhere(self, wait: Wait) -> bool:
        """Tell whether a rank's device may be in a call before this one, which is what hangs.

        How long it has been in that call is not known, as its rank has looked too late, or has
        noticed the end of the one before only just now. Or it is in that call for certain, and it
        is not known that it is not past this one.
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
    unseen = np.zeros(len(calls), bool) if snapshot.dumped else _unseen(snapshot)
    may_be_over = unseen & (calls["flags"] & LACKS == 0)
    hung = (hung & ~may_be_over) | failed
    followed = hung | (in_flight & (lasted >= allowed * (_FOLLOWED if snapshot.live else 0.0)))
    followed &= ~may_be_over | failed  # a rank may have left these, as its position says
    unsure = in_flight & ~followed & (calls["flags"] & FLAG_DEVICE != 0)
    if endless is not None:
        hung, followed = in_flight & endless, in_flight
    # A rank that has ended is in no call, whether it left records or not.
    blind = {state.rank for state in snapshot.ranks if state.blind and state.state != GONE}
    graph = WaitGraph(waits_of(snapshot, followed, hung, _idle(snapshot, unseen, allowed)), blind)
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
    cycles = cycles_in(graph.waits, suspects.halted)
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


def patience(snapshot: Snapshot, hang_after: float) -> Floats:
    """Return how long each call may be in flight, in s.

    A rank is in its first step while it has finished no step and the call in flight is the first
    one of its kind from its line. A device is in it for longer than its host, which runs ahead. A
    rank may take any time in a phase that it declared to take long.
    """
    calls = snapshot.calls
    later = max(float(hang_after), LONG_STEPS * usual_step_s(snapshot))
    allowed = np.full(len(calls), later)
    stepless = _in_first_step(snapshot)
    kind = _kinds_of_calls(calls)
    done = calls["status"] == COMPLETED
    seen = np.isin(kind, kind[done]) & (calls["site"] > 0)
    allowed[stepless & ~seen] = FIRST_STEP * hang_after
    declared = np.array([state.may_be_silent(hang_after) for state in snapshot.ranks], bool)
    allowed[declared[calls["rank"]]] = np.inf
    return allowed


def _in_first_step(snapshot: Snapshot) -> Bools:
    """Return which calls are of ranks that have finished no step; on devices, of such devices.

    The device of a rank has not finished the first step while a call issued in it is in flight.
    """
    calls = snapshot.calls
    stepless = np.array([state.steps == 0 for state in snapshot.ranks], bool)
    on_device = calls["flags"] & FLAG_DEVICE != 0
    behind = stepless.copy()
    behind[calls["rank"][unfinished(calls) & on_device & (calls["step"] == 0)]] = True
    in_first: Bools = np.where(on_device, behind[calls["rank"]], stepless[calls["rank"]])
    return in_first


def _kinds_of_calls(calls: Calls) -> npt.NDArray[np.int64]:
    """Return a number for each call, the same for calls of one rank, line and kind.

    A line of a program is not enough: a pipeline's step is one line, and its first gradient comes
    long after its first activation, from a rank that does its first backward pass meanwhile.
    """
    kind = np.zeros(len(calls), np.int64)
    for name in ("rank", "site", "group", "op", "dtype", "peer"):
        values = calls[name].astype(np.int64)
        low = values.min(initial=0)
        kind = kind * (values.max(initial=0) - low + 1) + values - low
    return kind


def followed_after(snapshot: Snapshot, hang_after: float) -> Floats:
    """Return how long each call must be in flight before it is followed, in s."""
    return np.minimum(patience(snapshot, hang_after), hang_after) * _FOLLOWED


def held_for(snapshot: Snapshot) -> Floats:
    """Return how long each call has held its rank or its device up, in s.

    A message on the CPU that was issued to be waited for later does not hold a rank up while the
    rank goes on.

    Hosts run ahead of their devices, so a call on a device may have been issued long before the
    device comes to it, and what the host has issued since is no sign that the device goes on. A
    collective has held the device up for no longer than since the last end of a collective of its
    group was noticed: those end in order. Messages keep no order, so one has held the device up for
    no longer than since the last end of any call on it. Nor has it for longer than until its rank
    last looked: what was in flight then may be over by now, unless a member is yet to come.
    """
    calls, lasted = snapshot.calls, _in_flight_for(snapshot)
    if snapshot.live:
        lasted -= np.where(calls["flags"] & LACKS != 0, 0.0, _since_look(calls))
    return np.maximum(lasted, 0.0)


def _idle(snapshot: Snapshot, unseen: Bools, allowed: Floats) -> Bools:
    """Return which calls their devices had not started when their rank looked, after a while.

    If a call before may be over since, this one may have been started since.
    """
    idle = not_started(snapshot.calls) & ~unseen
    if snapshot.live and idle.any():
        idle &= ~after_first(snapshot.calls, unseen & (snapshot.calls["flags"] & LACKS == 0))
        lasted = _in_flight_for(snapshot) - _since_look(snapshot.calls)
        idle &= lasted >= allowed * _FOLLOWED
    return idle


def _in_flight_for(snapshot: Snapshot) -> Floats:
    """Return how long each call has held its rank or its device up, if it goes on until now."""
    calls, ranks = snapshot.calls, len(snapshot.ranks)
    lasted: Floats = calls["age_s"].copy()
    if not snapshot.live:
        return lasted
    rank = calls["rank"].astype(np.int64)
    on_device, messages = calls["flags"] & FLAG_DEVICE != 0, calls["kind"] == P2P
    blocking = [number for number, site in enumerate(snapshot.sites) if site.api in BLOCKING]
    loose = messages & ~np.isin(calls["site"], blocking)
    host_went_on = np.fmin(calls["age_s"], calls["ended_s"])
    # If the end of a call cannot be known, its issue is all that tells when the device went on.
    is_unknown = on_device & (calls["flags"] & FLAG_ABANDONED != 0)
    device_went_on = np.where(is_unknown, calls["age_s"], np.inf)
    is_over = on_device & (calls["status"] == COMPLETED)
    device_went_on[is_over] = calls["ended_s"][is_over]
    rows = loose & ~on_device
    _limit(lasted, rows, host_went_on, rank, ranks)
    rows = messages & on_device
    _limit(lasted, rows & loose, np.where(on_device, device_went_on, host_went_on), rank, ranks)
    _limit(lasted, rows & ~loose, device_went_on, rank, ranks)
    rows = on_device & (calls["kind"] == COLLECTIVE)
    ended = np.where(is_over & rows, calls["ended_s"], np.inf)
    groups = len(snapshot.groups) + 1
    _limit(lasted, rows, ended, rank * groups + calls["group"], ranks * groups)
    in_flight = unfinished(calls) & on_device
    if in_flight.any():
        # Those that came first waited for the last one, and nothing was amiss.
        may_end_s, complete = _may_end(snapshot, in_flight)
        lasted[complete] = np.minimum(lasted, may_end_s)[complete]
    return lasted


def _since_look(calls: Calls) -> Floats:
    """Return how long ago the rank of each call on a device has looked there, in s.

    0 on the CPU. A rank that has not for very long does look: its look hangs, with the device.
    """
    noticed = (calls["flags"] & FLAG_DEVICE != 0) & (calls["noticed_s"] < LONGEST_UNNOTICED_S)
    since: Floats = np.where(noticed, calls["noticed_s"], 0.0)
    return since


def _limit(
    lasted: Floats, rows: Bools, went_on: Floats, queue: npt.NDArray[np.int64], queues: int
) -> None:
    """Let calls in ``rows`` have lasted no longer than since their queue last went on.

    Args:
        lasted: The seconds that each call has lasted; changed in place.
        rows: The calls that a sign of their queue's progress concerns.
        went_on: How long ago each call showed that its queue went on, in s; infinity: not at all.
        queue: The queue of each call.
        queues: How many there are.
    """
    if rows.any():
        since = np.full(queues, np.inf)
        np.fmin.at(since, queue, went_on)
        lasted[rows] = np.minimum(lasted[rows], since[queue[rows]])


def _unseen(snapshot: Snapshot) -> Bools:
    """Return which calls in flight may have ended since their rank looked at its devices.

    No view says of a rank that it is in a call whose end may not have been noticed yet, so no
    verdict may say so either. A collective may end for all once its last member has issued it.
    Whether that member has looked since does not matter: one that is stopped never does, and the
    others hang.
    """
    calls = snapshot.calls
    in_flight: Bools = unfinished(calls) & (calls["flags"] & FLAG_DEVICE != 0)
    if not in_flight.any():
        return in_flight
    may_end_s, _ = _may_end(snapshot, in_flight)
    over: Bools = in_flight & (may_end_s < calls["noticed_s"])
    return over


def _may_end(snapshot: Snapshot, in_flight: Bools) -> tuple[Floats, Bools]:
    """Return since when each call may have ended for all, in s ago, and whether all have come.

    A collective on devices may end once its last member has issued it, and may have ended for all,
    at the latest, when its end was noticed on one rank. Other calls may end since their issue.

    Args:
        snapshot: The calls.
        in_flight: The calls of which it is asked. The calls of other members are read as far back
            as the oldest look of the ranks of these.
    """
    calls = snapshot.calls
    since, complete = calls["age_s"].copy(), np.zeros(len(calls), bool)
    oldest_s = calls["noticed_s"][in_flight].max(initial=0.0)
    collective = (calls["flags"] & FLAG_DEVICE != 0) & (calls["kind"] == COLLECTIVE)
    newer = (calls["age_s"] < oldest_s) | (calls["ended_s"] < oldest_s)
    rows = np.flatnonzero(collective & (in_flight | newer))
    if len(rows):
        of_group = np.stack([calls["group"][rows], calls["seq"][rows]])
        _, which, count = np.unique(of_group, axis=1, return_inverse=True, return_counts=True)
        which = which.ravel()
        last_came = np.full(len(count), np.inf)
        np.fmin.at(last_came, which, since[rows])
        noticed = np.full(len(count), -np.inf)
        np.fmax.at(noticed, which, calls["ended_s"][rows])
        has_ended = noticed >= 0
        may_end = np.where(has_ended, np.minimum(last_came, noticed), last_came)
        sizes = np.array([*(len(group.ranks) for group in snapshot.groups), 0])
        since[rows] = may_end[which]
        complete[rows] = has_ended[which] | (count[which] == sizes[calls["group"][rows]])
    return since, complete


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
