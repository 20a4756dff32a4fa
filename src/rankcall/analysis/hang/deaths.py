"""Which processes ended of their own accord, and which only because others had.

One that fails takes the job with it: its peers' collectives fail, and the launcher ends the rest.
Where the job hangs, its own watchers may end it: what they end was waiting, or waited for. Where
a launcher is told to stop, its node's ranks end with it: of a job on several nodes they may be the
first, as on a node that is preempted.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from rankcall.analysis.state.snapshot import ALIVE, GONE, STOPPED, UNKNOWN, RankState, Snapshot

# What a process is asked to end with, by a launcher or a person: the signal, or 128 + n.
_ASKED = (-2, -15, 130, 143)
_KILLED = (-9, 137)
_KILLED_LATER_S = 20.0  # torchrun kills what has not ended 30 s after it was asked
_AT_ONCE_S = 0.02  # asked all at once, processes end within that
BEATS_S = 1.5  # without noted ends, times of death are as exact as three heartbeats


@dataclass
class Deaths:
    """Who is gone, and why. ``first_s``: how long ago the first of their own accord was."""

    own: set[int] = field(default_factory=set)  # of a signal or an error that was their own
    left: set[int] = field(default_factory=set)  # they ended well
    first_s: float | None = None
    together: set[int] = field(default_factory=set)  # all at once, and nobody noted how


def deaths(snapshot: Snapshot, victims: Collection[int]) -> Deaths:
    """Sort out who died. ``victims`` had a collective fail: what ended them is not their own."""
    gone = [each for each in snapshot.ranks if each.state == GONE]
    found = Deaths(left={each.rank for each in gone if _ended_well(each)})
    rest = [each for each in gone if each.rank not in found.left and each.rank not in victims]
    ends = sorted((_ago(each) for each in gone if each.rank not in found.left), reverse=True)
    live = snapshot.live
    last = min((each.silent_s for each in snapshot.ranks if not each.blind), default=0.0)
    for each in rest:
        if each.aborted:
            own = False
        elif each.exit is None:
            own = live or each.silent_s > last + BEATS_S
        elif each.ended_by_launcher:
            own = False
        elif each.exit in _ASKED:
            own = _ago(each) == ends[0] and (len(ends) == 1 or ends[0] - ends[1] > _AT_ONCE_S)
        else:
            own = each.exit not in _KILLED or ends[0] - _ago(each) < _KILLED_LATER_S
        if own:
            found.own.add(each.rank)
    told = {each.rank for each in gone if each.launcher_signal}
    if told and _cut_off(snapshot, told, found.own):
        found.own |= told
    found.together = _together(snapshot, victims) - found.own
    if found.own:
        found.first_s = max(_ago(snapshot.ranks[rank]) for rank in found.own)
    return found


def _cut_off(snapshot: Snapshot, told: Collection[int], own: Collection[int]) -> bool:
    """Tell whether ranks that ended with their launcher left others behind, as a lost node does.

    Where all ended that way, or ended well, somebody wanted the job to end.
    """
    rest = [each for each in snapshot.ranks if each.rank not in told]
    first = max(_ago(snapshot.ranks[rank]) for rank in told)
    behind = any(
        each.state in (ALIVE, STOPPED)
        or (each.exit not in (None, 0) and not each.ended_by_launcher)
        for each in rest
    )
    return behind and all(_ago(snapshot.ranks[rank]) <= first for rank in own)


def _together(snapshot: Snapshot, victims: Collection[int]) -> set[int]:
    """Return who is in no state to go on, where nobody noted an end: of a copy, who may be gone."""
    if snapshot.live:
        return set()
    return {
        each.rank
        for each in snapshot.ranks
        if each.state in (GONE, UNKNOWN)
        and each.exit is None
        and each.rank not in victims
        and not (each.closed or each.aborted or each.blind)
    }


def _ended_well(state: RankState) -> bool:
    return state.exit == 0 or (state.exit is None and state.closed)


def _ago(state: RankState) -> float:
    return state.gone_s if state.gone_s is not None else state.silent_s
