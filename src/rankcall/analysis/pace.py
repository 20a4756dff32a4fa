"""How fast a job goes: steps, the share of communication, and how long its ranks are silent."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rankcall.analysis.collectives import in_order
from rankcall.analysis.snapshot import COLLECTIVE, NOTICED_S, Calls, Snapshot
from rankcall.analysis.windows import known_since_s
from rankcall.record import FLAG_DEVICE

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_RECENT_S, _RECENT_STEPS = 10.0, 5.0  # what "now" means for the pace of a job that runs


@dataclass(frozen=True)
class Pace:
    """How fast a job goes. None: too little is on record.

    ``share``: of the time of all ranks, spent in communication. None on devices without device
    times, too.
    """

    steps_per_s: float | None
    calls_per_s: float | None
    share: float | None


def quiet_s(snapshot: Snapshot) -> npt.NDArray[np.float64]:
    """Return for how long each rank has issued nothing and left no call, in s.

    For a rank without a call on record: since it began to record. Infinity if that is not known.
    """
    began = [math.inf if state.started_s is None else state.started_s for state in snapshot.ranks]
    quiet = np.array(began, np.float64)
    calls = snapshot.calls
    np.minimum.at(quiet, calls["rank"], np.fmin(calls["age_s"], calls["ended_s"]))
    return quiet


def pace(snapshot: Snapshot) -> Pace:
    """Measure the newest calls; rates are the median over the ranks.

    Of a job that runs, the calls of the last seconds count: older calls say nothing about its pace
    now.
    """
    step = usual_step_s(snapshot)
    if snapshot.live:
        recent_s = max(_RECENT_S, _RECENT_STEPS * step)
        # A host may have issued long ago what its device has just ended.
        went_on = np.fmin(snapshot.calls["age_s"], snapshot.calls["ended_s"])
        newest = snapshot.calls[went_on <= recent_s]
        if len(snapshot.calls) and not len(newest):
            return Pace(0.0 if step else None, 0.0, None)
        snapshot = replace(snapshot, calls=newest)
    else:
        all_known = snapshot.calls["age_s"] <= known_since_s(snapshot.calls)
        snapshot = replace(snapshot, calls=snapshot.calls[all_known])
    return Pace(1 / step if step else None, *_busy(snapshot))


def _busy(snapshot: Snapshot) -> tuple[float | None, float | None]:
    """Return calls/s and the share of the time in which any call is in flight.

    A call on a device is in flight while the device works on it. From its issue to the moment at
    which its end was noticed is no duration.
    """
    calls = snapshot.calls
    done = calls[~np.isnan(calls["ended_s"])]
    if not len(done):
        return None, None
    # Ages count backwards. Each rank gets a time line of its own, one after the other.
    far = float(done["age_s"].max()) + 1.0
    begin = done["rank"] * far + (far - done["age_s"])
    end = done["rank"] * far + (far - done["ended_s"])
    on_device = done["flags"] & FLAG_DEVICE != 0
    is_known = not np.isnan(done["took_s"][on_device]).any()
    if is_known:
        begin[on_device], end[on_device] = _on_devices(done[on_device], begin[on_device])
    else:
        begin[on_device] = end[on_device]
    order = np.argsort(begin, kind="stable")
    begin, end, rank = begin[order], end[order], done["rank"][order]
    reach = np.concatenate([[0.0], np.maximum.accumulate(end)[:-1]])
    inside = np.maximum(end - np.maximum(begin, reach), 0.0)
    ranks, first, count = np.unique(rank, return_index=True, return_counts=True)
    # A job that runs has lasted until now; of one that is over, the last end is known.
    over = (ranks + 1) * far if snapshot.live else np.maximum.reduceat(end, first)
    span = over - begin[first]
    # Ends that were noticed within the time that it takes to notice one show no pace.
    enough = (count >= 2) & (span > (0 if is_known else NOTICED_S))
    if not enough.any():
        return None, None
    busy = np.bincount(rank, weights=inside)[ranks]
    return (
        float(np.median(count[enough] / span[enough])),
        min(float(busy[enough].sum() / span[enough].sum()), 1.0) if is_known else None,
    )


def _on_devices(calls: Calls, issued: Floats) -> tuple[Floats, Floats]:
    """Return when calls on devices begin and end; a device runs those of a group in order."""
    end = issued + calls["took_s"]
    keys = np.stack([calls["rank"], calls["group"]])
    for key in np.unique(keys[:, calls["kind"] == COLLECTIVE], axis=1).T:
        rows = np.flatnonzero((keys == key[:, None]).all(axis=0) & (calls["kind"] == COLLECTIVE))
        rows = rows[np.argsort(issued[rows], kind="stable")]
        ns = (np.rint(times[rows] * 1e9).astype(np.int64) for times in (issued, calls["took_s"]))
        end[rows] = in_order(*ns) / 1e9
    return end - calls["took_s"], end


def usual_step_s(snapshot: Snapshot) -> float:
    """Return the usual length of a step, s; 0 if fewer than three are on record.

    It is the median. If calls run on devices, it is the mean of a rank's steps without the longest,
    and the median of that over the ranks: a host issues several steps at once, and waits for its
    device in the next one. The longest may be a pause, for example for a checkpoint.

    A host may run ahead for hundreds of steps, and then its issues say nothing about the pace of
    its device. So steps take no less time than the ends of their calls show.
    """
    calls = snapshot.calls
    if not len(calls):
        return 0.0
    order = np.lexsort((calls["index"], calls["rank"]))
    rank, step, age = (calls[name][order] for name in ("rank", "step", "age_s"))
    begins = np.concatenate([[True], (rank[1:] != rank[:-1]) | (step[1:] > step[:-1])])
    rank, step, age = rank[begins], step[begins], age[begins]
    follows = (rank[1:] == rank[:-1]) & (step[1:] == step[:-1] + 1)
    lasts, rank = (age[:-1] - age[1:])[follows], rank[1:][follows]
    if len(lasts) < 2:
        return 0.0
    on_device = calls[calls["flags"] & FLAG_DEVICE != 0]
    if not len(on_device):
        return float(np.median(lasts))
    return max(_mean_step(rank, lasts, np.ones(len(lasts))), _step_by_ends(on_device))


def _step_by_ends(calls: Calls) -> float:
    """Return the mean length of a step on the devices, by the times at which its calls ended.

    The ends of many steps are often noticed together: those of one moment count as one stretch.
    """
    done = calls[~np.isnan(calls["ended_s"])]
    if not len(done):
        return 0.0
    order = np.lexsort((done["step"], -done["ended_s"], done["rank"]))
    rank, step, ago = (done[name][order] for name in ("rank", "step", "ended_s"))
    is_last = np.append((rank[1:] != rank[:-1]) | (ago[1:] != ago[:-1]), True)
    rank, step, ago = rank[is_last], step[is_last].astype(np.int64), ago[is_last]
    follows = (rank[1:] == rank[:-1]) & (step[1:] > step[:-1])
    return _mean_step(rank[1:][follows], -np.diff(ago)[follows], np.diff(step)[follows])


def _mean_step(rank: Ints, lasts: Floats, steps: Ints | Floats) -> float:
    """Return the median over the ranks of their mean step without the longest stretch; 0: too few.

    Args:
        rank: The rank of each stretch, in order.
        lasts: How long each stretch took, in s.
        steps: How many steps it has.
    """
    if not len(rank):
        return 0.0
    _, first, count = np.unique(rank, return_index=True, return_counts=True)
    longest = np.lexsort((lasts, rank))[first + count - 1]
    rest = np.add.reduceat(lasts, first) - lasts[longest]
    counted = np.add.reduceat(steps, first) - steps[longest]
    several = count > 1
    return float(np.median(rest[several] / counted[several])) if several.any() else 0.0
