"""The verdict ``desync``: members issue different calls, or the same calls in another order."""

from __future__ import annotations

from rankcall.analysis.state.snapshot import Snapshot
from rankcall.analysis.verdicts.disagreements import Disagreement, Side
from rankcall.analysis.verdicts.finding import begin_sentence, count_of, name_ranks
from rankcall.analysis.verdicts.kinds import DisagreementVerdict


class Desync(DisagreementVerdict):
    """A member is some calls ahead or behind, or took another branch."""

    kind = "desync"
    order = 50
    predicate = "call different things"
    order_differs = True

    def summary(self, snapshot: Snapshot, found: Disagreement) -> str:
        """Write which ranks are out of step, and since which call."""
        first, last = found.sides[0], found.sides[-1]
        text = (
            f"{begin_sentence(name_ranks(snapshot, first.ranks))} "
            f"{'is' if len(first.ranks) == 1 else 'are'} out of step with "
            f"{name_ranks(snapshot, last.ranks)} since #{found.seq} of group "
            f"{snapshot.labels[found.group]}"
        )
        if not found.shift:
            return f"{text}: {_call(snapshot, first)} there, against {_call(snapshot, last)}."
        way = "ahead: skipped" if found.shift > 0 else "behind: issued"
        extra = "" if found.shift > 0 else " too many"
        count = count_of(abs(found.shift), "call")
        return f"{text}, {count} {way} {'it' if abs(found.shift) == 1 else 'them'}{extra}."

    def advice(self, found: Disagreement) -> str:
        """Write what makes ranks issue different calls."""
        return (
            "All members must issue the same calls in the same order: look for a branch, an early "
            "continue or a set that only some ranks take on the way to these lines."
        )


def _call(snapshot: Snapshot, side: Side) -> str:
    """Write a side's op with its line."""
    site = snapshot.site(int(snapshot.calls["site"][side.row]))
    return snapshot.op(side.row) + (f" ({site})" if site else "")
