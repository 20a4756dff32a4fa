"""The verdict ``idle``: the ranks wait for work, like a server between two requests.

A program declares such a wait: ``with rankcall.expect(math.inf, "requests")``. Without that, the
first long wait at a line looks like a hang. If it passes, the watcher notes how long it
lasted, and a later wait at that line is more likely idle than hung.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from rankcall.analysis.pace import quiet_s
from rankcall.analysis.snapshot import ALIVE, RankState, Snapshot, unfinished
from rankcall.analysis.verdicts.evidence import HangEvidence
from rankcall.analysis.verdicts.facts import Fact, Relation, common_site, hosts_of, ranks_of
from rankcall.analysis.verdicts.finding import Finding, Predicate
from rankcall.analysis.verdicts.kind import CulpritKind
from rankcall.analysis.verdicts.sentences import evidence as written
from rankcall.analysis.verdicts.suspects import Case, Suspect, Suspects
from rankcall.analysis.verdicts.wait import Wait
from rankcall.run.frames import code_place

# A wait may last so many times longer than the longest one that passed at that line.
_LONGER = 10.0


class Idle(CulpritKind):
    """Nothing is wrong: a rank waits for work from outside the job, and the others wait for it."""

    kind = "idle"
    order = 68
    stops = False
    is_fault = False
    predicate = Predicate("waits for work", "wait for work")

    def confidence(self, suspects: Suspects, suspect: Suspect) -> str | None:
        """Fit ranks that run, and for which others have waited as long at the same lines before."""
        state, overdue = suspect.state, suspects.overdue(suspect.waits)
        if state.state != ALIVE or state.blind or state.closed or state.leaving or not overdue:
            return None
        if code_place(state.stack).inside:  # a data loader, or a function that waits for ranks
            return None
        snapshot = suspects.snapshot
        return "likely" if all(_has_ended_before(snapshot, wait) for wait in overdue) else None

    def if_unexplained(self, evidence: HangEvidence) -> Iterator[Finding]:
        """Yield a finding if ranks declared that they wait for work, and all others wait, too."""
        snapshot = evidence.snapshot
        declared = [state for state in snapshot.ranks if state.waits_for_work]
        seconds = _idle_s(snapshot)
        if not declared or not snapshot.live or seconds < evidence.hang_after:
            return
        ranks = tuple(state.rank for state in declared)
        others = tuple(
            state.rank for state in snapshot.ranks if not state.waits_for_work and not state.blind
        )
        waits = Fact(
            Relation.WAITS_FOR_WORK,
            ranks_of(snapshot, ranks),
            others=ranks_of(snapshot, others) if others else None,
            values=(("what", declared[0].expects),),
            number=seconds,
            unit="s",
        )
        yield self.finding(
            ranks,
            victims=others,
            hosts=hosts_of(snapshot, ranks),
            since_s=seconds,
            said=[waits],
            live=snapshot.live,
        )

    def state(self, snapshot: Snapshot, states: Sequence[RankState], held_s: float) -> Fact:
        """Return why this is no hang."""
        ranks = ranks_of(snapshot, [state.rank for state in states])
        return Fact(Relation.NOT_COME_AS_BEFORE, ranks)

    def advice(self, snapshot: Snapshot, states: Sequence[RankState]) -> str:
        """Write how to declare the wait, and what to do if it is not meant."""
        first = states[0]
        on = f" on {first.host}" if first.host else ""
        return (
            f"If rank {first.rank} waits for work there, declare it: with "
            'rankcall.expect(math.inf, "requests"). If it should be at work, see what it does: '
            f"rankcall diagnose --stacks, or py-spy dump --pid {first.pid}{on}."
        )

    def _of_cases(self, evidence: HangEvidence, cases: Sequence[Case]) -> Finding:
        finding, snapshot = super()._of_cases(evidence, cases), evidence.snapshot
        sites = {_line(snapshot, wait) for case in cases for wait in case.waits}
        before = [
            Fact(
                Relation.EARLIER_WAIT_PASSED,
                values=(("line", site),),
                number=snapshot.waited_before[site],
                unit="s",
            )
            for site in sorted(sites & snapshot.waited_before.keys())
        ]
        lines = (*written(before, snapshot.live), *finding.evidence)
        return replace(finding, evidence=lines, facts=(*finding.facts, *before))


def _has_ended_before(snapshot: Snapshot, wait: Wait) -> bool:
    """Tell whether a wait at the same line has passed, and was not much shorter."""
    before = snapshot.waited_before.get(_line(snapshot, wait), 0.0)
    return wait.age_s <= _LONGER * before


def _line(snapshot: Snapshot, wait: Wait) -> str:
    return snapshot.shown_site(common_site(snapshot, wait))


def _idle_s(snapshot: Snapshot) -> float:
    """Return for how long every rank has waited: in a call, or for work. 0 if one is busy."""
    calls, quiet = snapshot.calls, quiet_s(snapshot)
    in_call = np.zeros(len(snapshot.ranks), bool)
    in_call[calls["rank"][unfinished(calls)]] = True
    known = [state for state in snapshot.ranks if not state.blind]
    if any(state.state != ALIVE for state in known):
        return 0.0
    if not all(state.waits_for_work or in_call[state.rank] for state in known):
        return 0.0
    return float(min((quiet[state.rank] for state in known), default=0.0))
