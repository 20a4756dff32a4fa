"""One call from a run to its verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rankcall.analysis.finding import HEALTHY, Finding
from rankcall.analysis.hang.find import HANG_AFTER_S, find
from rankcall.analysis.slowness.find import find_slow
from rankcall.analysis.state.snapshot import Snapshot
from rankcall.analysis.state.standing import ProcessState, stand
from rankcall.processes import process_state
from rankcall.run import Progress, Run


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a run, and where its ranks stand."""

    run: str
    snapshot: Snapshot
    findings: list[Finding]
    hang_after: float

    @property
    def verdict(self) -> str:
        """The kind of the likeliest root cause, or ``healthy``."""
        return self.findings[0].kind if self.findings else HEALTHY


def diagnose(
    run: Run,
    hang_after: float = HANG_AFTER_S,
    progress: Progress | None = None,
    *,
    state_of: ProcessState = process_state,
    now_ns: Callable[[], int] = time.monotonic_ns,
) -> Diagnosis:
    """Read a run and say what is wrong with it. See ``find`` and ``stand`` for the rest."""
    snapshot = stand(run, progress, state_of=state_of, now_ns=now_ns)
    return judge(str(run.source or run.path), snapshot, hang_after)


def judge(run: str, snapshot: Snapshot, hang_after: float = HANG_AFTER_S) -> Diagnosis:
    """Say what is wrong with a job: what holds it up, or where nothing does, what slows it."""
    findings = find(snapshot, hang_after) or find_slow(snapshot)
    return Diagnosis(run, snapshot, findings, hang_after)
