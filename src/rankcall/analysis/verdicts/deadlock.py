"""The verdict ``deadlock``: ranks wait for each other in a circle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rankcall.analysis.snapshot import Snapshot
from rankcall.analysis.verdicts.evidence import HangEvidence
from rankcall.analysis.verdicts.facts import (
    Fact,
    Relation,
    call_of_wait,
    fields_of_wait,
    hosts_of,
    ranks_of,
)
from rankcall.analysis.verdicts.finding import Finding, Predicate
from rankcall.analysis.verdicts.kind import Kind
from rankcall.analysis.verdicts.wait_graph import Cycle, Wait


class Deadlock(Kind):
    """Each rank of a circle waits for the next one, in another group or another message."""

    kind = "deadlock"
    order = 60
    predicate = Predicate("waits for itself", "wait for each other")

    def in_hang(self, evidence: HangEvidence) -> Iterator[Finding]:
        """Yield one finding for each circle."""
        for cycle in evidence.cycles:
            yield self._of_cycle(evidence, cycle)

    def _of_cycle(self, evidence: HangEvidence, cycle: Cycle) -> Finding:
        snapshot = evidence.snapshot
        longest = max(cycle.waits, key=lambda wait: wait.age_s)
        steps = [
            Fact(
                Relation.WAITS_FOR,
                ranks_of(snapshot, _inside(cycle, wait.waiters)),
                call_of_wait(snapshot, wait),
                ranks_of(snapshot, _inside(cycle, wait.absent)),
            )
            for wait in cycle.waits
        ]
        circle = Fact(Relation.WAIT_FOR_EACH_OTHER, ranks_of(snapshot, cycle.ranks))
        tags = _different_tags(snapshot, cycle.waits)
        return self.finding(
            cycle.ranks,
            victims=tuple(sorted(evidence.graph.victims(cycle.waits) - set(cycle.ranks))),
            hosts=hosts_of(snapshot, cycle.ranks),
            confidence="likely" if any(wait.soft for wait in cycle.waits) else "certain",
            said=[circle, *(tags or steps)],
            shown=steps,
            live=snapshot.live,
            advice=_advice(cycle),
            **fields_of_wait(snapshot, longest),
        )


def _inside(cycle: Cycle, ranks: Sequence[int]) -> list[int]:
    return [rank for rank in ranks if rank in cycle.ranks] or list(ranks)


def _different_tags(snapshot: Snapshot, waits: Sequence[Wait]) -> list[Fact]:
    """Return that two tags do not match, if the ends of a channel use different ones."""
    channels = [wait.channel for wait in waits if wait.channel is not None]
    for lower in channels:
        for higher in channels:
            if lower[:2] == higher[:2] and lower.tag < higher.tag:
                ends = (ranks_of(snapshot, [rank]) for rank in (lower.source, lower.target))
                source, target = ends
                tags = (("tags", f"{lower.tag} {higher.tag}"),)
                return [Fact(Relation.TAGS_DIFFER, source, others=target, values=tags)]
    return []


def _advice(cycle: Cycle) -> str:
    if any(wait.channel is not None for wait in cycle.waits):
        return (
            "Let one of them receive first, or issue both ends at once (batch_isend_irecv); each "
            "send needs a receive with the same tag."
        )
    return "Let all ranks use the groups in the same order."
