"""How fast a job goes, from the calls on record: what is said of a healthy one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankcall.analysis.state.snapshot import Snapshot


@dataclass(frozen=True)
class Pace:
    """None: not enough is on record. ``share`` is of the time, spent in communication."""

    steps_per_s: float | None
    calls_per_s: float | None
    share: float | None


def pace(snapshot: Snapshot) -> Pace:
    """Measure the calls on record; each figure is the median over the ranks."""
    step = median_step_s(snapshot)
    return Pace(1 / step if step else None, *_busy(snapshot))


def _busy(snapshot: Snapshot) -> tuple[float | None, float | None]:
    """Return calls/s and the share of the time in which any is in flight."""
    calls = snapshot.calls
    done = calls[~np.isnan(calls["ended_s"])]
    if not len(done):
        return None, None
    # Ages count backwards: a time line of each rank of its own, one behind the other.
    far = float(done["age_s"].max()) + 1.0
    begin = done["rank"] * far + (far - done["age_s"])
    end = done["rank"] * far + (far - done["ended_s"])
    order = np.argsort(begin, kind="stable")
    begin, end, rank = begin[order], end[order], done["rank"][order]
    reach = np.concatenate([[0.0], np.maximum.accumulate(end)[:-1]])
    inside = np.maximum(end - np.maximum(begin, reach), 0.0)
    ranks, first, count = np.unique(rank, return_index=True, return_counts=True)
    span = np.maximum.reduceat(end, first) - begin[first]
    enough = (count >= 2) & (span > 0)
    if not enough.any():
        return None, None
    busy = np.bincount(rank, weights=inside)[ranks]
    return (
        float(np.median(count[enough] / span[enough])),
        float(np.median(np.minimum(busy[enough] / span[enough], 1.0))),
    )


def median_step_s(snapshot: Snapshot) -> float:
    """Return the median length of a step, s; 0 where fewer than three are on record."""
    calls = snapshot.calls
    if not len(calls):
        return 0.0
    order = np.lexsort((calls["index"], calls["rank"]))
    rank, step, age = (calls[name][order] for name in ("rank", "step", "age_s"))
    begins = np.concatenate([[True], (rank[1:] != rank[:-1]) | (step[1:] > step[:-1])])
    rank, step, age = rank[begins], step[begins], age[begins]
    lasts = (age[:-1] - age[1:])[(rank[1:] == rank[:-1]) & (step[1:] == step[:-1] + 1)]
    return float(np.median(lasts)) if len(lasts) >= 2 else 0.0
