"""Choose why a rank is late: the most specific cause that explains at least half of the time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rankcall.analysis.snapshot import Snapshot
from rankcall.analysis.spent import LATELY, PHASES, SINCE, Spent, time_in_phase
from rankcall.analysis.stragglers import Stragglers
from rankcall.analysis.verdicts.facts import Fact, Relation, ranks_of
from rankcall.printable import clean

_LEAST = 0.5  # of the lateness: what explains less is not the cause
_WORTH_SAYING = 0.1  # of the time of a cause
_LEAST_S = 1.0  # samples of a shorter time say too little
_LEAST_SEEN_S = 3.0  # the same of what is seen at two moments a second
# On a machine with ten times as many busy threads as CPUs, the scheduler kept the same rank of a
# healthy job back in 26 of 34 steps, for 5 s. In a longer time it is each rank's turn.
_SHORT_S = 10.0
_LEAST_WAIT = 0.05  # of its time: a rank that waits less for a CPU is no measure for others

# The causes, that which is named first of several. A rank is throttled, or stopped, whatever it
# does. A collection takes longer without a CPU, and a loader waits for a disk: the cause is that
# which contains the other one, and the sentence has both.
_FROM_OUTSIDE = ("throttled", "stopped")
_DOING = ("gc", "data_loader", "checkpoint", "compilation")
_IO = ("disk", "blocked")
_WAITS = (*_IO, "gil", "no_cpu")
_OF_THE_RANK = ("gc", *_FROM_OUTSIDE, *_DOING[1:], *_WAITS)
# Known only after some looks; of a wait, it is known only then what contains it.
_NEEDS_LOOKS = frozenset((*_WAITS, *_DOING[1:]))
# Of all tasks of the cgroup. Those of other ranks have them as well, so these are causes only in
# comparison with them.
_OF_THE_CGROUP = ("memory", "io")

Floats = npt.NDArray[np.float64]
Shares = dict[str, float]


def reasons_for_absence(snapshot: Snapshot, ranks: Sequence[int]) -> list[Fact]:
    """Return what ranks have done since their last call, if that is the same for all of them."""
    mine = _rows(snapshot, SINCE, ranks)
    if len(mine) < len(ranks) or mine["seconds"].min() < _LEAST_S:
        return []
    shares = {
        cause: float((_seconds(mine, cause) / mine["seconds"]).min()) for cause in _OF_THE_RANK
    }
    fact = _first_of(snapshot, ranks, shares, mine)
    if fact is not None:
        return [fact]
    for name in _phases_in(mine):
        seconds = time_in_phase(mine, name)
        share = float((seconds / mine["seconds"]).min())
        if share >= _LEAST:
            return [_fact(snapshot, ranks, "phase", share, float(seconds[0]), mine, name=name)]
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
    shares = {
        cause: _more(_seconds(mine, cause), mine, _seconds(others, cause), others) / late_share
        for cause in (*_OF_THE_RANK, *_OF_THE_CGROUP)
    }
    fact = _first_of(snapshot, ranks, shares, mine)
    if fact is not None:
        return [fact]
    for name in _phases_in(mine):
        seconds, theirs = time_in_phase(mine, name), time_in_phase(others, name)
        if np.isnan(theirs).all():  # ranks that never were in it are no measure
            continue
        share = _more(seconds, mine, theirs, others) / late_share
        if share >= _LEAST:
            share = min(1.0, share)
            return [_fact(snapshot, ranks, "phase", share, float(seconds[0]), mine, name=name)]
    return []


def have_only_bad_luck(snapshot: Snapshot, stragglers: Stragglers, reasons: Sequence[Fact]) -> bool:
    """Tell whether the scheduler may have chosen who is late, in a job that was over soon.

    The ranks waited for a CPU for half of the time by which they were late, or for longer. So did
    the others: there is no reason for the lateness (``reasons_for_lateness``), or it is this wait,
    and the others got a CPU no sooner whenever they needed one. A rank that is late because it
    sleeps waits for no CPU.
    """
    mine = _rows(snapshot, LATELY, stragglers.ranks)
    if stragglers.span_s >= _SHORT_S or len(mine) < len(stragglers.ranks):
        return False
    if {reason.value("cause") for reason in reasons} - {"no_cpu"}:
        return False
    shares = mine["runnable_s"] / mine["seconds"]
    if not (shares >= _LEAST * stragglers.cost).all():  # nor if one is NaN
        return False
    return not reasons or _all_lack_cpus(snapshot, stragglers.ranks)


def _all_lack_cpus(snapshot: Snapshot, ranks: Sequence[int]) -> bool:
    """Tell whether the other ranks wait for a CPU as long as these, whenever they need one."""
    mine = _rows(snapshot, LATELY, ranks)
    others = _rows(snapshot, LATELY, sorted({state.rank for state in snapshot.ranks} - set(ranks)))
    # A rank that hardly needs a CPU is no measure.
    others = others[others["runnable_s"] >= _LEAST_WAIT * others["seconds"]]
    if not len(others):
        return False
    waits, theirs = (rows["runnable_s"] / _needed_s(rows) for rows in (mine, others))
    return bool(waits.max() <= np.median(theirs))


def _needed_s(rows: Spent) -> Floats:
    """Return for how long each rank needed a CPU: it had one, or waited for one."""
    needed: Floats = rows["running_s"] + rows["runnable_s"]
    return needed


def _more(mine_s: Floats, mine: Spent, others_s: Floats, others: Spent) -> float:
    """Return by which part of their time some ranks spend more on something than the others."""
    usual = others_s / others["seconds"]
    usual = usual[~np.isnan(usual)]
    usually = np.median(usual) if len(usual) else 0.0
    return float((mine_s / mine["seconds"] - usually).min())


def _first_of(snapshot: Snapshot, ranks: Sequence[int], shares: Shares, mine: Spent) -> Fact | None:
    """Return the cause to name, by the share of each; with the wait that it contains."""
    enough = [cause for cause, share in shares.items() if share >= _LEAST]  # not if it is NaN
    if not enough:
        return None
    cause = enough[0]
    within = [wait for wait in enough if wait in _WAITS] if cause in _DOING else []
    also = max(within, key=lambda wait: shares[wait], default="")
    seconds = float(_seconds(mine, cause)[0])
    return _fact(snapshot, ranks, cause, min(1.0, shares[cause]), seconds, mine, also=also)


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
    after_io = _after_io(spent)
    no_cpu = spent["runnable_s"] - after_io.sum(axis=0)
    if cause == "gc":
        seconds = spent["gc_s"]
    elif cause == "throttled":
        # The sum over all CPUs of the cgroup says that throttling is why the thread had no CPU, and
        # not for how long.
        seconds = np.where(spent["throttled_s"] >= no_cpu / 2, no_cpu, np.nan)
    elif cause == "no_cpu":
        seconds = no_cpu
    elif cause in _IO:
        waited = spent["disk_wait_s" if cause == "disk" else "blocked_s"]
        seconds = np.minimum(waited + after_io[_IO.index(cause)], spent["seconds"])
    elif cause in _OF_THE_CGROUP:
        seconds = spent[f"{cause}_stall_s"]
    else:
        seconds = spent[f"{cause}_s"]
    if cause in _NEEDS_LOOKS:
        seconds = np.where(spent["seconds"] >= _LEAST_SEEN_S, seconds, np.nan)
    result: Floats = seconds
    return result


def _after_io(spent: Spent) -> Floats:
    """Return for how long each row's thread had no CPU after it had waited for I/O.

    On a busy machine, a thread that waits for a disk a thousand times waits for a CPU as often, and
    without the disk it would not have slept. The kernel does not say what a thread slept for, so of
    the time after its sleep as much belongs to I/O as of the sleep itself.

    Returns:
        Two rows: what belongs to the wait for disks, and to state D otherwise.
    """
    disk, blocked = (np.nan_to_num(spent[name]) for name in ("disk_wait_s", "blocked_s"))
    # State D is seen at moments, and the wait for a disk is a part of it.
    waits = np.stack([disk, np.maximum(blocked - disk, 0.0)])
    asleep = spent["seconds"] - spent["running_s"] - spent["runnable_s"]
    asleep = np.maximum(asleep, waits.sum(axis=0))
    # If its switches are not known, all time in the queue counts as a lack of CPUs.
    woken = np.nan_to_num(np.minimum(spent["woken_s"], spent["runnable_s"]))
    result: Floats = np.divide(waits, asleep, out=np.zeros_like(waits), where=asleep > 0) * woken
    return result


def _fact(
    snapshot: Snapshot,
    ranks: Sequence[int],
    cause: str,
    share: float,
    seconds: float,
    rows: Spent,
    *,
    also: str = "",
    name: bytes = b"",
) -> Fact:
    values = [("cause", cause), ("of_s", repr(float(rows["seconds"][0])))]
    values.append(("seconds", repr(seconds)))
    if cause == "gc" and rows["full_gc_s"][0] >= rows["gc_s"][0] / 2:
        values.append(("full", "yes"))
    if cause in _IO:
        after_s = float(_after_io(rows[:1])[_IO.index(cause), 0])
        if after_s >= _WORTH_SAYING * seconds:
            values.append(("without_cpu_s", repr(after_s)))
    if also:
        values += [("also", also), ("also_s", repr(float(_seconds(rows, also)[0])))]
    if name:
        values.append(("name", clean(name.decode("utf-8", "replace"))))
    subject = ranks_of(snapshot, ranks)
    window = int(rows["window"][0])
    relation = Relation.LATE_BECAUSE if window == LATELY else Relation.ABSENT_BECAUSE
    return Fact(relation, subject, values=tuple(values), number=100 * share, unit="%")
