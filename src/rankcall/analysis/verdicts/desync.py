"""The verdict ``desync``: members issue different calls, or the same calls in another order."""

from __future__ import annotations

from rankcall.analysis.snapshot import Snapshot
from rankcall.analysis.verdicts.disagreements import Disagreement, Shift, Side
from rankcall.analysis.verdicts.kind import DisagreementVerdict
from rankcall.analysis.verdicts.wording import begin_sentence, count_of, name_group, name_ranks


class Desync(DisagreementVerdict):
    """A member is some calls ahead or behind, or took another branch."""

    kind = "desync"
    order = 50
    predicate = "call different things"
    order_differs = True

    def summary(self, snapshot: Snapshot, disagreement: Disagreement) -> str:
        """Write which ranks differ, at which call, and what each of them issued there."""
        first, last = disagreement.sides[0], disagreement.sides[-1]
        text = (
            f"{begin_sentence(name_ranks(snapshot, first.ranks))} issued {_call(snapshot, first)} "
            f"as #{disagreement.seq} of group {name_group(snapshot, disagreement.group)}, against "
            f"{_call(snapshot, last)} of {name_ranks(snapshot, last.ranks)}."
        )
        return (
            f"{text} {_shift(disagreement.shift, len(first.ranks))}" if disagreement.shift else text
        )

    def advice(self, disagreement: Disagreement) -> str:
        """Write what makes ranks issue different calls."""
        return (
            "All members must issue the same calls in the same order: look for a branch, an early "
            "continue or a set that only some ranks take on the way to these lines."
        )


def _shift(shift: Shift, count: int) -> str:
    """Write how the calls are out of step from there on, and what likely made them so."""
    its, they = ("its", "it") if count == 1 else ("their", "they")
    calls = count_of(abs(shift.calls), "call")
    same = f"In {shift.shown_by} calls since #{shift.since}, {its} calls were those of the others"
    if shift.both_ways:
        return f"{same} {calls} away: {they} likely skipped {calls} or issued {calls} too many."
    if shift.calls > 0:
        return f"{same} {calls} later: {they} likely skipped {calls} before."
    return f"{same} {calls} earlier: {they} likely issued {calls} too many before."


def _call(snapshot: Snapshot, side: Side) -> str:
    """Write a side's op with its line."""
    site = snapshot.shown_site(int(snapshot.calls["site"][side.row]))
    return snapshot.op(side.row) + (f" ({site})" if site else "")
