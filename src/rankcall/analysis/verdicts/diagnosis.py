"""A verdict that this process made itself, with the snapshot, which shows how the job goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from rankcall.analysis.pace import pace
from rankcall.analysis.snapshot import Snapshot, rank_positions, unfinished
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.lasting import patience
from rankcall.analysis.verdicts.no_progress import silence_of
from rankcall.analysis.verdicts.verdict import Going, Kept, Lasting, Verdict
from rankcall.errors import warn_renamed
from rankcall.problems import texts


@dataclass(frozen=True)
class Diagnosis(Verdict):
    """A verdict with the snapshot that it rests on, from which a reader can judge again."""

    snapshot: Snapshot = field(kw_only=True)

    @classmethod
    def of(
        cls,
        run: str,
        snapshot: Snapshot,
        findings: list[Finding],
        hang_after: float,
        kept: Sequence[Kept] = (),
    ) -> Diagnosis:
        """Return a verdict with the positions of the ranks, and what is not known of them."""
        return cls(
            run,
            findings,
            hang_after,
            rank_positions(snapshot),
            texts(snapshot.problems),
            list(kept),
            snapshot=snapshot,
        )

    @property
    def verdict(self) -> str:
        """Deprecated: ``kind``."""
        warn_renamed("Diagnosis.verdict", "Diagnosis.kind")
        return self.kind

    @cached_property
    def going(self) -> Going | None:
        """How the job goes. Measured when a reader first asks: most readers of a hang do not."""
        if not self.ranks:
            return None
        return Going(
            self.snapshot.live,
            pace(self.snapshot),
            silence_of(self.snapshot, self.hang_after),
            _longest(self.snapshot, self.hang_after),
        )


def _longest(snapshot: Snapshot, hang_after: float) -> Lasting | None:
    ages = np.where(unfinished(snapshot.calls), snapshot.calls["age_s"], -np.inf)
    if not len(ages) or ages.max() < 0:
        return None
    allowed = float(patience(snapshot, hang_after)[ages.argmax()])
    return Lasting(float(ages.max()), allowed)
