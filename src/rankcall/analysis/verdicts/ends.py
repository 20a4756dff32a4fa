"""How the processes that are gone ended: well, by a fault of their own, or because of others.

A process that fails takes the job with it: its peers' collectives fail, and the launcher ends the
rest. If the job hangs, its own watchers may end it: the processes that they end were waiting, or
were waited for. A launcher that a signal stops takes its node's ranks with it. In a job on
several nodes those may be the first to end, for example on a node that is preempted.
"""

from __future__ import annotations

import bisect
import math
import re
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

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

# Exit codes of processes that a launcher or a person ended: the signal, or 128 + n.
ASKED = (-1, -2, -3, -15, 129, 130, 131, 143)
_KILLED = (-9, 137)
# A terminal sends these to all processes of its job: it was closed, Ctrl-C, Ctrl-backslash.
_INTERRUPTED = (-1, -2, -3, 129, 130, 131)
# A process sends itself these, or the kernel does, for a fault of its program. SIGKILL may be the
# kernel's as well, which is out of memory, and a machine that is has slow ranks before.
_NOT_SENT = frozenset(
    (
        signal.SIGILL,
        signal.SIGTRAP,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGKILL,
        signal.SIGSEGV,
        signal.SIGPIPE,
        signal.SIGSYS,
    )
)
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
    # Ctrl-C ended them, or still does, when a call had hung: not their ends held the job up.
    in_hang: set[int] = field(default_factory=set)
    first_s: float | None = None  # since the first of ``own`` ended
    together: set[int] = field(default_factory=set)  # ended at the same time, without a note of how
    # Their errors say that a process at the other end was gone, and ``before`` ended before them.
    bereft: set[int] = field(default_factory=set)
    before: set[int] = field(default_factory=set)


def exits_of(
    snapshot: Snapshot,
    victims: Collection[int],
    just_begun_s: float = 0.0,
    hang_after: float = math.inf,
) -> Exits:
    """Sort the ranks that are gone by the reason.

    Args:
        snapshot: Where the ranks stand.
        victims: A collective failed on these ranks, so the error that ended them is not their own.
        just_begun_s: A call that has lasted longer hangs, if the job is interrupted then.
        hang_after: One that has lasted longer hangs, if all ranks are killed then.
    """
    gone = [state for state in snapshot.ranks if state.state == GONE]
    exits = Exits(left={state.rank for state in gone if ended_well(state)})
    _note_bereft(exits, gone)
    not_own = exits.left | exits.bereft | set(victims)
    reasons = _Reasons(snapshot, gone, exits.left, just_begun_s)
    if reasons.all_were_sent_one_signal and reasons.hung_before(hang_after):
        return exits  # whoever ended the whole job ended a hang
    exits.in_hang = {state.rank for state in snapshot.ranks if reasons.interrupts_hang(state)}
    exits.own = {
        state.rank for state in gone if state.rank not in not_own and reasons.is_own(state)
    }
    ended_with_launcher = {state.rank for state in gone if state.launcher_signal}
    if ended_with_launcher and _cut_off(snapshot, ended_with_launcher, exits.own):
        exits.own |= ended_with_launcher
    exits.together = _together(snapshot, victims) - exits.own
    if exits.own:
        exits.first_s = max(ended_ago_s(snapshot.ranks[rank]) for rank in exits.own)
    return exits


class _Reasons:
    """Tells the process that ended by its own fault from those that ended because of another.

    What the others' ends say is looked up once: a job may have tens of thousands of ranks.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        gone: Sequence[RankState],
        left: Collection[int],
        just_begun_s: float,
    ) -> None:
        self._snapshot = snapshot
        self._just_begun_s = just_begun_s
        calls = snapshot.calls
        open_ages = calls["age_s"][unfinished(calls) | failed_for_good(calls)]
        self._longest_s = float(open_ages.max(initial=-math.inf))  # a call lasts that did not end
        ends = sorted(ended_ago_s(state) for state in gone if state.rank not in left)
        self._first_s = ends[-1] if ends else 0.0
        self._first_is_alone = len(ends) < 2 or ends[-1] - ends[-2] > _AT_ONCE_S
        heard_of = [state for state in snapshot.ranks if not state.blind]
        self._last_sign_s = min((state.silent_s for state in heard_of), default=0.0)
        frozen_s = FROZEN_S + min((state.mute_s for state in heard_of), default=0.0)
        stopped = (state for state in gone if _was_stopped(state, frozen_s))
        self._ends_of_stopped = sorted(map(ended_ago_s, stopped))
        self._first_error_s = max(
            (ended_ago_s(state) for state in gone if state.failure), default=0.0
        )
        self._interrupted = sum(map(is_interrupted, gone))
        signals = {_signal_of(state) for state in snapshot.ranks if state.rank not in left}
        self.all_were_sent_one_signal = (
            len(ends) > 1
            and len(signals) == 1
            and not signals <= {0, *_NOT_SENT}
            and ends[-1] - ends[0] < _TOGETHER_S
        )

    def is_own(self, state: RankState) -> bool:
        """Tell whether a process that did not end well ended by a signal or error of its own."""
        ago_s = ended_ago_s(state)
        if state.aborted or state.ended_by_launcher or self._ended_with_stopped(state):
            return False
        if is_interrupted(state):
            return self._interrupted == 1 and not self.interrupts_hang(state)
        if state.exit is None:
            is_first = state.silent_s > self._last_sign_s + BEATS_S
            return bool(state.failure) or self._snapshot.live or is_first
        if state.exit > 0 and not state.failure and self._first_error_s - ago_s > _AT_ONCE_S:
            return False  # after another rank's exception, its launcher has asked it to end
        if state.exit in ASKED:
            return ago_s == self._first_s and self._first_is_alone
        return state.exit not in _KILLED or self._first_s - ago_s < KILLED_LATER_S

    def _ended_with_stopped(self, state: RankState) -> bool:
        """Tell whether a process was ended when one was that had been stopped."""
        if state.exit not in (None, *_KILLED, *ASKED):
            return False
        ends, ago_s = self._ends_of_stopped, ended_ago_s(state)
        after = bisect.bisect_right(ends, ago_s - _TOGETHER_S)
        return after < len(ends) and ends[after] < ago_s + _TOGETHER_S

    def interrupts_hang(self, state: RankState) -> bool:
        """Tell whether Ctrl-C ended a process when a call had lasted for long, and did not end.

        One that still closes down has just begun to, unless it closed its ring before.
        """
        if not is_interrupted(state):
            return False
        ended_s = ended_ago_s(state) if state.closed_s is None else state.closed_s
        return self._longest_s - ended_s > self._just_begun_s

    def hung_before(self, seconds: float) -> bool:
        """Tell whether a call had lasted for so long before the first end, and did not end."""
        return self._longest_s - self._first_s > seconds


def _note_bereft(exits: Exits, gone: Sequence[RankState]) -> None:
    """Note the ranks that ended because a process at the other end was gone, and which it was.

    For example, rank 0 hosts the job's store and returns first. What the others then do with the
    store fails: that error is a consequence.
    """
    others = [state for state in gone if not _PEER_GONE.search(state.failure)]
    if not others:
        return
    first = max(others, key=ended_ago_s)
    # A rank whose error says that another process was gone ended after that one. So if their times
    # are too close to tell the order, the error tells it.
    lost = [
        state
        for state in gone
        if _PEER_GONE.search(state.failure) and not ended_before(state, first)
    ]
    exits.bereft = {state.rank for state in lost}
    if lost:
        last = min(lost, key=ended_ago_s)
        exits.before = {other.rank for other in others if not ended_before(last, other)}


def ended_before(first: RankState, other: RankState) -> bool:
    """Tell whether a process is known to have ended before another one.

    Times that are closer to each other than they are exact do not say that. Those of two hosts are
    counted back from the last sign of life of each.
    """
    is_exact = first.host == other.host and None not in (first.exit, other.exit)
    return ended_ago_s(first) - ended_ago_s(other) > (_AT_ONCE_S if is_exact else BEATS_S)


def _signal_of(state: RankState) -> int:
    """Return the signal that ended a process; 0 if none did, as far as is known."""
    code = state.exit or 0
    return -code if code < 0 else max(0, code - 128)


def is_interrupted(state: RankState) -> bool:
    """Tell whether Ctrl-C ended a process, or another signal of its terminal."""
    return state.exit in _INTERRUPTED or state.failure.startswith("KeyboardInterrupt")


def has_failed(state: RankState) -> bool:
    """Tell whether an exception has ended a program whose process still closes down."""
    return state.state == ALIVE and bool(state.failure)


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
    first = max(ended_ago_s(snapshot.ranks[rank]) for rank in ended_with_launcher)
    behind = any(
        state.state in (ALIVE, STOPPED)
        or (state.exit not in (None, 0) and not state.ended_by_launcher)
        for state in rest
    )
    return behind and all(ended_ago_s(snapshot.ranks[rank]) <= first for rank in own)


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


def ended_well(state: RankState) -> bool:
    """Tell whether a process came to the end of its program, as far as is known.

    A ring that was closed before that is of a program that an exception ended, or that called
    ``rankcall.disable``.
    """
    return state.exit == 0 or (state.exit is None and state.closed and not state.failure)


def ended_ago_s(state: RankState) -> float:
    """Return how long ago a process ended, in s; without a note of it, its last sign of life."""
    return state.gone_s if state.gone_s is not None else state.silent_s
