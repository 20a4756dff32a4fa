"""The verdict ``mismatch``: members issue the same call with different arguments."""

from __future__ import annotations

from rankcall.analysis.state.snapshot import Snapshot
from rankcall.analysis.verdicts.disagreements import Disagreement, values
from rankcall.analysis.verdicts.finding import begin_sentence, name_ranks
from rankcall.analysis.verdicts.kinds import DisagreementVerdict


class Mismatch(DisagreementVerdict):
    """Members differ in the size, dtype, root or reduce op of one call, or in a message's size."""

    kind = "mismatch"
    order = 40
    predicate = "differ in one call"
    order_differs = False

    def summary(self, snapshot: Snapshot, found: Disagreement) -> str:
        """Write which ranks differ, and in which fields."""
        first, last = found.sides[0], found.sides[-1]
        place = f"#{found.seq} of group {snapshot.labels[found.group]}"
        mine, theirs = (values(snapshot, found, side) for side in (first, last))
        if found.message:
            return (
                f"rank {first.ranks[0]} sends {mine} and rank {last.ranks[0]} receives {theirs}, "
                f"in message {place}."
            )
        fields = " and ".join(name.replace("_", " ") for name in found.differing)
        done = "" if found.open else " It went through all the same: the results are wrong."
        return (
            f"{begin_sentence(name_ranks(snapshot, first.ranks))} and "
            f"{name_ranks(snapshot, last.ranks)} differ in {fields} in "
            f"{snapshot.op(last.row)} {place}: {mine} against {theirs}.{done}"
        )

    def advice(self, found: Disagreement) -> str:
        """Write which arguments to compare."""
        if found.message:
            return "Make both ends the same size."
        return "All members of a group must pass the same: compare what the lines above are given."
