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

_LONGEST_S = 1e9  # no threshold beyond this is believed


@dataclass(frozen=True)
class Kept:
    """What the job's own watcher said once. ``place`` holds it, and ``stacks`` ranks' stacks."""

    place: str
    epoch_ns: int
    causes: tuple[tuple[str, tuple[int, ...]], ...]  # kind and ranks of each finding
    stacks: int


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a run, and where its ranks stand. ``kept``: what was said before."""

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
    """Read a run and say what is wrong with it.

    ``hang_after``, s: see ``find``; None is what the job was started with. For the rest see
    ``stand``.
    """
    snapshot = snapshot_of_run(run, progress, state_of=state_of, now_ns=now_ns)
    found = judge(run, snapshot, hang_after)
    return replace(found, kept=[_kept(run, each) for each in kept_hangs(run.path)])


def judge(run: Run, snapshot: Snapshot, hang_after: float | None = None) -> Diagnosis:
    """Say what is wrong with a job: what holds it up, or where nothing does, what slows it."""
    patience = own_hang_after(run) if hang_after is None else hang_after
    findings = find(snapshot, patience) or find_slow(snapshot)
    return Diagnosis(str(run.source or run.path), snapshot, findings, patience)


def own_hang_after(run: Run) -> float:
    """Return the threshold that a job's own watcher has, s; the usual one where it has none."""
    given = run.about.get("hang_after_s")
    if isinstance(given, (int, float)) and 0 < given < _LONGEST_S:
        return float(given)
    return HANG_AFTER_S


def _kept(run: Run, verdict: Object) -> Kept:
    place = Path(verdict["place"])
    stacks = len(stacks_in(place))
    if run.source not in (None, run.path):  # an archive: where it was extracted says nothing
        place = place.relative_to(run.path)
    causes = []
    for each in verdict["findings"]:
        ranks = each.get("ranks")
        ranks = [rank for rank in ranks if isinstance(rank, int)] if isinstance(ranks, list) else []
        causes.append((str(each.get("kind")), tuple(ranks)))
    return Kept(str(place), verdict["hang"]["epoch_ns"], tuple(causes), stacks)
