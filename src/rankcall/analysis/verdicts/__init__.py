"""From a run to its verdict. Each kind of verdict is one class in one module.

::

    dead stopped exhausted missing   a rank that others wait for and that waits for no other rank
    alone                            a rank in a call that the others left, or never came to
    mismatch desync                  members of a group that do not issue the same call
    deadlock                         ranks that wait for each other
    rpc                              ranks that wait for the answers of RPC workers
    no_progress                      ranks that wait without a record, or do nothing at all
    stuck                            a call on devices that all have issued, and that does not end
    idle                             ranks that wait for work, such as the next request
    straggler slow_link              a rank or a link that slows a job that goes on
    kind                             the base class of all kinds, and two families of them
    facts finding                    what a finding states
    sentences evidence_lines naming  its words: all sentences are there
    log_sentences                    those of findings from logs
    verdict diagnosis                all findings about a job; and with the snapshot behind them
    encoding decoding                a verdict as JSON, and back
    kept over hindsight              what the job's own watcher said, whether that hang is over, and
                                     what that adds at the end
    final                            waits that no time can end, which need no patience
    evidence                         the input of the kinds: a hang's waits, a running job's times
    lasting                          how long calls have lasted, as far as is known, and may last
    quoting                          what the rank that failed first wrote last to stderr
    shared_group                     ranks of which two threads use the group of a finding
    wait_graph disagreements         the parts of that evidence
    wait arrivals device_order       the waits of the graph: what each call waits for, and in which
                                     order devices come to calls

To add a kind, write its module and put its class into ``KINDS``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rankcall.analysis.run_snapshot import ProcessState, snapshot_of_run
from rankcall.analysis.snapshot import Bools, Snapshot
from rankcall.analysis.verdicts.alone import Alone
from rankcall.analysis.verdicts.dead import Dead
from rankcall.analysis.verdicts.deadlock import Deadlock
from rankcall.analysis.verdicts.desync import Desync
from rankcall.analysis.verdicts.diagnosis import Diagnosis
from rankcall.analysis.verdicts.evidence import hang_evidence
from rankcall.analysis.verdicts.exhausted import Exhausted
from rankcall.analysis.verdicts.final import Proofs, is_proved, rows_of
from rankcall.analysis.verdicts.finding import CONFIDENCES, Finding, less_sure
from rankcall.analysis.verdicts.hindsight import as_the_watcher_saw, while_it_lasts
from rankcall.analysis.verdicts.idle import Idle
from rankcall.analysis.verdicts.kept import kept_of, waits_that_ended
from rankcall.analysis.verdicts.kind import CulpritKind, Kind
from rankcall.analysis.verdicts.lasting import HANG_AFTER_S
from rankcall.analysis.verdicts.mismatch import Mismatch
from rankcall.analysis.verdicts.missing import Missing
from rankcall.analysis.verdicts.no_progress import NoProgress
from rankcall.analysis.verdicts.quoting import with_quotation
from rankcall.analysis.verdicts.recent_calls import recent_calls
from rankcall.analysis.verdicts.rpc import Rpc
from rankcall.analysis.verdicts.shared_group import with_shared_group
from rankcall.analysis.verdicts.slow_link import SlowLink
from rankcall.analysis.verdicts.stopped import Stopped
from rankcall.analysis.verdicts.straggler import Straggler
from rankcall.analysis.verdicts.stuck import Stuck
from rankcall.run.load import Progress, Run

KINDS: tuple[Kind, ...] = (
    Dead(),
    Stopped(),
    Exhausted(),
    Idle(),
    Missing(),
    Alone(),
    Mismatch(),
    Desync(),
    Deadlock(),
    Rpc(),
    NoProgress(),
    Stuck(),
    Straggler(),
    SlowLink(),
)


def find(
    snapshot: Snapshot, hang_after: float = HANG_AFTER_S, endless: Bools | None = None
) -> list[Finding]:
    """Return what holds a job up, the likeliest root cause first; empty if nothing does.

    Args:
        snapshot: Where the ranks stand.
        hang_after: How long a call must be in flight before it counts as hung, in s; see
            ``hang_evidence``.
        endless: If given, only these calls count as hung.
    """
    kinds = sorted(KINDS, key=lambda kind: kind.order)
    culprits = [kind for kind in kinds if isinstance(kind, CulpritKind)]
    evidence = hang_evidence(snapshot, hang_after, culprits, endless)
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
    findings = [with_shared_group(snapshot, finding) for finding in findings]
    findings = [with_quotation(snapshot, finding) for finding in findings]
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


def find_final(snapshot: Snapshot, hang_after: float, proofs: Proofs) -> list[Finding]:
    """Return what holds up calls that are proved never to end, whatever their age.

    Args:
        snapshot: Where the ranks stand.
        hang_after: As in ``find``.
        proofs: The proofs that this snapshot and an earlier one have.
    """
    findings = find(snapshot, hang_after, rows_of(snapshot, proofs))
    return [finding for finding in findings if finding.stops and is_proved(finding, proofs)]


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


_LONGEST_S = 1e9  # a larger threshold is damage


def diagnose(
    run: Run,
    hang_after: float | None = None,
    progress: Progress | None = None,
    *,
    state_of: ProcessState | None = None,
    now_ns: Callable[[], int] = time.monotonic_ns,
) -> Diagnosis:
    """Read a run and find out what is wrong with it.

    ``hang_after``, in s: see ``verdicts.find``; None: the threshold of the job's own watcher. For
    the other arguments see ``snapshot_of_run``.
    """
    snapshot = snapshot_of_run(run, progress, state_of=state_of, now_ns=now_ns)
    return conclude(run, snapshot, hang_after)


def conclude(run: Run, snapshot: Snapshot, hang_after: float | None = None) -> Diagnosis:
    """Judge a snapshot; if the job is over, also by what its own watcher saw."""
    diagnosis = judge(run, snapshot, hang_after)
    if snapshot.live or not diagnosis.kept:
        return diagnosis
    return as_the_watcher_saw(diagnosis, {kind.kind: kind for kind in KINDS})


def with_stacks(run: Run, diagnosis: Diagnosis, stacks: Mapping[int, str]) -> Diagnosis:
    """Judge again, with the Python stacks of some ranks as further evidence."""
    if not stacks:
        return diagnosis
    ranks = [
        replace(state, stack=stacks.get(state.rank, state.stack))
        for state in diagnosis.snapshot.ranks
    ]
    return judge(run, replace(diagnosis.snapshot, ranks=ranks), diagnosis.hang_after)


def judge(run: Run, snapshot: Snapshot, hang_after: float | None = None) -> Diagnosis:
    """Find out what holds a job up or, if nothing does, what slows it.

    The job's own watcher may know earlier what holds it up. A reader who asks for a threshold that
    is longer than the watcher's wants to be told later.
    """
    own = own_hang_after(run)
    patience, kept = own if hang_after is None else hang_after, kept_of(run)
    snapshot = replace(snapshot, waited_before=waits_that_ended(kept))
    findings = find(snapshot, patience) or find_slow(snapshot)
    diagnosis = Diagnosis.of(str(run.source or run.path), snapshot, findings, patience, kept)
    if snapshot.live and kept and patience <= own and not diagnosis.stops:
        return while_it_lasts(diagnosis, {kind.kind: kind for kind in KINDS})
    return diagnosis


def own_hang_after(run: Run) -> float:
    """Return the threshold of the job's own watcher, s; without a watcher the usual one."""
    in_rings = [head.header.hang_after_ms / 1e3 for head in run.heads if head.header.hang_after_ms]
    if in_rings and 0 < max(in_rings) < _LONGEST_S:
        return max(in_rings)
    hang_after_s = run.about.get("hang_after_s")
    if isinstance(hang_after_s, (int, float)) and 0 < hang_after_s < _LONGEST_S:
        return float(hang_after_s)
    return HANG_AFTER_S
