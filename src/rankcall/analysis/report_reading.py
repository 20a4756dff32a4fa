"""Read a run for a report: its figures, and the findings that a report shows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from rankcall.analysis.details import Details, detail
from rankcall.analysis.run_snapshot import SnapshotBuilder
from rankcall.analysis.snapshot import Snapshot
from rankcall.analysis.summary import Summary, summarise
from rankcall.analysis.verdicts import conclude, diagnose, find
from rankcall.analysis.verdicts.diagnosis import Diagnosis
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.kept import kept_of, stacks_beside
from rankcall.analysis.verdicts.reasons import have_only_bad_luck, reasons_for_lateness
from rankcall.run.load import Progress, Run


@contextlib.contextmanager
def _silent(what: str) -> Iterator[Progress]:
    yield lambda done, total: None


# Makes the progress of one pass over the rings, from its name.
Bars = Callable[[str], AbstractContextManager[Progress]]


def read_report(run: Run, bars: Bars = _silent) -> tuple[Summary, list[Finding]]:
    """Return the summary of a run, and the findings that explain why it stopped, if it did.

    If all processes have closed their rings and all collectives have ended, the run most likely
    ended normally. Then only findings count that made its results wrong, and they come from the
    same reading of the rings. Otherwise, the verdicts that the job's own watcher kept count as
    well. If collectives are unfinished although the rings are closed, they are read once more.
    """
    builder = SnapshotBuilder(run)
    with bars("reading records") as progress:
        summary = summarise(run, progress, builder.add)
    snapshot = builder.finish()
    summary = _with_reasons(summary, snapshot)
    closed = all(head.header.closed_ns for head in run.heads)
    if closed and any(row.unfinished for row in summary.collectives):
        with bars("diagnosing") as progress:
            findings = diagnose(run, progress=progress).findings
    elif closed:
        findings = find(snapshot)
    else:
        findings = conclude(run, snapshot).findings
    return summary, [finding for finding in findings if finding.stops]


def stacks_at_stop(run: Run, findings: Sequence[Finding]) -> dict[int, str]:
    """Return the stacks beside the watcher's newest verdict, by rank, if findings stopped a run."""
    kept = kept_of(run) if any(finding.stops for finding in findings) else []
    return stacks_beside(kept[-1]) if kept else {}


def read_page(run: Run, bars: Bars = _silent) -> tuple[Details, Diagnosis]:
    """Return what the HTML report shows: details, and the diagnosis, also of what only slows."""
    builder = SnapshotBuilder(run)
    with bars("reading records") as progress:
        details = detail(run, progress, builder.add)
    snapshot = builder.finish()
    details = replace(details, summary=_with_reasons(details.summary, snapshot))
    return details, conclude(run, snapshot)


def _with_reasons(summary: Summary, snapshot: Snapshot) -> Summary:
    """Return a summary that says why its stragglers are late, as far as their samples show it."""
    if summary.late is None:
        return summary
    reasons = reasons_for_lateness(snapshot, summary.late.ranks, summary.late.cost)
    if have_only_bad_luck(snapshot, summary.late, reasons):
        return replace(summary, late=None)
    return replace(summary, late_because=tuple(reasons))
