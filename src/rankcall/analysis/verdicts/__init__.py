"""The verdicts about a job: each kind is one class in one module.

::

    dead stopped exhausted missing   a rank that others wait for and that waits for no other rank
    mismatch desync                  members of a group that do not issue the same call
    deadlock                         ranks that wait for each other
    no_progress                      ranks that wait without a record, or do nothing at all
    idle                             ranks that wait for work, such as the next request
    straggler slow_link              a rank or a link that slows a job that goes on
    kinds                            the base class of all kinds, and two families of kinds
    evidence                         the input of the kinds: a hang's waits, a running job's times
    wait_graph culprits disagreements    the parts of that evidence
    finding                          a finding, and the words that findings share

To add a kind, write its module and put its class into ``KINDS``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rankcall.analysis.state.snapshot import Snapshot
from rankcall.analysis.verdicts.dead import Dead
from rankcall.analysis.verdicts.deadlock import Deadlock
from rankcall.analysis.verdicts.desync import Desync
from rankcall.analysis.verdicts.evidence import HANG_AFTER_S, hang_evidence, recent_calls
from rankcall.analysis.verdicts.exhausted import Exhausted
from rankcall.analysis.verdicts.finding import CONFIDENCES, Finding, less_sure
from rankcall.analysis.verdicts.idle import Idle
from rankcall.analysis.verdicts.kinds import CulpritVerdict, Verdict
from rankcall.analysis.verdicts.mismatch import Mismatch
from rankcall.analysis.verdicts.missing import Missing
from rankcall.analysis.verdicts.no_progress import NoProgress
from rankcall.analysis.verdicts.slow_link import SlowLink
from rankcall.analysis.verdicts.stopped import Stopped
from rankcall.analysis.verdicts.straggler import Straggler

KINDS: tuple[Verdict, ...] = (
    Dead(),
    Stopped(),
    Exhausted(),
    Idle(),
    Missing(),
    Mismatch(),
    Desync(),
    Deadlock(),
    NoProgress(),
    Straggler(),
    SlowLink(),
)


def find(snapshot: Snapshot, hang_after: float = HANG_AFTER_S) -> list[Finding]:
    """Return what holds a job up, the likeliest root cause first; empty if nothing does.

    Args:
        snapshot: Where the ranks stand.
        hang_after: How long a call must be in flight before it counts as hung, in s; see
            ``hang_evidence``.
    """
    kinds = sorted(KINDS, key=lambda kind: kind.order)
    culprits = [kind for kind in kinds if isinstance(kind, CulpritVerdict)]
    evidence = hang_evidence(snapshot, hang_after, culprits)
    findings = [finding for kind in kinds for finding in kind.in_hang(evidence)]
    if not findings:
        findings = [finding for kind in kinds for finding in kind.if_unexplained(evidence)]
    if snapshot.mixed:
        findings = [_doubted(finding, 2) for finding in findings]
    nameless = {state.rank for state in snapshot.ranks if state.tables_lost}
    findings = [
        _doubted(finding) if nameless & {*finding.ranks, *finding.victims} else finding
        for finding in findings
    ]
    order = {kind.kind: kind.order for kind in kinds}
    return sorted(
        findings,
        key=lambda finding: (
            CONFIDENCES.index(finding.confidence),
            order[finding.kind],
            -finding.since_s,
            finding.ranks,
        ),
    )


def find_slow(snapshot: Snapshot) -> list[Finding]:
    """Return what slows a job in which nothing hangs: by kind, the worst first."""
    recent = recent_calls(snapshot)
    kinds = sorted(KINDS, key=lambda kind: kind.order)
    return [finding for kind in kinds for finding in kind.in_running_job(recent)]


def settles_in(snapshot: Snapshot, findings: Sequence[Finding], hang_after: float) -> float:
    """Return in how many s it will be clear whether findings hold; 0: they do now."""
    named = {
        kind: [rank for finding in findings if finding.kind == kind.kind for rank in finding.ranks]
        for kind in KINDS
    }
    return max(
        (kind.settles_in(snapshot, hang_after, ranks) for kind, ranks in named.items() if ranks),
        default=0.0,
    )


def _doubted(finding: Finding, steps: int = 1) -> Finding:
    return replace(finding, confidence=less_sure(finding.confidence, steps))
