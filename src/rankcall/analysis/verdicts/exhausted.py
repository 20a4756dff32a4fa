"""The verdict ``exhausted``: a rank left the loop while others still issue collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rankcall.analysis.snapshot import GONE, RankState, Snapshot
from rankcall.analysis.verdicts.evidence import HangEvidence
from rankcall.analysis.verdicts.facts import Fact, Relation, ranks_of
from rankcall.analysis.verdicts.finding import Finding, Predicate
from rankcall.analysis.verdicts.kind import CulpritKind
from rankcall.analysis.verdicts.suspects import Case, Suspect, Suspects


class Exhausted(CulpritKind):
    """A rank's program ended well, or is ending: its data ran out before the others'."""

    kind = "exhausted"
    order = 30
    predicate = Predicate("left the loop", "left the loop")
    may_have_skipped = True

    def confidence(self, suspects: Suspects, suspect: Suspect) -> str | None:
        """Fit ranks whose program has ended well, or is ending."""
        if not suspects.has_left(suspect.rank) or suspect.state.failure:
            return None
        return "certain" if suspect.state.exit == 0 else "likely"

    def has_waited_long(self, suspects: Suspects, case: Case) -> bool:
        """Tell whether others wait for a rank. Another one's death did not end this one."""
        return bool(suspects.overdue(case.waits))

    def if_unexplained(self, evidence: HangEvidence) -> Iterator[Finding]:
        """Yield ranks that ended well, if others then lost their connections to them."""
        before = evidence.exits.before & evidence.exits.left
        # Without another launcher's store, rank 0 hosts the job's.
        ranks = sorted(before & {0} or before)
        if ranks:
            yield self.before_others_failed(
                evidence,
                ranks,
                f"Keep rank {ranks[0]} until all ranks are done: let all ranks come to a barrier "
                "before it returns.",
            )

    def state(self, snapshot: Snapshot, states: Sequence[RankState], held_s: float) -> Fact:
        """Return whether the processes have ended, and when."""
        first, ranks = states[0], ranks_of(snapshot, [state.rank for state in states])
        end = "exited" if first.exit == 0 else "ended" if first.state == GONE else "closing"
        seconds = (first.gone_s or 0.0) if end != "closing" else None
        values = (("end", end),)
        return Fact(Relation.LEFT_LOOP, ranks, values=values, number=seconds, unit="s")

    def advice(self, snapshot: Snapshot, states: Sequence[RankState]) -> str:
        """Write how to train with uneven data."""
        return (
            "Give every rank as many batches (drop_last, a sampler), or use a Join; if it stopped "
            "on purpose, let all ranks stop at the same step (join.stop)."
        )
