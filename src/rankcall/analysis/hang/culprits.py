"""Whom everybody waits for in the end, and what is the matter with them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from rankcall.analysis.hang.deaths import Deaths
from rankcall.analysis.hang.graph import Graph
from rankcall.analysis.hang.waits import Wait
from rankcall.analysis.state.snapshot import GONE, STOPPED, RankState, Snapshot

# A heartbeat comes twice a second. One that is this old, and older than half of what the others
# have waited, froze when the waiting began. One that is only old is of a busy machine.
FROZEN_S, FROZEN_SHARE = 2.5, 0.5
# What a process is ended with from outside; others come of what it was doing itself.
_SENT_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)


@dataclass
class Case:
    """One rank that others wait for and that waits for nobody."""

    rank: int
    kind: str
    confidence: str
    waits: list[Wait] = field(default_factory=list)

    @property
    def longest(self) -> Wait | None:
        """The wait for it that has lasted longest."""
        return max(self.waits, key=lambda wait: wait.age_s, default=None)


def cases(
    snapshot: Snapshot,
    graph: Graph,
    gone: Deaths,
    hang_after: float,
    explained: Callable[[Wait], bool],
    clashing: Collection[int] = (),
) -> list[Case]:
    """Return everybody who holds others up and is held up by nobody.

    ``explained`` tells which waits have their cause already; ``clashing`` ranks are in a call
    whose members do not agree.
    """
    found = []
    halted = halted_ranks(snapshot, graph, gone)
    for rank in _suspects(snapshot, graph, halted):
        if snapshot.ranks[rank].may_be_silent(hang_after):
            continue
        case = _case(snapshot, graph, gone, rank, halted)
        if not _counts(snapshot, graph, case, gone, hang_after, halted):
            continue
        if case.kind == "dead" and rank in clashing and _fell(snapshot.ranks[rank]):
            continue
        if case.kind in ("dead", "stopped") or not all(map(explained, case.waits)):
            found.append(case)
    return found


def _fell(state: RankState) -> bool:
    """Tell whether a death may come of a call: back ends abort where members do not agree."""
    return state.exit is not None and state.exit not in _SENT_FROM_OUTSIDE


def halted_ranks(snapshot: Snapshot, graph: Graph, gone: Deaths) -> set[int]:
    """Return who cannot go on whatever it is in: dead, stopped, or without a sign of life."""
    frozen_s = _frozen_s(graph.waits)
    halted = {
        each.rank for each in snapshot.ranks if each.state == STOPPED or _still(each, frozen_s)
    }
    return halted | gone.own


def _frozen_s(waits: Iterable[Wait]) -> float:
    """Return from which age on a heartbeat has frozen, s, where some waits are all there is."""
    return max(FROZEN_S, FROZEN_SHARE * max((wait.age_s for wait in waits), default=0.0))


def _suspects(snapshot: Snapshot, graph: Graph, halted: set[int]) -> list[int]:
    """Return who is waited for and waits for nobody, and who cannot go on whatever it is in."""
    absent: set[int] = set()
    for wait in graph.waits:
        absent.update(rank for rank in wait.absent if not graph.blocked(rank))
    return sorted(absent | halted)


def _still(state: RankState, frozen_s: float) -> bool:
    """Tell whether a living process gives no sign of life at all."""
    frozen = state.silent_s > frozen_s and not state.closed
    return frozen and not state.blind and state.state != GONE


def _case(snapshot: Snapshot, graph: Graph, gone: Deaths, rank: int, halted: set[int]) -> Case:
    state = snapshot.ranks[rank]
    waits = list(graph.without.get(rank, ()))
    if rank in halted:
        # It is in the way where it has come, too; but not of those that stand still themselves.
        waits = list({id(wait): wait for wait in [*waits, *graph.joined(rank)]}.values())
        waits = [wait for wait in waits if not halted.issuperset(wait.waiters)] or waits
    if rank in gone.own:
        sure = "certain" if state.exit is not None or snapshot.live else "likely"
        return Case(rank, "dead", sure, waits)
    if state.state == STOPPED:
        return Case(rank, "stopped", "certain", waits)
    if rank in gone.left or state.leaving:
        return Case(rank, "exhausted", "certain" if state.exit == 0 else "likely", waits)
    recorded = not state.closed and not state.blind
    if recorded and max(state.mute_s, state.gil_held_s) > _frozen_s(waits):
        return Case(rank, "stopped", "likely", waits)
    unseen = (state.blind and not state.unheard) or (state.closed and state.state != GONE)
    return Case(rank, "missing", "possible" if unseen else "certain", waits)


def _counts(
    snapshot: Snapshot,
    graph: Graph,
    case: Case,
    gone: Deaths,
    hang_after: float,
    halted: set[int],
) -> bool:
    """Tell whether somebody has waited long enough for a case to count."""
    if case.kind == "dead":
        return True
    reached = [wait for wait in graph.reach(case.waits) if wait.hung]
    hung = [wait for wait in reached if not halted.issuperset(wait.waiters)]
    ended = snapshot.ranks[case.rank].state == GONE
    if gone.first_s is None or not ended or case.kind == "exhausted":
        return bool(hung)
    # One process took this one with it, which may have been on its way: it is no cause unless it
    # had kept others waiting for long.
    return any(wait.age_s - gone.first_s >= hang_after for wait in hung)


def together(found: Iterable[Case]) -> list[list[Case]]:
    """Put ranks that are alike in kind, and waited for in the same place, together."""
    alike: dict[tuple[str, int], list[Case]] = {}
    for case in found:
        alike.setdefault((case.kind, id(case.longest)), []).append(case)
    return list(alike.values())
