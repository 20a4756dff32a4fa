"""One call from a run to its verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from rankcall._hangs import Object, stacks_in
from rankcall.analysis.state.run_snapshot import ProcessState, snapshot_of_run
from rankcall.analysis.state.snapshot import Snapshot
from rankcall.analysis.verdicts import find, find_slow
from rankcall.analysis.verdicts.evidence import HANG_AFTER_S
from rankcall.analysis.verdicts.finding import HEALTHY, Finding
from rankcall.processes import process_state
from rankcall.run import Progress, Run
from rankcall.rundir import kept_hangs

_LONGEST_S = 1e9  # a larger threshold is damage


@dataclass(frozen=True)
class Kept:
    """An earlier verdict of the job's own watcher, kept in ``place`` with ``stacks`` stacks."""

    place: str
    epoch_ns: int
    causes: tuple[tuple[str, tuple[int, ...]], ...]  # kind and ranks of each finding
    stacks: int


@dataclass(frozen=True)
class Diagnosis:
    """The findings about a run, and where its ranks stand. ``kept``: its watcher's verdicts."""

    run: str
    snapshot: Snapshot
    findings: list[Finding]
    hang_after: float
    kept: list[Kept] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """The kind of the likeliest root cause, or ``healthy``."""
        return self.findings[0].kind if self.findings else HEALTHY


def diagnose(
    run: Run,
    hang_after: float | None = None,
    progress: Progress | None = None,
    *,
    state_of: ProcessState = process_state,
    now_ns: Callable[[], int] = time.monotonic_ns,
) -> Diagnosis:
    """Read a run and find out what is wrong with it.

    ``hang_after``, in s: see ``verdicts.find``; None: the threshold of the job's own watcher. For
    the other arguments see ``snapshot_of_run``.
    """
    snapshot = snapshot_of_run(run, progress, state_of=state_of, now_ns=now_ns)
    found = judge(run, snapshot, hang_after)
    return replace(found, kept=[_kept(run, each) for each in kept_hangs(run.path)])


def judge(run: Run, snapshot: Snapshot, hang_after: float | None = None) -> Diagnosis:
    """Find out what holds a job up or, if nothing does, what slows it."""
    patience = own_hang_after(run) if hang_after is None else hang_after
    findings = find(snapshot, patience) or find_slow(snapshot)
    return Diagnosis(str(run.source or run.path), snapshot, findings, patience)


def own_hang_after(run: Run) -> float:
    """Return the threshold of the job's own watcher, s; without a watcher the usual one."""
    given = run.about.get("hang_after_s")
    if isinstance(given, (int, float)) and 0 < given < _LONGEST_S:
        return float(given)
    return HANG_AFTER_S


def _kept(run: Run, verdict: Object) -> Kept:
    place = Path(verdict["place"])
    stacks = len(stacks_in(place))
    if run.source not in (
        None,
        run.path,
    ):  # an archive, extracted anywhere
        place = place.relative_to(run.path)
    causes = []
    for each in verdict["findings"]:
        ranks = each.get("ranks")
        ranks = [rank for rank in ranks if isinstance(rank, int)] if isinstance(ranks, list) else []
        causes.append((str(each.get("kind")), tuple(ranks)))
    return Kept(str(place), verdict["hang"]["epoch_ns"], tuple(causes), stacks)
