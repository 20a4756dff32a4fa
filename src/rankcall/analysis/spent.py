"""What each rank spent its time on, other than computing: from the samples in its ring.

A counter's growth between two samples is spread evenly over the time between them. So a figure is
exact for whole periods of sampling, and an estimate at the edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankcall.ring.layout import PHASE_COUNTERS, SAMPLE_COUNTERS
from rankcall.ring.samples import Samples

LATELY, SINCE = 0, 1
"""Windows of time: that of the rank's newest calls, and that since it last issued or left one."""

SPENT = np.dtype(
    [
        ("rank", "<i4"),
        ("window", "<i4"),
        ("phases", "S144"),  # UTF-8: the names of its phases, a line each
        ("seconds", "<f8"),  # that the samples are about, up to the newest one
        # In s; NaN: not known.
        ("gc_s", "<f8"),  # in garbage collections
        ("full_gc_s", "<f8"),  # of them, in full ones
        ("running_s", "<f8"),  # its training thread was on a CPU
        ("runnable_s", "<f8"),  # it was ready to run, and had no CPU
        ("woken_s", "<f8"),  # of that, after it had slept, as for a disk or a lock
        ("throttled_s", "<f8"),  # its cgroup's quota was used up, summed over CPUs
        ("disk_wait_s", "<f8"),  # its training thread waited for a disk
        ("memory_stall_s", "<f8"),  # some task of its cgroup waited for memory
        ("io_stall_s", "<f8"),  # some task of its cgroup waited for I/O
        ("stopped_s", "<f8"),  # its process stood still
        ("blocked_s", "<f8"),  # its training thread was in uninterruptible sleep
        ("gil_s", "<f8"),  # a thread that ran no Python code held the GIL
        # Its training thread was in torch's data loader, in a checkpoint, in a compilation.
        ("data_loader_s", "<f8"),
        ("checkpoint_s", "<f8"),
        ("compilation_s", "<f8"),
        # Its training thread was in the phase of that number.
        *((f"{name.removesuffix('_ns')}_s", "<f8") for name in PHASE_COUNTERS),
    ]
)
Spent = npt.NDArray[Any]
TIMES = (SPENT.names or ())[3:]
_COUNTERS = TIMES[1:]
PHASES = TIMES[-len(PHASE_COUNTERS) :]
# Which the kernel or Python counts for each thread.
_OF_THREAD = frozenset(("running_s", "runnable_s", "woken_s", "disk_wait_s", *PHASES))
_OF_ALL_CPUS = frozenset(("throttled_s",))  # a sum, which may be longer than the time
_S = 1e9


class RankSamples(NamedTuple):
    """A rank's samples, oldest first, and the times that they are asked about.

    ``first_ns`` is when its oldest call on record was issued, ``last_ns`` when it last issued or
    left one. ``gc_since_ns``: since when a full collection runs; 0 if none does. ``until_ns``: when
    the process was last known to run. ``phases``: the names of its phases, a line each.
    """

    rank: int
    samples: Samples
    first_ns: int
    last_ns: int
    gc_since_ns: int
    until_ns: int
    phases: str = ""


@dataclass
class Spending:
    """What the ranks of a job spent their time on; worked out only if somebody asks.

    ``received`` has the rows of other nodes' ranks, ``sampled`` the samples of the others.
    """

    received: Sequence[Spent] = ()
    sampled: Sequence[RankSamples] = ()

    @cached_property
    def table(self) -> Spent:
        """A row for each rank and window that samples are about."""
        rows = [np.zeros(0, SPENT), *self.received]
        for rank in self.sampled:
            rows += [spent_in(rank, window) for window in (LATELY, SINCE)]
        return np.concatenate(rows)


def time_in_phase(spent: Spent, name: bytes) -> npt.NDArray[np.float64]:
    """Return the time that each row's rank spent in a phase of this name; NaN: not known."""
    seconds = np.full(len(spent), np.nan)
    for number, row in enumerate(spent):
        names = bytes(row["phases"]).split(b"\n")[: len(PHASES)]
        if name in names:
            seconds[number] = row[PHASES[names.index(name)]]
    return seconds


def spent_in(rank: RankSamples, window: int) -> Spent:
    """Return the row of a rank and a window; no row if no samples are about it."""
    collects = 0 < rank.gc_since_ns < rank.until_ns
    if len(rank.samples) < 2 and not collects:  # as in all that was imported
        return np.zeros(0, SPENT)
    begin_ns = max(rank.first_ns if window == LATELY else rank.last_ns, 0)
    row = np.zeros(1, SPENT)
    row["rank"], row["window"], row["phases"] = rank.rank, window, rank.phases.encode()
    times = rank.samples["time_ns"].astype(np.float64)
    lengths = np.diff(times)
    # Which part of each time between two samples is in the window.
    inside = np.clip((times[1:] - begin_ns) / np.maximum(lengths, 1.0), 0.0, 1.0)
    row["seconds"] = float((inside * lengths).sum()) / _S
    for name in _COUNTERS:
        row[name] = _grown(rank.samples, name, inside)
    row["blocked_s"] = _blocked_s(rank.samples, row[0], inside)
    row["gc_s"] += row["full_gc_s"]
    if collects:
        # There are no samples while it collects.
        last_ns = max(int(times[-1]) if len(times) else 0, begin_ns)
        row["seconds"] += max(0.0, (rank.until_ns - last_ns) / _S)
        collects_s = (rank.until_ns - max(rank.gc_since_ns, begin_ns)) / _S
        for name in ("gc_s", "full_gc_s"):
            row[name] = np.nan_to_num(row[name]) + collects_s
    for name in _COUNTERS:
        # A collection counts when it ends, so with its time before the window as well.
        if name not in _OF_ALL_CPUS:
            row[name] = np.minimum(row[name], row["seconds"])
    return row if row["seconds"][0] > 0 else row[:0]


# The causes for which samples count time, with the counters of each.
CAUSES = {
    "gc": ("gc_ns", "full_gc_ns"),
    "throttled": ("throttled_ns",),
    "no_cpu": ("runnable_ns",),
    "disk": ("disk_wait_ns",),
    "memory": ("memory_stall_ns",),
    "io": ("io_stall_ns",),
    "stopped": ("stopped_ns",),
    "blocked": ("blocked_ns",),
    "gil": ("gil_ns",),
    "data_loader": ("data_loader_ns",),
    "checkpoint": ("checkpoint_ns",),
    "compilation": ("compilation_ns",),
}


def seconds_by_cause(rank: RankSamples) -> dict[str, float]:
    """Return a rank's newest counters, in s; without those that its system does not show.

    They only grow, except that those of a thread begin anew with another training thread.
    """
    if not len(rank.samples):
        return {}
    newest = rank.samples[-1]
    known = {
        counter for bit, counter in enumerate(SAMPLE_COUNTERS) if int(newest["known"]) >> bit & 1
    }
    return {
        cause: sum(int(newest[counter]) for counter in counters) / _S
        for cause, counters in CAUSES.items()
        if known.issuperset(counters)
    }


def _blocked_s(samples: Samples, row: Any, inside: npt.NDArray[np.float64]) -> float:
    """Return how long the training thread was in state D; NaN if that is not known.

    The kernel counts how long the thread was not asleep, and looks show in which kind of sleep it
    was. So only the shares of the two kinds are estimates: of a thread that was always seen in one
    of them, the time is exact, however seldom the looks found it asleep.
    """
    looked, other = float(row["blocked_s"]), _grown(samples, "sleeping_s", inside)
    asleep = float(row["seconds"] - row["running_s"] - row["runnable_s"])
    if not looked + other > 0 or not asleep >= 0:  # also if one of them is NaN
        return looked
    return asleep * looked / (looked + other)


def _grown(samples: Samples, name: str, inside: npt.NDArray[np.float64]) -> float:
    """Return by how much a counter of time grew in the window, in s; NaN if that is not known."""
    counter = f"{name.removesuffix('_s')}_ns"
    known = samples["known"] & np.uint32(1 << SAMPLE_COUNTERS.index(counter)) != 0
    both = known[1:] & known[:-1]
    if name in _OF_THREAD:  # such a counter begins anew with another thread
        both &= samples["thread"][1:] == samples["thread"][:-1]
    values = samples[counter].astype(np.float64)
    grown = np.where(both, np.maximum(np.diff(values), 0.0), 0.0)
    return float((grown * inside).sum()) / _S if both.any() else float("nan")
