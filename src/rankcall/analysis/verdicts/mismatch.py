"""The verdict ``mismatch``: members issue the same call with different arguments."""

from __future__ import annotations

from rankcall.analysis.snapshot import Snapshot
from rankcall.analysis.verdicts.disagreements import SPLITS, Disagreement, values
from rankcall.analysis.verdicts.kind import DisagreementVerdict
from rankcall.analysis.verdicts.wording import begin_sentence, name_group, name_ranks


class Mismatch(DisagreementVerdict):
    """Members differ in the size, dtype, root or reduce op of one call, or in a message's size."""

    kind = "mismatch"
    order = 40
    predicate = "differ in one call"
    order_differs = False

    def summary(self, snapshot: Snapshot, disagreement: Disagreement) -> str:
        """Write which ranks differ, and in which fields."""
        first, last = disagreement.sides[0], disagreement.sides[-1]
        place = f"#{disagreement.seq} of group {name_group(snapshot, disagreement.group)}"
        if SPLITS in disagreement.differing:
            calls = snapshot.calls[disagreement.rows]
            sent, received = int(calls["in_bytes"].sum()), int(calls["out_bytes"].sum())
            return (
                f"{begin_sentence(name_ranks(snapshot, first.ranks))} send {sent:,} bytes in all "
                f"in all_to_all {place}, and expect to receive {received:,}: their split sizes do "
                f"not add up.{_consequence(snapshot, disagreement)}"
            )
        mine, theirs = (values(snapshot, disagreement, side) for side in (first, last))
        if disagreement.message:
            return (
                f"Rank {first.ranks[0]} sends {mine} and rank {last.ranks[0]} receives {theirs}, "
                f"in message {place}.{_consequence(snapshot, disagreement)}"
            )
        fields = " and ".join(name.replace("_", " ") for name in disagreement.differing)
        then = _consequence(snapshot, disagreement)
        return (
            f"{begin_sentence(name_ranks(snapshot, first.ranks))} and "
            f"{name_ranks(snapshot, last.ranks)} differ in {fields} in "
            f"{snapshot.op(last.row)} {place}: {mine} against {theirs}.{then}"
        )

    def advice(self, disagreement: Disagreement) -> str:
        """Write which arguments to compare."""
        if disagreement.message:
            return "Make both ends the same size and dtype."
        if SPLITS in disagreement.differing:
            return (
                "Each rank must send as much as its peer expects: compare "
                "input_split_sizes with the output_split_sizes of the other members."
            )
        return "All members of a group must pass the same: compare what the lines above are given."


def _consequence(snapshot: Snapshot, disagreement: Disagreement) -> str:
    """Write what became of a call that ended although its members differ.

    Dumps do not tell whether a call on the CPU succeeded.
    """
    if disagreement.open or snapshot.dumped:
        return ""
    wrong = (
        "the received data is wrong or incomplete"
        if disagreement.message
        else "the results are wrong"
    )
    return f" It went through all the same: {wrong}."
