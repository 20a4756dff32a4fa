"""Which processes ended of their own accord, and which only because others had.

One that fails takes the job with it: its peers' collectives fail, and the launcher ends the rest.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from rankcall.analysis.snapshot import GONE, RankState, Snapshot

# What a launcher ends workers with; shells and handlers turn them into 128 + n.
_TERMINATED = (-15, 143)
_KILLED = (-9, 137)
_KILLED_LATER_S = 20.0  # torchrun kills 30 s after it asked
_BEAT_S = 1.5  # without noted ends, times of death are as exact as three heartbeats


@dataclass
class Deaths:
    """Who is gone, and why. ``first_s``: how long ago the first of their own accord was."""

    own: set[int] = field(default_factory=set)  # died of a signal or error that was their own
    left: set[int] = field(default_factory=set)  # ended well
    first_s: float | None = None


def deaths(snapshot: Snapshot, victims: Collection[int]) -> Deaths:
    """Sort out who died. ``victims`` had a collective fail: what ended them is not their own."""
    gone = [each for each in snapshot.ranks if each.state == GONE]
    found = Deaths(left={each.rank for each in gone if _ended_well(each)})
    rest = [each for each in gone if each.rank not in found.left and each.rank not in victims]
    if not rest:
        return found
    latest = min(each.silent_s for each in snapshot.ranks if not each.blind)
    own = [each for each in rest if _noted(each)]
    known = max((_ago(each) for each in own if not _asked(each)), default=None)
    asked = max((_ago(each) for each in own), default=0.0)
    first = known if known is not None and known >= asked - 0.05 else asked
    for each in rest:
        if each.exit is None:
            if each.silent_s > latest + _BEAT_S or _others_live(snapshot):
                found.own.add(each.rank)
        elif not _by_launcher(each, first):
            found.own.add(each.rank)
    if found.own:
        found.first_s = max(_ago(snapshot.ranks[rank]) for rank in found.own)
    return found


def _ended_well(state: RankState) -> bool:
    return state.exit == 0 or (state.exit is None and state.closed)


def _noted(state: RankState) -> bool:
    return state.exit is not None and not state.ended_by_launcher


def _asked(state: RankState) -> bool:
    return state.exit in _TERMINATED


def _ago(state: RankState) -> float:
    return state.gone_s if state.gone_s is not None else state.silent_s


def _by_launcher(state: RankState, first: float) -> bool:
    """Tell whether the launcher ended it after the first death, ``first`` s ago."""
    if state.ended_by_launcher:
        return True
    later = first - _ago(state)
    if state.exit in _TERMINATED:
        return later > 0.02
    return state.exit in _KILLED and later > _KILLED_LATER_S


def _others_live(snapshot: Snapshot) -> bool:
    return snapshot.live
