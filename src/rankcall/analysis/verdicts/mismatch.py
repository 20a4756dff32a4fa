"""The verdict ``mismatch``: members issue the same call with different arguments."""

from __future__ import annotations

from dataclasses import replace

from rankcall.analysis.snapshot import Snapshot
from rankcall.analysis.verdicts.disagreements import SPLITS, Disagreement, Side, values_of
from rankcall.analysis.verdicts.facts import CallFact, Fact, Relation, call_of, ranks_of
from rankcall.analysis.verdicts.finding import Predicate
from rankcall.analysis.verdicts.kind import DisagreementKind


class Mismatch(DisagreementKind):
    """Members differ in the size, dtype, root or reduce op of one call, or in a message's size."""

    kind = "mismatch"
    order = 40
    predicate = Predicate("differs in one call", "differ in one call")
    order_differs = False

    def differences(self, snapshot: Snapshot, disagreement: Disagreement) -> list[Fact]:
        """Return what the smallest and the largest side passed, and what became of the call."""
        first, last = disagreement.sides[0], disagreement.sides[-1]
        through = _went_through(snapshot, disagreement)
        if SPLITS in disagreement.differing:
            calls = snapshot.calls[disagreement.rows]
            sums = [("sent", "in_bytes"), ("received", "out_bytes")]
            values = tuple((name, str(int(calls[column].sum()))) for name, column in sums)
            call, ranks = _call(snapshot, disagreement, first), ranks_of(snapshot, first.ranks)
            return [Fact(Relation.UNEQUAL_SPLITS, ranks, call, values=values), *through]
        relations = [Relation.PASSED, Relation.PASSED]
        if disagreement.message:
            relations = [Relation.SENDS, Relation.RECEIVES]
        return [
            Fact(
                relation,
                ranks_of(snapshot, side.ranks),
                _call(snapshot, disagreement, side),
                values=values_of(snapshot, disagreement, side),
            )
            for relation, side in zip(relations, (first, last), strict=True)
        ] + through

    def advice(self, disagreement: Disagreement) -> str:
        """Write which arguments to compare."""
        if disagreement.message:
            return "Make both ends the same size and dtype."
        if SPLITS in disagreement.differing:
            return (
                "Each rank must send as much as its peer expects: compare "
                "input_split_sizes with the output_split_sizes of the other members."
            )
        compare = (
            "All members of a group must pass the same: compare what the lines above are given."
        )
        if not disagreement.lines_differ:
            return compare
        return (
            f"{compare} If these lines are not two ways to one call, a rank has made a call more "
            "or less before: look for a branch, an early continue or a loop that only some ranks "
            "take."
        )


def _call(snapshot: Snapshot, disagreement: Disagreement, side: Side) -> CallFact:
    """Return a side's call, under the number at which the sides differ."""
    return replace(call_of(snapshot, side.row), seq=disagreement.seq)


def _went_through(snapshot: Snapshot, disagreement: Disagreement) -> list[Fact]:
    """Return that a call ended although its members differ.

    Dumps do not tell whether a call on the CPU succeeded.
    """
    if disagreement.open or snapshot.dumped:
        return []
    return [Fact(Relation.WENT_THROUGH, call=_call(snapshot, disagreement, disagreement.sides[-1]))]
