"""The verdict ``desync``: members issue different calls, or the same calls in another order."""

from __future__ import annotations

from dataclasses import replace

from rankcall.analysis.snapshot import Snapshot
from rankcall.analysis.verdicts.disagreements import Disagreement, Side
from rankcall.analysis.verdicts.facts import Fact, Relation, call_of, ranks_of
from rankcall.analysis.verdicts.finding import Predicate
from rankcall.analysis.verdicts.kind import DisagreementKind, call_of_side


class Desync(DisagreementKind):
    """A member is some calls ahead or behind, or took another branch."""

    kind = "desync"
    order = 50
    predicate = Predicate("calls something else", "call different things")
    order_differs = True

    def differences(self, snapshot: Snapshot, disagreement: Disagreement) -> list[Fact]:
        """Return what the smallest and the largest side issued, and the shift between them."""
        facts = [
            _issued(snapshot, disagreement, side)
            for side in (disagreement.sides[0], disagreement.sides[-1])
        ]
        loop = disagreement.loop
        if loop is not None:
            others = [
                rank
                for side in disagreement.sides
                if side.ranks != loop.ranks
                for rank in side.ranks
            ]
            facts.append(
                Fact(
                    Relation.LOOPED_AGAIN,
                    ranks_of(snapshot, loop.ranks),
                    call_of(snapshot, loop.row),
                    ranks_of(snapshot, sorted(others)),
                    number=loop.turns,
                    unit="turns",
                    confidence="likely",
                )
            )
        shift = disagreement.shift
        if shift is not None:
            values = [("since", str(shift.since)), ("shown_by", str(shift.shown_by))]
            values += [("both_ways", "yes")] if shift.both_ways else []
            facts.append(
                Fact(
                    Relation.SHIFTED,
                    facts[0].ranks,
                    values=tuple(values),
                    number=shift.calls,
                    unit="calls",
                    confidence="likely",
                )
            )
        return facts

    def advice(self, disagreement: Disagreement) -> str:
        """Write what makes ranks issue different calls."""
        if disagreement.in_join:
            return (
                "A rank without inputs does not answer the program's own collectives, such as "
                'those of a validation: use Join(..., on_exhausted="replay"), or leave them to '
                "after the block."
            )
        if disagreement.loop is not None:
            return (
                "Give every rank as many batches (drop_last, a sampler), or use a Join; if the "
                "inputs are even, look for a break or a continue that only some ranks take."
            )
        return (
            "All members must issue the same calls in the same order: look for a branch, an early "
            "continue or a set that only some ranks take on the way to these lines."
        )


def _issued(snapshot: Snapshot, disagreement: Disagreement, side: Side) -> Fact:
    """Return the call of a side at the place where the sides differ."""
    call = replace(call_of_side(snapshot, disagreement, side), seq=disagreement.seq)
    return Fact(Relation.ISSUED, ranks_of(snapshot, side.ranks), call)
