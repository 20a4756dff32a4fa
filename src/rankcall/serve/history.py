"""Keep the figures of the last minutes, of which the live page draws its curves."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rankcall.analysis.recent_figures import Figures

KEPT_S = 300.0  # the width of the page's charts


@dataclass(frozen=True)
class Sample:
    """The figures at one moment; ``busbw``: in GB/s, by op, group and size."""

    epoch_s: float
    waiting: float | None
    busbw: dict[tuple[str, str, int], float]


@dataclass
class History:
    """The samples of the last minutes, since somebody has looked. A new run begins a new one."""

    samples: deque[Sample] = field(default_factory=deque)
    _run: str = ""

    def add(self, run: str, epoch_s: float, figures: Figures | None) -> None:
        """Add a moment. Without figures, there is nothing to add."""
        if run != self._run:
            self._run = run
            self.samples.clear()
        while self.samples and not 0 <= epoch_s - self.samples[0].epoch_s <= KEPT_S:
            self.samples.popleft()
        if figures is None:
            return
        rates = {
            (row.op, row.group, row.bucket): row.busbw_gbps
            for row in figures.rows
            if row.busbw_gbps is not None and 0 < row.busbw_gbps < float("inf")
        }
        self.samples.append(Sample(epoch_s, figures.waiting, rates))
