"""The verdict ``exhausted``: a rank left the loop while others still issue collectives."""

from __future__ import annotations

from collections.abc import Sequence

from rankcall.analysis.snapshot import GONE, RankState, Snapshot
from rankcall.analysis.verdicts.kind import CulpritVerdict
from rankcall.analysis.verdicts.suspects import Case, Suspect, Suspects
from rankcall.analysis.verdicts.wording import ago, verbs_for


class Exhausted(CulpritVerdict):
    """A rank's program ended well, or is ending: its data ran out before the others'."""

    kind = "exhausted"
    order = 30
    predicate = "left the loop"
    may_have_skipped = True

    def confidence(self, suspects: Suspects, suspect: Suspect) -> str | None:
        """Fit ranks whose program has ended well, or is ending."""
        if not suspects.has_left(suspect.rank) or suspect.state.failure:
            return None
        return "certain" if suspect.state.exit == 0 else "likely"

    def has_waited_long(self, suspects: Suspects, case: Case) -> bool:
        """Tell whether others wait for a rank. Another one's death did not end this one."""
        return bool(suspects.overdue(case.waits))

    def matter(self, snapshot: Snapshot, states: Sequence[RankState]) -> str:
        """Write whether the processes have ended, and when."""
        first, verbs = states[0], verbs_for(snapshot, len(states))
        if first.exit == 0:
            when = ago(snapshot, first.gone_s or 0.0)
            return f"left the loop and exited with code 0, {when}"
        if first.state == GONE:
            return f"left the loop and ended {ago(snapshot, first.gone_s or 0.0)}"
        return f"left the loop: {verbs.they} {verbs.be} closing down"

    def advice(self, snapshot: Snapshot, states: Sequence[RankState]) -> str:
        """Write how to train with uneven data."""
        return "Give every rank as many batches (drop_last, a sampler), or use a Join."
