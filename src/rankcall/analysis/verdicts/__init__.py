"""From a run to its verdict. Each kind of verdict is one class in one module.

::

    dead stopped exhausted missing   a rank that others wait for and that waits for no other rank
    mismatch desync                  members of a group that do not issue the same call
    deadlock                         ranks that wait for each other
    no_progress                      ranks that wait without a record, or do nothing at all
    idle                             ranks that wait for work, such as the next request
    straggler slow_link              a rank or a link that slows a job that goes on
    kind                             the base class of all kinds, and two families of them
    facts finding sentences          what a finding states, and its words: all sentences are there
    encoding                         findings as JSON, and back
    evidence                         the input of the kinds: a hang's waits, a running job's times
    wait_graph disagreements         the parts of that evidence

To add a kind, write its module and put its class into ``KINDS``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from rankcall.analysis.run_snapshot import ProcessState, snapshot_of_run
from rankcall.analysis.snapshot import Snapshot
from rankcall.analysis.verdicts.dead import Dead
from rankcall.analysis.verdicts.deadlock import Deadlock
from rankcall.analysis.verdicts.desync import Desync
from rankcall.analysis.verdicts.encoding import sound_findings
from rankcall.analysis.verdicts.evidence import HANG_AFTER_S, hang_evidence
from rankcall.analysis.verdicts.exhausted import Exhausted
from rankcall.analysis.verdicts.facts import Fact, Relation, ranks_of
from rankcall.analysis.verdicts.finding import (
    CONFIDENCES,
    HEALTHY,
    Finding,
    less_sure,
)
from rankcall.analysis.verdicts.idle import Idle
from rankcall.analysis.verdicts.kind import CulpritKind, Kind
from rankcall.analysis.verdicts.mismatch import Mismatch
from rankcall.analysis.verdicts.missing import Missing
from rankcall.analysis.verdicts.no_progress import NoProgress
from rankcall.analysis.verdicts.recent_calls import recent_calls
from rankcall.analysis.verdicts.sentences import SHOWN, as_seen, evidence
from rankcall.analysis.verdicts.slow_link import SlowLink
from rankcall.analysis.verdicts.stopped import Stopped
from rankcall.analysis.verdicts.straggler import Straggler
from rankcall.analysis.verdicts.wording import name_place
from rankcall.run.frames import code_place
from rankcall.run.hangs import Object, kept_hangs, kept_stack, stacks_in
from rankcall.run.load import Progress, Run

KINDS: tuple[Kind, ...] = (
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
    culprits = [kind for kind in kinds if isinstance(kind, CulpritKind)]
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


_MARGIN_S = 0.5  # between a verdict and a call that shows that its hang was over
_LONGEST_S = 1e9  # a larger threshold is damage


@dataclass(frozen=True)
class Kept:
    """An earlier verdict of the job's own watcher, kept in ``place`` with ``stacks`` stacks.

    ``over_s`` is after how many seconds the hang passed; None if it did not.
    """

    place: str
    epoch_ns: int
    causes: tuple[tuple[str, tuple[int, ...]], ...]  # kind and ranks of each finding
    stacks: int
    over_s: float | None = None


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
    state_of: ProcessState | None = None,
    now_ns: Callable[[], int] = time.monotonic_ns,
) -> Diagnosis:
    """Read a run and find out what is wrong with it.

    ``hang_after``, in s: see ``verdicts.find``; None: the threshold of the job's own watcher. For
    the other arguments see ``snapshot_of_run``.
    """
    snapshot = snapshot_of_run(run, progress, state_of=state_of, now_ns=now_ns)
    diagnosis, verdicts = judge(run, snapshot, hang_after), kept_hangs(run.path)
    diagnosis = replace(diagnosis, kept=[kept_verdict(run, verdict) for verdict in verdicts])
    return (
        _as_the_watcher_saw(diagnosis, verdicts[-1])
        if verdicts and not snapshot.live
        else diagnosis
    )


def with_stacks(run: Run, diagnosis: Diagnosis, stacks: Mapping[int, str]) -> Diagnosis:
    """Judge again, with the Python stacks of some ranks as further evidence."""
    if not stacks:
        return diagnosis
    ranks = [
        replace(state, stack=stacks.get(state.rank, state.stack))
        for state in diagnosis.snapshot.ranks
    ]
    again = judge(run, replace(diagnosis.snapshot, ranks=ranks), diagnosis.hang_after)
    return replace(again, kept=diagnosis.kept)


def judge(run: Run, snapshot: Snapshot, hang_after: float | None = None) -> Diagnosis:
    """Find out what holds a job up or, if nothing does, what slows it."""
    patience = own_hang_after(run) if hang_after is None else hang_after
    findings = find(snapshot, patience) or find_slow(snapshot)
    return Diagnosis(str(run.source or run.path), snapshot, findings, patience)


def own_hang_after(run: Run) -> float:
    """Return the threshold of the job's own watcher, s; without a watcher the usual one."""
    in_rings = [head.header.hang_after_ms / 1e3 for head in run.heads if head.header.hang_after_ms]
    if in_rings and 0 < max(in_rings) < _LONGEST_S:
        return max(in_rings)
    hang_after_s = run.about.get("hang_after_s")
    if isinstance(hang_after_s, (int, float)) and 0 < hang_after_s < _LONGEST_S:
        return float(hang_after_s)
    return HANG_AFTER_S


def _as_the_watcher_saw(diagnosis: Diagnosis, verdict: Object) -> Diagnosis:
    """Add what the job's own watcher saw last to the diagnosis of a job that is over.

    The watcher saw live processes and their stacks, so its word on a rank counts for more than how
    that rank ended. It counts only if its hang lasted: no rank of its host has issued a call since.
    """
    snapshot, hang = diagnosis.snapshot, verdict["hang"]
    moment = snapshot.moments.get(str(hang.get("boot_id")))
    kinds = {kind.kind for kind in KINDS}
    seen = [finding for finding in sound_findings(verdict["findings"]) if finding.kind in kinds]
    if moment is None or not seen:
        return diagnosis
    since_s = (moment - int(hang.get("mono_ns", 0))) / 1e9
    if since_s < 0 or np.any(snapshot.calls["age_s"] < since_s - _MARGIN_S):
        return diagnosis
    diagnosis = replace(
        diagnosis,
        findings=[
            _with_places(snapshot, finding, verdict, since_s) for finding in diagnosis.findings
        ],
    )
    known = {(finding.kind, rank) for finding in diagnosis.findings for rank in finding.ranks}
    had_ended = {
        state.rank
        for state in snapshot.ranks
        if state.exit is not None and (state.gone_s or 0.0) > since_s + _MARGIN_S
    }
    new = [
        _seen(finding, since_s)
        for finding in seen
        if had_ended.isdisjoint(finding.ranks)
        and (not finding.ranks or any((finding.kind, rank) not in known for rank in finding.ranks))
    ]
    named = {rank for finding in new for rank in finding.ranks}
    everybody = {state.rank for state in snapshot.ranks if not state.blind}
    # An end of all ranks together is the end of the job, which did not cause the hang.
    rest = [
        finding
        for finding in diagnosis.findings
        if named.isdisjoint(finding.ranks) and not everybody <= {*finding.ranks, *named}
    ]
    if not new or (rest and not named):
        return diagnosis
    return replace(diagnosis, findings=[*new, *rest])


def _with_places(snapshot: Snapshot, finding: Finding, verdict: Object, since_s: float) -> Finding:
    """Add the lines at which the watcher saw a finding's ranks, if it kept their stacks."""
    if since_s > finding.since_s:
        return finding  # it looked before this began
    places = []
    for rank in finding.ranks[:SHOWN]:
        where = name_place(code_place(kept_stack(verdict, rank)))
        if where:
            ranks, values = ranks_of(snapshot, [rank]), (("place", where),)
            places.append(Fact(Relation.SEEN_AT, ranks, values=values, number=since_s, unit="s"))
    return replace(
        finding,
        evidence=(*finding.evidence, *evidence(places, snapshot.live)),
        facts=(*finding.facts, *places),
    )


def _seen(finding: Finding, since_s: float) -> Finding:
    """Return a finding of the watcher's as one about the past."""
    kinds = {kind.kind: kind for kind in KINDS}
    kind = kinds.get(finding.kind)
    return replace(
        finding,
        summary=as_seen(finding.summary, since_s),
        advice="" if kind is None else _past_advice(finding),
        stops=kind is None or kind.stops,
        is_fault=kind is None or kind.is_fault,
        predicate=finding.predicate if kind is None else kind.predicate,
    )


def _past_advice(finding: Finding) -> str:
    """Return the next step for a process that is gone."""
    if not finding.ranks:
        return "Look at the stacks that the watcher kept beside its verdict."
    return (
        f"Look at the stack of rank {finding.ranks[0]} that the watcher kept beside its verdict, "
        "and at what that rank does there."
    )


def kept_verdict(run: Run, verdict: Object) -> Kept:
    """Return a verdict from ``kept_hangs`` in short."""
    place = Path(verdict["place"])
    stacks = len(stacks_in(place))
    if run.source not in (None, run.path):  # an archive, extracted anywhere
        place = place.relative_to(run.path)
    causes = []
    for finding in verdict["findings"]:
        ranks = finding.get("ranks")
        ranks = [rank for rank in ranks if isinstance(rank, int)] if isinstance(ranks, list) else []
        causes.append((str(finding.get("kind")), tuple(ranks)))
    other_fields = verdict["hang"]["epoch_ns"], tuple(causes), stacks, verdict.get("over_s")
    return Kept(str(place), *other_fields)
