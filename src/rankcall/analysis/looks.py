"""One look at a job, for ``rankcall diagnose`` and live views: how much is read, who is asked."""

from __future__ import annotations

from rankcall.analysis.run_snapshot import snapshot_of_run
from rankcall.analysis.snapshot import telling_threads
from rankcall.analysis.verdicts import diagnose, judge, with_stacks
from rankcall.analysis.verdicts.diagnosis import Diagnosis
from rankcall.run.load import Progress, Run
from rankcall.run.own_stacks import request_stacks

_NEWEST = 1024  # records that a live view reads from the end of each ring
_WINDOW = 1 << 16  # calls that a live view keeps of all ranks together
_FEWEST, _MOST = 32, 256  # calls that it keeps of each rank
_MOST_ASKED = 64  # ranks that are asked for their stacks; each of them gets a signal


def diagnose_asking(
    run: Run, hang_after: float | None = None, progress: Progress | None = None
) -> Diagnosis:
    """Diagnose a run; if it lives, ask the ranks that no record explains for their stacks.

    Only the stack of a rank that is in user code, or that waits in torch without a record, can say
    where it stands. Ranks of other hosts, and those that do not answer, are judged without.

    Args:
        run: The run.
        hang_after: See ``diagnose``.
        progress: Called with the number of rings that are read, and of all rings.
    """
    diagnosis = diagnose(run, hang_after or None, progress)
    if not diagnosis.snapshot.live:
        return diagnosis
    wanted = set(_unexplained(diagnosis)[:_MOST_ASKED])
    headers = [head.header for head in run.heads if head.header.rank in wanted]
    stacks = request_stacks(headers, telling_threads(diagnosis.snapshot))
    return with_stacks(run, diagnosis, stacks)


def _unexplained(diagnosis: Diagnosis) -> list[int]:
    """Return the ranks that only their stacks can locate."""
    ranks: set[int] = set()
    for finding in diagnosis.findings:
        if finding.kind in ("missing", "no_progress"):
            ranks.update(finding.ranks)
        if finding.kind == "no_progress":
            ranks.update(finding.victims)
    return sorted(ranks)


def by_interest(diagnosis: Diagnosis, most: int) -> list[int]:
    """Return at most so many ranks: those that findings name, a victim of each, then the others."""
    ranks: dict[int, None] = {}
    for finding in diagnosis.findings:
        ranks.update(dict.fromkeys(finding.ranks))
        ranks.update(dict.fromkeys(finding.victims[:1]))
    ranks.update((state.rank, None) for state in diagnosis.snapshot.ranks)
    return list(ranks)[:most]


def suspect_and_peer(run: Run) -> list[int]:
    """Return a rank of this host that the verdict names, and one that it does not name.

    Their profiles can be compared. Without the former, there are none.
    """
    findings = diagnose_asking(run).findings
    here = {head.header.rank for head in run.heads if head.header.process_state() == "alive"}
    named = {rank for finding in findings for rank in finding.ranks}
    suspects = sorted(here.intersection(findings[0].ranks)) if findings else []
    return [*suspects[:1], *sorted(here - named)[:1]] if suspects else []


def live_window(run: Run) -> int:
    """Return how many calls of each rank a live view keeps, so that a look takes no longer."""
    return max(_FEWEST, min(_MOST, _WINDOW // max(1, len(run.heads))))


def look(run: Run, hang_after: float | None = None) -> Diagnosis:
    """Read the newest records of every rank and judge them, for a view that is drawn often."""
    snapshot = snapshot_of_run(run, window=live_window(run), newest=_NEWEST)
    return judge(run, snapshot, hang_after or None)
