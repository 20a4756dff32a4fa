"""What each rank did when: a small picture of a whole run.

It shows the same parts of a rank's time as its column does (see ``details``), by moments of the
run. Each op is cut at the borders of moments, so that a rank's moments add up to its column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankcall.analysis.arrivals import Floats, Ints
from rankcall.analysis.clocks import HostClock

MOST_ROWS = 512  # a page shows one in so many pixels
_MOST_CELLS = 1 << 16  # a picture of some 40 KiB
_MOST_BINS, _LEAST_BINS = 240, 60


@dataclass(frozen=True)
class RankSpans:
    """The ops of one ring, aligned ns: begin, end, and how long after its begin each one waited."""

    begin: Ints
    end: Ints
    waited: Ints


@dataclass(frozen=True)
class Timeline:
    """Shares of each moment, ``[row, moment]``. What is left of ``present`` is computing.

    A row is a rank of ``ranks``, which stands for the ``fold`` ranks from it on in their order.
    """

    bin_ns: float
    ranks: list[int]
    fold: int
    present: Floats  # from the rank's first op to the end of its last one
    waiting: Floats
    transfer: Floats


def aligned(clock: HostClock, begin: Ints, end: Ints, waited: Ints) -> RankSpans:
    """Return the spans of one ring on the clock of all hosts, by their begin."""
    begin, end = clock.align(begin), clock.align(end)
    order = np.argsort(begin, kind="stable")
    return RankSpans(begin[order], end[order], waited[order])


def timeline(
    compute_ms: Mapping[int, float], rings_of: Callable[[int], Sequence[RankSpans]]
) -> Timeline | None:
    """Draw the ops of some ranks; None if no op has a length.

    Args:
        compute_ms: By rank, for how long it computed. Of ranks that share a row, the one that
            computes longest is drawn: the others wait for it.
        rings_of: Returns the ops of each ring of a rank.
    """
    ranks = sorted(compute_ms)
    fold = max(1, -(-len(ranks) // MOST_ROWS))
    shares = [ranks[at : at + fold] for at in range(0, len(ranks), fold)]
    drawn = [max(share, key=lambda rank: compute_ms[rank]) for share in shares]
    rings = [[ring for ring in rings_of(rank) if len(ring.begin)] for rank in drawn]
    begin = min((int(ring.begin[0]) for row in rings for ring in row), default=0)
    end = max((int(ring.end.max()) for row in rings for ring in row), default=0)
    if end <= begin:
        return None
    bins = int(np.clip(_MOST_CELLS // len(drawn), _LEAST_BINS, _MOST_BINS))
    edges = np.linspace(begin, end, bins + 1)
    rows = [_row(row, edges) for row in rings]
    present, waiting, busy = (np.stack(part) for part in zip(*rows, strict=True))
    return Timeline((end - begin) / bins, drawn, fold, present, waiting, busy - waiting)


def _row(rings: Sequence[RankSpans], edges: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the shares of the moments in which a rank was there, waited, and was in any op."""
    width = edges[1] - edges[0]
    present, waiting, busy = (np.zeros(len(edges) - 1) for _ in range(3))
    for ring in rings:
        busy += _in_each(ring.begin, ring.end, edges)
        waiting += _in_each(ring.begin, ring.begin + ring.waited, edges)
        present += _in_each(ring.begin[:1], ring.end.max(keepdims=True), edges)
    busy = np.minimum(busy / width, 1.0)
    return np.clip(present / width, busy, 1.0), np.minimum(waiting / width, busy), busy


def _in_each(begin: Ints, end: Ints, edges: Floats) -> Floats:
    """Return how much of each bin intervals cover together; ``begin`` ascends."""
    reach = np.maximum.accumulate(end)
    starts = begin.astype(np.float64)
    starts[1:] = np.maximum(starts[1:], reach[:-1])
    lasts = end - starts
    some = lasts > 0
    if not some.any():
        return np.zeros(len(edges) - 1)
    starts, lasts = starts[some], lasts[some]
    before = np.concatenate([[0.0], np.cumsum(lasts)])
    at = np.searchsorted(starts, edges, side="right") - 1
    known = np.maximum(at, 0)
    inside = np.clip(edges - starts[known], 0.0, lasts[known])
    covered: npt.NDArray[np.float64] = np.where(at < 0, 0.0, before[known] + inside)
    return np.diff(covered)
