"""The verdict ``desync``: members issue different calls, or the same calls in another order."""

from __future__ import annotations

from dataclasses import replace

from rankcall.analysis.snapshot import Snapshot
from rankcall.analysis.verdicts.disagreements import Disagreement, Side
from rankcall.analysis.verdicts.facts import Fact, Relation, call_of, ranks_of
from rankcall.analysis.verdicts.finding import Predicate
from rankcall.analysis.verdicts.kind import DisagreementKind


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
        return (
            "All members must issue the same calls in the same order: look for a branch, an early "
            "continue or a set that only some ranks take on the way to these lines."
        )


def _issued(snapshot: Snapshot, disagreement: Disagreement, side: Side) -> Fact:
    """Return the call of a side at the place where the sides differ."""
    call = replace(call_of(snapshot, side.row), seq=disagreement.seq)
    return Fact(Relation.ISSUED, ranks_of(snapshot, side.ranks), call)
