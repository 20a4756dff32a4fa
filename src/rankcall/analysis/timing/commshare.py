"""The share of each step that a rank spends in communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankcall.analysis.timing.extract import MISSING, Columns

Floats = npt.NDArray[np.float64]


@dataclass
class RankShare:
    """One ring's time in communication. A step lasts to the beginning of the next one's ops."""

    rank: int
    attempt: int
    busy_ns: float
    span_ns: float
    steps: npt.NDArray[np.int64]
    step_share: Floats
    step_ns: Floats

    @property
    def share(self) -> float | None:
        """Of the time from its first op to the end of its last."""
        return self.busy_ns / self.span_ns if self.span_ns > 0 else None


@dataclass(frozen=True)
class StepShare:
    """One step: the median over the ranks."""

    step: int
    share: float
    ms: float


def rank_share(rank: int, attempt: int, columns: Columns) -> RankShare:
    """Measure one ring: the union of the times that its ops were in flight."""
    done = columns["completed_ns"] != MISSING
    start, end, step = (columns[n] for n in ("started_ns", "completed_ns", "step"))
    if not done.all():
        start, end, step = start[done], end[done], step[done]
    if not len(start):
        nothing = np.zeros(0)
        return RankShare(rank, attempt, 0.0, 0.0, nothing.astype(np.int64), nothing, nothing)
    if np.any(start[1:] < start[:-1]):
        order = np.argsort(start, kind="stable")
        start, end, step = start[order], end[order], step[order]
    reach = np.maximum.accumulate(end)
    busy = end - start
    busy[1:] = end[1:] - np.maximum(start[1:], reach[:-1])
    busy = np.maximum(busy, 0).astype(np.float64)
    span = float(reach[-1] - start[0])
    return RankShare(rank, attempt, float(busy.sum()), span, *_by_step(start, reach, step, busy))


def _by_step(
    start: npt.NDArray[np.int64],
    reach: npt.NDArray[np.int64],
    step: npt.NDArray[np.int64],
    busy: Floats,
) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
    """Cut at each new step; what runs over the cut counts to the step that issued it."""
    # A thread that lags may note an older step once more: steps only go up.
    step = np.maximum.accumulate(step)
    first = np.concatenate([[0], np.flatnonzero(np.diff(step)) + 1])
    if len(first) == 1:
        return step[:0], busy[:0], busy[:0]
    inside = np.add.reduceat(busy, first)
    lasts = np.diff(np.concatenate([start[first], reach[-1:]])).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(lasts > 0, np.minimum(inside / lasts, 1.0), 1.0)
    return step[first], share, lasts


def median_share(shares: Sequence[RankShare]) -> float | None:
    """Return the median over the ranks of their share of the whole run."""
    known = [each.share for each in shares if each.share is not None]
    return float(np.median(known)) if known else None


def by_step(shares: Sequence[RankShare]) -> list[StepShare]:
    """Return each step's median over the ranks of the last attempt that has steps."""
    last = max((each.attempt for each in shares if len(each.steps)), default=None)
    mine = [each for each in shares if each.attempt == last and len(each.steps)]
    if not mine:
        return []
    if all(np.array_equal(each.steps, mine[0].steps) for each in mine):
        share = np.median([each.step_share for each in mine], axis=0)
        lasts = np.median([each.step_ns for each in mine], axis=0)
        return _listed(mine[0].steps, share, lasts)
    steps = np.concatenate([each.steps for each in mine])
    order = np.argsort(steps, kind="stable")
    pieces = np.split(order, np.flatnonzero(np.diff(steps[order])) + 1)
    share = np.concatenate([each.step_share for each in mine])
    lasts = np.concatenate([each.step_ns for each in mine])
    return _listed(
        steps[[piece[0] for piece in pieces]],
        np.array([np.median(share[piece]) for piece in pieces]),
        np.array([np.median(lasts[piece]) for piece in pieces]),
    )


def _listed(steps: npt.NDArray[np.int64], share: Floats, lasts: Floats) -> list[StepShare]:
    rows = zip(steps.tolist(), share.tolist(), (lasts / 1e6).tolist(), strict=True)
    return [StepShare(*row) for row in rows]
