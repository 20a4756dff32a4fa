"""The ranks that others wait for and that wait for no other rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rankcall.analysis.snapshot import ALIVE, GONE, STOPPED, RankState, Snapshot
from rankcall.analysis.verdicts.ends import FROZEN_S, FROZEN_SHARE, Exits, ended_ago_s
from rankcall.analysis.verdicts.wait import Wait
from rankcall.analysis.verdicts.wait_graph import WaitGraph


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
        """Return the overdue waits behind some waits, but not those of halted ranks alone.

        A call that only halted ranks are in may be over: they note no more ends. It is not if one
        of them still runs, and a rank that goes on has not come to it: a tracer may hold the thread
        that has the GIL.
        """
        reached = [wait for wait in self.graph.reach(waits) if wait.hung]
        return [
            wait
            for wait in reached
            if not self.halted.issuperset(wait.waiters)
            or (self._runs(wait.waiters) and not self.halted.issuperset(wait.absent))
        ]

    def _runs(self, ranks: Iterable[int]) -> bool:
        return any(self.snapshot.ranks[rank].state == ALIVE for rank in ranks)


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
        return min(wait.age_s, ended_ago_s(state) if ended else state.silent_s)


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
