"""Choose why a rank is late: the most specific cause that explains at least half of the time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rankcall.analysis.snapshot import Snapshot
from rankcall.analysis.spent import LATELY, PHASES, SINCE, Spent, time_in_phase
from rankcall.analysis.verdicts.facts import Fact, Relation, ranks_of
from rankcall.printable import clean

_LEAST = 0.5  # of the lateness: what explains less is not the cause
_LEAST_S = 1.0  # samples of a shorter time say too little
_LEAST_SEEN_S = 3.0  # the same of what is seen at two moments a second

# The causes, the most specific first: a rank that is throttled has no CPU as well, and a collection
# takes longer without one.
_COUNTED = ("gc", "throttled", "no_cpu", "stopped", "disk")
_SEEN = ("blocked", "gil", "data_loader", "checkpoint", "compilation")
_OF_THE_RANK = (*_COUNTED, *_SEEN)
# Of all tasks of the cgroup. Those of other ranks have them as well, so these are causes only in
# comparison with them.
_OF_THE_CGROUP = ("memory", "io")

Floats = npt.NDArray[np.float64]


def reasons_for_absence(snapshot: Snapshot, ranks: Sequence[int]) -> list[Fact]:
    """Return what ranks have done since their last call, if that is the same for all of them."""
    mine = _rows(snapshot, SINCE, ranks)
    if len(mine) < len(ranks) or mine["seconds"].min() < _LEAST_S:
        return []
    for cause in _OF_THE_RANK:
        seconds = _seconds(mine, cause)
        share = float((seconds / mine["seconds"]).min())
        if share >= _LEAST:
            return [_fact(snapshot, ranks, cause, share, float(seconds[0]), mine)]
    for name in _phases_in(mine):
        seconds = time_in_phase(mine, name)
        share = float((seconds / mine["seconds"]).min())
        if share >= _LEAST:
            return [_fact(snapshot, ranks, "phase", share, float(seconds[0]), mine, name)]
    return []


def reasons_for_lateness(snapshot: Snapshot, ranks: Sequence[int], late_share: float) -> list[Fact]:
    """Return what makes ranks late all along.

    What all ranks spend their time on makes none of them late. So only what these ranks spend more
    than the others counts.

    Args:
        snapshot: The job.
        ranks: The ranks that are late.
        late_share: The part of their time by which they are late.
    """
    mine = _rows(snapshot, LATELY, ranks)
    others = _rows(snapshot, LATELY, sorted({state.rank for state in snapshot.ranks} - set(ranks)))
    if len(mine) < len(ranks) or not late_share or mine["seconds"].min() < _LEAST_S:
        return []
    for cause in (*_OF_THE_RANK, *_OF_THE_CGROUP):
        usual = _seconds(others, cause) / others["seconds"]
        usual = usual[~np.isnan(usual)]
        rate = _seconds(mine, cause) / mine["seconds"]
        more = float((rate - (np.median(usual) if len(usual) else 0.0)).min())
        if more >= _LEAST * late_share:
            share = min(1.0, more / late_share)
            return [_fact(snapshot, ranks, cause, share, float(_seconds(mine, cause)[0]), mine)]
    for name in _phases_in(mine):
        seconds = time_in_phase(mine, name)
        usual = time_in_phase(others, name) / others["seconds"]
        usual = usual[~np.isnan(usual)]  # a rank that never was in it is no measure
        if not len(usual):
            continue
        more = float((seconds / mine["seconds"] - np.median(usual)).min())
        if more >= _LEAST * late_share:
            share = min(1.0, more / late_share)
            return [_fact(snapshot, ranks, "phase", share, float(seconds[0]), mine, name)]
    return []


def _phases_in(spent: Spent) -> list[bytes]:
    """Return the names of the phases of the first rank, that with the most time first."""
    names = [name for name in bytes(spent["phases"][0]).split(b"\n")[: len(PHASES)] if name]
    return sorted(names, key=lambda name: -float(np.nan_to_num(time_in_phase(spent[:1], name))[0]))


_ADVICE = {
    "gc": "Call gc.freeze() once everything is set up; or gc.disable(), and gc.collect() at the "
    "same step on all ranks, so that they collect together.",
    "throttled": "Give {its} container more CPU time (its CPU limit), or start fewer threads and "
    "data loader workers there.",
    "no_cpu": "See what else runs on {host}: other jobs, too many data loader workers or threads "
    "(OMP_NUM_THREADS), ranks that share a CPU (taskset -p {pid}).",
    "stopped": "See who stops it on {host}: a signal (SIGSTOP), a debugger or profiler, a frozen "
    "container, or a virtual machine that pauses.",
    "disk": "See which files it reads or writes on {host}, and how busy that disk is.",
    "blocked": "See what it waits for in the kernel, mostly a disk or a network file system: cat "
    "/proc/{pid}/wchan on {host}.",
    "gil": "See which thread holds the GIL: py-spy dump --native --pid {pid} on {host}; an "
    "extension that waits must release it.",
    "data_loader": "Give {its} data loader more workers (num_workers), or look at what its dataset "
    "reads on {host}.",
    "checkpoint": "Save on all ranks at the same step, in the background "
    "(torch.distributed.checkpoint.async_save), or to a faster disk.",
    "compilation": "See what is compiled anew there: TORCH_LOGS=recompiles; shapes that change, or "
    "a cold cache on {host}.",
    "memory": "{host} is short of memory: see what else runs there, and the container's limit.",
    "io": "See which files it reads or writes on {host}, and how busy that disk is.",
    "phase": "Look at what {its} program does in that phase, and at its inputs there.",
}


def advice_for(reasons: Sequence[Fact]) -> str:
    """Return the next step to take for a reason; empty without one."""
    if not reasons:
        return ""
    ranks = reasons[0].ranks
    assert ranks is not None
    return _ADVICE[reasons[0].value("cause")].format(
        its="its" if len(ranks.numbers) == 1 else "their",
        host=" and ".join(ranks.hosts[:2]) or "its host",
        pid=ranks.pid or "<pid>",
    )


def _rows(snapshot: Snapshot, window: int, ranks: Sequence[int]) -> Spent:
    spent = snapshot.spending.table
    rows: Spent = spent[(spent["window"] == window) & np.isin(spent["rank"], ranks)]
    return rows


def _seconds(spent: Spent, cause: str) -> Floats:
    """Return the seconds of a cause in each row; NaN if they are not known."""
    if cause == "gc":
        seconds = spent["gc_s"]
    elif cause == "throttled":
        # The sum over all CPUs of the cgroup says that throttling is why the thread had no CPU, and
        # not for how long.
        is_throttled = spent["throttled_s"] >= spent["runnable_s"] / 2
        seconds = np.where(is_throttled, spent["runnable_s"], np.nan)
    elif cause == "no_cpu":
        seconds = spent["runnable_s"]
    else:
        names = {"disk": "disk_wait_s", "memory": "memory_stall_s", "io": "io_stall_s"}
        seconds = spent[names.get(cause, f"{cause}_s")]
    if cause in _SEEN:
        seconds = np.where(spent["seconds"] >= _LEAST_SEEN_S, seconds, np.nan)
    result: Floats = seconds
    return result


def _fact(
    snapshot: Snapshot,
    ranks: Sequence[int],
    cause: str,
    share: float,
    seconds: float,
    rows: Spent,
    name: bytes = b"",
) -> Fact:
    values = [("cause", cause), ("of_s", repr(float(rows["seconds"][0])))]
    values.append(("seconds", repr(seconds)))
    if cause == "gc" and rows["full_gc_s"][0] >= rows["gc_s"][0] / 2:
        values.append(("full", "yes"))
    if name:
        values.append(("name", clean(name.decode("utf-8", "replace"))))
    subject = ranks_of(snapshot, ranks)
    window = int(rows["window"][0])
    relation = Relation.LATE_BECAUSE if window == LATELY else Relation.ABSENT_BECAUSE
    return Fact(relation, subject, values=tuple(values), number=100 * share, unit="%")
