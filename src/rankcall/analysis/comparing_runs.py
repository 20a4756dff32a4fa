"""What differs between two runs, or between two parts of one, beyond their own noise.

Calls that follow each other are alike: a step that is slow because of the network is followed by
another one. A test that took every call as evidence of its own would find differences between any
two runs. So each run is cut into 48 parts of equal length, and only the medians of parts are
compared, by the test of Mann and Whitney, which needs no assumption about how times are spread.
Of all that is tested, a difference is reported if all of these hold:

* chance alone would show one as large in one of a thousand comparisons, whatever the number of
  figures that were tested (Holm's correction);
* nine of ten parts of one run are above nine of ten of the other;
* it is at least 5 %, and 100 microseconds.

This says that the runs differ, and not why: another machine or another day is a difference, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rankcall.run.load import Progress, Run

PARTS = 48
_LEAST_PARTS = 12  # with a median; with fewer, a figure is not compared
_LEAST_CALLS = 3  # of a part; else it has no median
_CHANCE = 0.001
_LEAST_SHARE, _LEAST_S = 0.05, 1e-4
_OUTER = 0.1  # of the parts may be on the other run's side
_MARGIN = 8  # parts on each side of a change

Floats = npt.NDArray[np.float64]


class Figure(NamedTuple):
    """What is compared.

    ``kind``: ``step`` (the time from step to step), ``before`` (the time of a rank between the end
    of its last call and this one: its own work) or ``in`` (the time of the rank that is in the call
    for the shortest time: the transfer, without the waiting). ``rank`` is -1 for all ranks.
    """

    kind: str
    op: str = ""
    line: str = ""
    rank: int = -1


@dataclass(frozen=True)
class PartMedians:
    """The medians of each part of a run, in s; NaN: too few calls. ``steps``: at each begin."""

    parts: Mapping[Figure, Floats]
    steps: Sequence[int]

    def between(self, first: int, last: int) -> PartMedians:
        """Return some of the parts."""
        cut = {figure: values[first:last] for figure, values in self.parts.items()}
        return PartMedians(cut, self.steps[first:last])


@dataclass(frozen=True)
class Difference:
    """A figure that differs: its medians, in s, and how likely chance alone shows as much."""

    figure: Figure
    before_s: float
    after_s: float
    chance: float

    @property
    def share(self) -> float:
        """By how much it is larger, as a part of what it was; negative: smaller."""
        return self.after_s / self.before_s - 1.0 if self.before_s > 0 else math.inf


@dataclass(frozen=True)
class Change:
    """A moment from which on steps take another time, and what differs from there on."""

    step: int
    differences: Sequence[Difference]  # that of the steps first


def measured(run: Run, progress: Progress | None = None) -> PartMedians:
    """Read the figures of a run; one ring is in memory at a time."""
    parts: dict[Figure, Floats] = {}
    transfers: dict[Figure, Floats] = {}
    step_times, steps = [], np.zeros(PARTS, np.int64)
    for ring in run.iter_rings(progress):
        columns = _columns(run, ring)
        if columns is None:
            continue
        rank = ring.header.rank
        for op, line, before, inside in _by_call(columns):
            parts[Figure("before", op, line, rank)] = before
            shortest = transfers.get(key := Figure("in", op, line))
            transfers[key] = inside if shortest is None else np.fmin(shortest, inside)
        taken, at = _steps(columns)
        step_times.append(taken)
        steps = np.maximum(steps, at)
    parts.update(transfers)
    if step_times:
        parts[Figure("step")] = _median_over_ranks(np.array(step_times))
    return PartMedians(parts, steps.tolist())


def differences(before: PartMedians, after: PartMedians) -> list[Difference]:
    """Return the figures that differ, in the order: steps, ranks' own times, transfers."""
    tested = []
    for figure in before.parts.keys() & after.parts.keys():
        old, new = (_known(measured.parts[figure]) for measured in (before, after))
        if min(len(old), len(new)) >= _LEAST_PARTS:
            tested.append((_chance(old, new), figure, old, new))
    differing = []
    for number, (chance, figure, old, new) in enumerate(sorted(tested, key=lambda test: test[:2])):
        corrected = chance * (len(tested) - number)
        if corrected > _CHANCE:
            break  # Holm: those behind it are less likely still
        if _is_apart(old, new):
            medians = float(np.median(old)), float(np.median(new))
            differing.append(Difference(figure, *medians, min(1.0, corrected)))
    order = ("step", "before", "in")
    return sorted(
        differing,
        key=lambda difference: (
            order.index(difference.figure.kind),
            -abs(difference.after_s - difference.before_s),
        ),
    )


def change_in(run: PartMedians) -> Change | None:
    """Return the moment at which a run's steps change most, if that is no noise; else None."""
    times = run.parts.get(Figure("step"))
    if times is None:
        return None
    candidates = []
    for at in range(_MARGIN, len(times) - _MARGIN + 1):
        old, new = _known(times[:at]), _known(times[at:])
        if min(len(old), len(new)) >= _MARGIN:
            candidates.append((_spread(old) + _spread(new), at, old, new))
    if not candidates:
        return None
    # The test of Mann and Whitney prefers the middle of a run, so it does not choose the moment.
    _, at, old, new = min(candidates, key=lambda candidate: candidate[:2])
    chance = _chance(old, new) * len(candidates)  # for the choice among so many
    if chance > _CHANCE or not _is_apart(old, new):
        return None
    medians = float(np.median(old)), float(np.median(new))
    differing = differences(run.between(0, at), run.between(at, len(times)))
    others = [difference for difference in differing if difference.figure.kind != "step"]
    return Change(run.steps[at], [Difference(Figure("step"), *medians, chance), *others])


def _columns(run: Run, ring: object) -> dict[str, npt.NDArray[np.generic]] | None:
    import polars as pl

    frame = run.frame(ring)  # type: ignore[arg-type]
    on_cpu = pl.col("device") == "cpu"
    frame = frame.filter(~on_cpu | pl.col("completed_ns").is_not_null()).select(
        "op",
        pl.coalesce("user_line", "call_site", pl.lit("")).alias("line"),
        "step",
        "enqueued_ns",
        # The end of a call on a device is noticed late, and the host goes on after the issue.
        pl.when(on_cpu).then("completed_ns").otherwise("enqueued_ns").alias("left_ns"),
        pl.when(on_cpu)
        .then((pl.col("completed_ns") - pl.col("enqueued_ns")) / 1e9)
        .otherwise(pl.col("device_ms") / 1e3)
        .cast(pl.Float64)
        .alias("taken_s"),
    )
    if len(frame) < PARTS * _LEAST_CALLS:
        return None
    columns = {name: frame[name].to_numpy() for name in frame.columns}
    issued = columns["enqueued_ns"]
    span = int(issued[-1]) - int(issued[0]) + 1
    if span <= 1 or np.any(np.diff(issued) < 0):
        return None  # damaged, or issued by several threads whose order is not known
    columns["part"] = (issued - issued[0]) * PARTS // span
    return columns


def _by_call(columns: Mapping[str, npt.NDArray[np.generic]]):  # type: ignore[no-untyped-def]
    """Yield each op and line, with the medians of its parts: before the call, and in it."""
    issued, left = columns["enqueued_ns"], columns["left_ns"]
    before = np.full(len(issued), np.nan)
    before[1:] = np.maximum(issued[1:].astype(np.int64) - left[:-1].astype(np.int64), 0) / 1e9
    inside = columns["taken_s"].astype(np.float64)
    names = np.array(
        [f"{op}\0{line}" for op, line in zip(columns["op"], columns["line"], strict=True)]
    )
    for name in np.unique(names):
        op, _, line = str(name).partition("\0")
        mine = names == name
        part = columns["part"][mine]
        yield op, line, _medians(before[mine], part), _medians(inside[mine], part)


def _steps(columns: Mapping[str, npt.NDArray[np.generic]]) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Return the median time of a step in each part, and the step at its begin."""
    step, part = columns["step"].astype(np.int64), columns["part"].astype(np.int64)
    first = np.flatnonzero(np.diff(step) > 0) + 1
    begun_ns = columns["enqueued_ns"][first].astype(np.int64)
    times = np.diff(begun_ns) / 1e9 / np.maximum(np.diff(step[first]), 1)
    at = np.array([step[part >= number][:1].sum() for number in range(PARTS)], np.int64)
    return _medians(times, part[first][:-1]), at


def _medians(values: Floats, part: npt.NDArray[np.generic]) -> Floats:
    medians = np.full(PARTS, np.nan)
    for number in np.unique(part):
        mine = _known(values[part == number])
        if len(mine) >= _LEAST_CALLS:
            medians[int(number)] = np.median(mine)
    return medians


def _median_over_ranks(times: Floats) -> Floats:
    known = ~np.isnan(times).all(axis=0)
    medians = np.full(times.shape[1], np.nan)
    medians[known] = np.nanmedian(times[:, known], axis=0)
    return medians


def _known(values: Floats) -> Floats:
    return values[~np.isnan(values)]


def _spread(values: Floats) -> float:
    """Return how far values are from their median, added up; an outlier counts once."""
    return float(np.abs(values - np.median(values)).sum())


def _is_apart(old: Floats, new: Floats) -> bool:
    """Tell whether nearly all parts of one side are above nearly all of the other, by enough."""
    change = float(np.median(new) - np.median(old))
    if abs(change) < max(_LEAST_S, _LEAST_SHARE * float(np.median(old))):
        return False
    low, high = (old, new) if change > 0 else (new, old)
    return bool(np.quantile(low, 1 - _OUTER) < np.quantile(high, _OUTER))


def _chance(old: Floats, new: Floats) -> float:
    """Return the two-sided probability of the Mann-Whitney test, by its normal approximation.

    Each side has at least eight values, for which the approximation is usual. Equal values share
    their ranks, and the variance is corrected for them.
    """
    both = np.concatenate([old, new])
    _, inverse, counts = np.unique(both, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks = (last - (counts - 1) / 2.0)[inverse]
    n, m = len(old), len(new)
    u = ranks[:n].sum() - n * (n + 1) / 2.0
    ties = float((counts.astype(np.float64) ** 3 - counts).sum())
    total = n + m
    variance = n * m / 12.0 * (total + 1 - ties / (total * (total - 1)))
    if variance <= 0:
        return 1.0
    z = max(0.0, abs(u - n * m / 2.0) - 0.5) / math.sqrt(variance)
    return math.erfc(z / math.sqrt(2.0))
