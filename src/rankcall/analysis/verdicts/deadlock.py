"""The verdict ``deadlock``: ranks wait for each other in a circle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rankcall.analysis.verdicts.evidence import HangEvidence
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.kind import SHOWN, Verdict
from rankcall.analysis.verdicts.wait_graph import Cycle, Wait
from rankcall.analysis.verdicts.wording import (
    begin_sentence,
    common_site,
    hosts_of,
    lines_of_site,
    name_ranks,
    name_wait,
)


class Deadlock(Verdict):
    """Each rank of a circle waits for the next one, in another group or another message."""

    kind = "deadlock"
    order = 60
    predicate = "wait for each other"

    def in_hang(self, evidence: HangEvidence) -> Iterator[Finding]:
        """Yield one finding for each circle."""
        for cycle in evidence.cycles:
            yield self._of_cycle(evidence, cycle)

    def _of_cycle(self, evidence: HangEvidence, cycle: Cycle) -> Finding:
        snapshot = evidence.snapshot
        longest = max(cycle.waits, key=lambda wait: wait.age_s)
        steps = [
            f"{name_ranks(snapshot, _inside(cycle, wait.waiters))} in {name_wait(snapshot, wait)}, "
            f"for {name_ranks(snapshot, _inside(cycle, wait.absent))}"
            for wait in cycle.waits
        ]
        name = begin_sentence(name_ranks(snapshot, cycle.ranks))
        return self.finding(
            cycle.ranks,
            victims=tuple(sorted(evidence.graph.victims(cycle.waits) - set(cycle.ranks))),
            hosts=hosts_of(snapshot, cycle.ranks),
            group=snapshot.labels[longest.group],
            seq=longest.seq,
            op=snapshot.op(int(longest.rows[0])),
            **lines_of_site(snapshot, common_site(snapshot, longest)),
            since_s=longest.age_s,
            confidence="likely" if any(wait.soft for wait in cycle.waits) else "certain",
            summary=f"{name} wait for each other: "
            f"{_different_tags(cycle.waits) or '; '.join(steps[:SHOWN])}.",
            evidence=tuple(steps),
            advice=_advice(cycle),
        )


def _inside(cycle: Cycle, ranks: Sequence[int]) -> list[int]:
    return [rank for rank in ranks if rank in cycle.ranks] or list(ranks)


def _different_tags(waits: Sequence[Wait]) -> str:
    """Write which two tags do not match, if the ends of a channel use different ones."""
    channels = [wait.channel for wait in waits if wait.channel is not None]
    for lower in channels:
        for higher in channels:
            if lower[:2] == higher[:2] and lower.tag < higher.tag:
                tags = f"tag {lower.tag} and tag {higher.tag}"
                return f"{tags} do not match, from rank {lower.source} to rank {lower.target}"
    return ""


def _advice(cycle: Cycle) -> str:
    if any(wait.channel is not None for wait in cycle.waits):
        return (
            "Let one of them receive first, or issue both ends at once (batch_isend_irecv); each "
            "send needs a receive with the same tag."
        )
    return "Let all ranks use the groups in the same order."
