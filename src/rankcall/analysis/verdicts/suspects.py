"""Ranks that others wait for and that wait for no other rank, and how processes ended.

A process that fails takes the job with it: its peers' collectives fail, and the launcher ends the
rest. If the job hangs, its own watchers may end it: the processes that they end were waiting, or
were waited for. A launcher that a signal stops takes its node's ranks with it. In a job on
several nodes those may be the first to end, for example on a node that is preempted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rankcall.analysis.snapshot import (
    ALIVE,
    GONE,
    STOPPED,
    UNKNOWN,
    RankState,
    Snapshot,
    failed_for_good,
    unfinished,
)
from rankcall.analysis.verdicts.wait_graph import Wait, WaitGraph

# Exit codes of processes that a launcher or a person ended: the signal, or 128 + n.
ASKED = (-2, -15, 130, 143)
_KILLED = (-9, 137)
_INTERRUPTED = (-2, 130)  # Ctrl-C
# How torch, sockets and rankcall say that the process at the other end is gone.
_PEER_GONE = re.compile(
    r"Broken pipe|reset by peer|closed by peer|Connection (was likely )?closed|StoreLostError"
)
KILLED_LATER_S = 20.0  # torchrun sends SIGKILL 30 s after SIGTERM
# Processes that get a signal together end within that time, so noted ends are no more exact.
_AT_ONCE_S = 0.02
# A process that stood still for long and then ended was ended with the whole job, and so were those
# that ended at that time.
_TOGETHER_S = 1.0
BEATS_S = 1.5  # three heartbeats: times of death without a noted end are no more exact
# A heartbeat comes twice a second. If it is this old, and older than half of the time that the
# others have waited, it stopped when the waiting began. Otherwise the machine is only busy.
FROZEN_S, FROZEN_SHARE = 2.5, 0.5


@dataclass
class Exits:
    """The ranks whose processes are gone, by the reason."""

    own: set[int] = field(default_factory=set)  # of a signal or an error of their own
    left: set[int] = field(default_factory=set)  # they ended well
    first_s: float | None = None  # since the first of ``own`` ended
    together: set[int] = field(default_factory=set)  # ended at the same time, without a note of how
    # Their errors say that a process at the other end was gone, and ``before`` ended before them.
    bereft: set[int] = field(default_factory=set)
    before: set[int] = field(default_factory=set)


def exits_of(snapshot: Snapshot, victims: Collection[int], just_begun_s: float = 0.0) -> Exits:
    """Sort the ranks that are gone by the reason.

    Args:
        snapshot: Where the ranks stand.
        victims: A collective failed on these ranks, so the error that ended them is not their own.
        just_begun_s: A call that has lasted longer hangs, if the job is interrupted then.
    """
    gone = [state for state in snapshot.ranks if state.state == GONE]
    exits = Exits(left={state.rank for state in gone if _ended_well(state)})
    _note_bereft(exits, gone)
    not_own = exits.left | exits.bereft | set(victims)
    rest = [state for state in gone if state.rank not in not_own]
    ends = sorted((_ago(state) for state in gone if state.rank not in exits.left), reverse=True)
    live = snapshot.live
    known = [state for state in snapshot.ranks if not state.blind]
    last = min((state.silent_s for state in known), default=0.0)
    frozen_s = FROZEN_S + min((state.mute_s for state in known), default=0.0)
    ends_of_stopped = [_ago(state) for state in gone if _was_stopped(state, frozen_s)]
    first_failure = max((_ago(state) for state in gone if state.failure), default=0.0)
    for state in rest:
        ended_with_stopped = any(abs(_ago(state) - end) < _TOGETHER_S for end in ends_of_stopped)
        with_stopped = ended_with_stopped and state.exit in (None, *_KILLED, *ASKED)
        if state.aborted or state.ended_by_launcher or with_stopped:
            own = False
        elif is_interrupted(state):
            alone = not any(is_interrupted(other) for other in gone if other is not state)
            own = alone and not _hung_at(snapshot, _ago(state), just_begun_s)
        elif state.exit is None:
            own = bool(state.failure) or live or state.silent_s > last + BEATS_S
        elif state.exit > 0 and not state.failure and first_failure - _ago(state) > _AT_ONCE_S:
            own = False  # after another rank's exception, its launcher has asked it to end
        elif state.exit in ASKED:
            own = _ago(state) == ends[0] and (len(ends) == 1 or ends[0] - ends[1] > _AT_ONCE_S)
        else:
            own = state.exit not in _KILLED or ends[0] - _ago(state) < KILLED_LATER_S
        if own:
            exits.own.add(state.rank)
    ended_with_launcher = {state.rank for state in gone if state.launcher_signal}
    if ended_with_launcher and _cut_off(snapshot, ended_with_launcher, exits.own):
        exits.own |= ended_with_launcher
    exits.together = _together(snapshot, victims) - exits.own
    if exits.own:
        exits.first_s = max(_ago(snapshot.ranks[rank]) for rank in exits.own)
    return exits


def _note_bereft(exits: Exits, gone: Sequence[RankState]) -> None:
    """Note the ranks that ended because a process at the other end was gone, and which it was.

    For example, rank 0 hosts the job's store and returns first. What the others then do with the
    store fails: that error is a consequence.
    """
    others = [state for state in gone if not _PEER_GONE.search(state.failure)]
    if not others:
        return
    first = max(others, key=_ago)
    # A rank whose error says that another process was gone ended after that one. So if their times
    # are too close to tell the order, the error tells it.
    lost = [
        state
        for state in gone
        if _PEER_GONE.search(state.failure) and not ended_before(state, first)
    ]
    exits.bereft = {state.rank for state in lost}
    if lost:
        last = min(lost, key=_ago)
        exits.before = {other.rank for other in others if not ended_before(last, other)}


def ended_before(first: RankState, other: RankState) -> bool:
    """Tell whether a process is known to have ended before another one.

    Times that are closer to each other than they are exact do not say that. Those of two hosts are
    counted back from the last sign of life of each.
    """
    is_exact = first.host == other.host and None not in (first.exit, other.exit)
    return _ago(first) - _ago(other) > (_AT_ONCE_S if is_exact else BEATS_S)


def is_interrupted(state: RankState) -> bool:
    """Tell whether Ctrl-C ended a process."""
    return state.exit in _INTERRUPTED or state.failure.startswith("KeyboardInterrupt")


def has_failed(state: RankState) -> bool:
    """Tell whether an exception has ended a program whose process still closes down."""
    return state.state == ALIVE and bool(state.failure)


def _hung_at(snapshot: Snapshot, seconds: float, just_begun_s: float) -> bool:
    """Tell whether a call had lasted for long, so many seconds ago, and has not ended well."""
    calls = snapshot.calls
    open_calls = calls[unfinished(calls) | failed_for_good(calls)]
    return bool(np.any(open_calls["age_s"] - seconds > just_begun_s))


def _was_stopped(state: RankState, frozen_s: float) -> bool:
    """Tell whether a process gave no sign of life for long before it ended, unlike the others.

    It existed all that time: something stopped it, and its end is that of the whole job.
    """
    return state.mute_s > frozen_s and state.exit in (None, *_KILLED, *ASKED)


def _cut_off(
    snapshot: Snapshot, ended_with_launcher: Collection[int], own: Collection[int]
) -> bool:
    """Tell whether ranks that ended with their launcher left others behind, as on a lost node.

    If all ranks ended that way, or ended well, the job was ended on purpose.
    """
    rest = [state for state in snapshot.ranks if state.rank not in ended_with_launcher]
    first = max(_ago(snapshot.ranks[rank]) for rank in ended_with_launcher)
    behind = any(
        state.state in (ALIVE, STOPPED)
        or (state.exit not in (None, 0) and not state.ended_by_launcher)
        for state in rest
    )
    return behind and all(_ago(snapshot.ranks[rank]) <= first for rank in own)


def _together(snapshot: Snapshot, victims: Collection[int]) -> set[int]:
    """Return the ranks that cannot go on and have no noted end; in a copy, they may have ended."""
    if snapshot.live or snapshot.dumped:
        return set()
    return {
        state.rank
        for state in snapshot.ranks
        if state.state in (GONE, UNKNOWN)
        and state.exit is None
        and not state.ended_by_launcher
        and state.rank not in victims
        and not (state.closed or state.aborted or state.blind)
    }


def _ended_well(state: RankState) -> bool:
    """Tell whether a process came to the end of its program, as far as is known.

    A ring that was closed before that is of a program that an exception ended, or that called
    ``rankcall.disable``.
    """
    return state.exit == 0 or (state.exit is None and state.closed and not state.failure)


def _ago(state: RankState) -> float:
    return state.gone_s if state.gone_s is not None else state.silent_s


@dataclass
class Suspects:
    """All that is known when the ranks that hold others up are classified."""

    snapshot: Snapshot
    graph: WaitGraph
    exits: Exits
    hang_after: float
    clashing: Collection[int]  # ranks in a call whose members do not agree
    explained: Callable[[Wait], bool]  # whether a disagreement explains a wait
    halted: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.halted = halted_ranks(self.snapshot, self.graph, self.exits)

    def has_left(self, rank: int) -> bool:
        """Tell whether a rank's program has ended well, or is ending."""
        return rank in self.exits.left or self.snapshot.ranks[rank].leaving

    def overdue(self, waits: Iterable[Wait]) -> list[Wait]:
        """Return the overdue waits behind some waits, but not those of halted ranks alone."""
        reached = [wait for wait in self.graph.reach(waits) if wait.hung]
        return [wait for wait in reached if not self.halted.issuperset(wait.waiters)]


@dataclass
class Suspect:
    """One rank that others wait for and that waits for no other rank, with the waits for it."""

    state: RankState
    waits: list[Wait]

    @property
    def rank(self) -> int:
        """The rank's number."""
        return self.state.rank

    @property
    def longest(self) -> Wait | None:
        """The wait for it that has lasted longest."""
        return max(self.waits, key=self.held_s, default=None)

    def held_s(self, wait: Wait) -> float:
        """Return for how long it has held up a wait, in s.

        A rank that had arrived has done so only since its process ended or stopped.
        """
        if self.rank not in wait.present:
            return wait.age_s
        state = self.state
        ended = state.gone_s is not None and state.mute_s < FROZEN_S
        return min(wait.age_s, _ago(state) if ended else state.silent_s)


@dataclass
class Case(Suspect):
    """A suspect with the kind of verdict that fits it."""

    kind: Classifier
    confidence: str


class Classifier(Protocol):
    """The part of a kind of verdict that classifies one rank."""

    may_have_skipped: bool
    """Whether the rank may be out of step with the others: its calls are compared with theirs."""

    def confidence(self, suspects: Suspects, suspect: Suspect) -> str | None:
        """Return how sure it is that this kind fits a suspect; None if it does not."""

    def counts(self, suspects: Suspects, case: Case) -> bool:
        """Tell whether a case is a cause that must be reported."""


def culprit_cases(suspects: Suspects, kinds: Sequence[Classifier]) -> list[Case]:
    """Return all ranks that hold others up. The first kind that fits a rank classifies it."""
    cases = []
    for rank in _candidates(suspects):
        if suspects.snapshot.ranks[rank].may_be_silent(suspects.hang_after):
            continue
        case = _case(suspects, rank, kinds)
        if case is not None and case.kind.counts(suspects, case):
            cases.append(case)
    return cases


def _candidates(suspects: Suspects) -> list[int]:
    """Return the ranks that are waited for and do not wait themselves, and the halted ranks."""
    absent: set[int] = set()
    for wait in suspects.graph.waits:
        absent.update(rank for rank in wait.absent if not suspects.graph.blocked(rank))
    return sorted(absent | suspects.halted)


def _case(suspects: Suspects, rank: int, kinds: Sequence[Classifier]) -> Case | None:
    graph, halted = suspects.graph, suspects.halted
    waits = list(graph.waits_for.get(rank, ()))
    if rank in halted:
        # A halted rank also holds up the calls that it has arrived at, but not those in which all
        # other ranks are halted, too.
        waits = list({id(wait): wait for wait in [*waits, *graph.joined(rank)]}.values())
        waits = [wait for wait in waits if not halted.issuperset(wait.waiters)] or waits
    suspect = Suspect(suspects.snapshot.ranks[rank], waits)
    for kind in kinds:
        confidence = kind.confidence(suspects, suspect)
        if confidence is not None:
            return Case(suspect.state, waits, kind, confidence)
    return None


def halted_ranks(snapshot: Snapshot, graph: WaitGraph, exits: Exits) -> set[int]:
    """Return the ranks that cannot go on in any call: dead, stopped, or without a sign of life."""
    frozen_s = frozen_after_s(graph.waits)
    halted = {
        state.rank for state in snapshot.ranks if state.state == STOPPED or _still(state, frozen_s)
    }
    return halted | exits.own


def frozen_after_s(waits: Iterable[Wait]) -> float:
    """Return the age, in s, from which a heartbeat counts as frozen beside some waits."""
    return max(FROZEN_S, FROZEN_SHARE * max((wait.age_s for wait in waits), default=0.0))


def _still(state: RankState, frozen_s: float) -> bool:
    """Tell whether a process that still exists gives no sign of life."""
    frozen = state.silent_s > frozen_s and not state.closed
    return frozen and not state.blind and state.state != GONE
