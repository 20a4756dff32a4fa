"""What the job's own watcher saw, for the diagnosis of a job that is over, or hangs since then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rankcall.analysis.snapshot import Snapshot
from rankcall.analysis.verdicts.diagnosis import Diagnosis
from rankcall.analysis.verdicts.facts import Fact, Relation, place_of, ranks_of
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.kind import CulpritKind, Kind
from rankcall.analysis.verdicts.over import lasted
from rankcall.analysis.verdicts.sentences import SHOWN, as_seen, as_still_seen, evidence, summary
from rankcall.analysis.verdicts.verdict import Kept
from rankcall.run.frames import code_place
from rankcall.run.hangs import kept_stack

_MOST_READ = 64  # ranks whose kept stacks are compared
# What a summary says after the place: whom the ranks hold up, and why they did not come.
_AFTER_THE_PLACE = (Relation.HELD_UP, Relation.HELD_UP_ELSEWHERE, Relation.ABSENT_BECAUSE)
_MARGIN_S = 0.5  # between a verdict and a call that shows that its hang was over


def as_the_watcher_saw(diagnosis: Diagnosis, kinds: Mapping[str, Kind]) -> Diagnosis:
    """Add what the job's own watcher saw last to the diagnosis of a job that is over.

    The watcher saw live processes and their stacks, so its word on a rank counts for more than how
    that rank ended. It counts only if what it saw lasted until the end.

    Args:
        diagnosis: What the records and the ends of the processes show; with the verdicts that the
            watcher kept.
        kinds: All kinds by their names; findings of other kinds are left out.
    """
    snapshot = diagnosis.snapshot
    for newest in reversed(diagnosis.kept):
        since_s = _seconds_since(snapshot, newest)
        if since_s is None:
            continue
        seen = [
            finding
            for finding in newest.verdict.findings
            if finding.kind in kinds and lasted(snapshot, finding, since_s - _MARGIN_S)
        ]
        if seen:
            return _with_seen(diagnosis, newest, seen, since_s, kinds)
    return diagnosis


def while_it_lasts(diagnosis: Diagnosis, kinds: Mapping[str, Kind]) -> Diagnosis:
    """Give the newest verdict of the job's own watcher again, if what it saw has lasted until now.

    The watcher needs no threshold for calls that can never end, because it looks twice.

    Args:
        diagnosis: Of a running job in which no call counts as hung yet.
        kinds: As in ``as_the_watcher_saw``. Whether a process is stopped is seen without a kept
            verdict, so a verdict that says so is not given again.
    """
    for newest in reversed(diagnosis.kept):
        since_s = _seconds_since(diagnosis.snapshot, newest)
        if since_s is None or newest.over_s is not None:
            continue
        seen = [
            replace(
                finding,
                summary=as_still_seen(finding.summary, since_s),
                since_s=finding.since_s + since_s,
                stops=kinds[finding.kind].stops,
                is_fault=kinds[finding.kind].is_fault,
                predicate=kinds[finding.kind].predicate,
            )
            for finding in newest.verdict.findings
            if finding.kind in kinds
            and finding.kind != "stopped"
            and lasted(diagnosis.snapshot, finding, since_s)
        ]
        if seen:
            return replace(diagnosis, findings=seen)
    return diagnosis


def _seconds_since(snapshot: Snapshot, kept: Kept) -> float | None:
    """Return how long before the end, or before now, a verdict was given; None: not known."""
    origin = kept.verdict.origin
    moment = snapshot.moments.get(origin.boot_id)
    if moment is None or moment < origin.mono_ns:
        return None
    return (moment - origin.mono_ns) / 1e9


def _with_seen(
    diagnosis: Diagnosis,
    newest: Kept,
    seen: Sequence[Finding],
    since_s: float,
    kinds: Mapping[str, Kind],
) -> Diagnosis:
    """Add what the watcher saw, and what lasted, to the diagnosis of a job that is over."""
    snapshot = diagnosis.snapshot
    diagnosis = replace(
        diagnosis,
        findings=[
            _with_places(snapshot, finding, kinds.get(finding.kind), newest.folder, since_s)
            for finding in diagnosis.findings
        ],
    )
    known = {(finding.kind, rank) for finding in diagnosis.findings for rank in finding.ranks}
    had_ended = {
        state.rank
        for state in snapshot.ranks
        if state.exit is not None and (state.gone_s or 0.0) > since_s + _MARGIN_S
    }
    new = [
        _seen(snapshot, finding, kinds[finding.kind], newest.folder, since_s)
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


def _with_places(
    snapshot: Snapshot, finding: Finding, kind: Kind | None, folder: Path, since_s: float
) -> Finding:
    """Add the lines at which the watcher saw a finding's ranks, if it kept their stacks.

    If the finding says where its ranks were, it says that they were there.
    """
    if since_s > finding.since_s:
        return finding  # it looked before this began
    finding = _at_the_seen_place(snapshot, finding, kind, folder, since_s)
    places = []
    for rank in finding.ranks[:SHOWN]:
        values, ranks = place_of(code_place(kept_stack(folder, rank))), ranks_of(snapshot, [rank])
        if values:
            places.append(Fact(Relation.SEEN_AT, ranks, values=values, number=since_s, unit="s"))
    return replace(
        finding,
        evidence=(*finding.evidence, *evidence(places, snapshot.live)),
        facts=(*finding.facts, *places),
    )


def _at_the_seen_place(
    snapshot: Snapshot, finding: Finding, kind: Kind | None, folder: Path, since_s: float
) -> Finding:
    """Return a finding about ranks that did not come with the one line at which they all were."""
    state = finding.facts[0] if finding.facts else None
    if state is None or state.relation is not Relation.NOT_COME or len(finding.ranks) > _MOST_READ:
        return finding
    places = {code_place(kept_stack(folder, rank)) for rank in finding.ranks}
    values = place_of(places.pop()) if len(places) == 1 else ()
    if not values:
        return finding
    there = replace(state, values=(*values, ("seen_s", repr(since_s))))
    said = [fact for fact in finding.facts if fact.relation in _AFTER_THE_PLACE]
    return replace(
        finding,
        summary=summary([there, *said], snapshot.live),
        advice=_advice_at_places(snapshot, finding, kind, folder) or finding.advice,
        facts=(there, *finding.facts[1:]),
    )


def _seen(
    snapshot: Snapshot, finding: Finding, kind: Kind, folder: Path, since_s: float
) -> Finding:
    """Return a finding of the watcher's as one about the past."""
    return replace(
        finding,
        summary=as_seen(finding.summary, since_s),
        advice=_advice_at_places(snapshot, finding, kind, folder) or _past_advice(finding),
        stops=kind.stops,
        is_fault=kind.is_fault,
        predicate=kind.predicate,
    )


def _advice_at_places(snapshot: Snapshot, finding: Finding, kind: Kind | None, folder: Path) -> str:
    """Return the next step that the kept stacks of the ranks demand; empty if they demand none.

    For example, a rank that was in ``new_group`` still tells that all must call it.
    """
    if not isinstance(kind, CulpritKind) or len(finding.ranks) > _MOST_READ:
        return ""
    states = [snapshot.ranks[rank] for rank in finding.ranks if rank < len(snapshot.ranks)]
    seen = [replace(state, stack=kept_stack(folder, state.rank)) for state in states]
    if not any(state.stack for state in seen):
        return ""
    advice = kind.advice(snapshot, seen)
    return "" if advice == kind.advice(snapshot, states) else advice


def _past_advice(finding: Finding) -> str:
    """Return the next step for a process that is gone."""
    if not finding.ranks:
        return "Look at the stacks that the watcher kept beside its verdict."
    return (
        f"Look at the stack of rank {finding.ranks[0]} that the watcher kept beside its verdict, "
        "and at what that rank does there."
    )
