"""What ended an attempt: from the run's verdicts, records and exit statuses to one failure."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rankcall.analysis.snapshot import COMPLETED
from rankcall.analysis.verdicts import diagnose
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.kept import kept_in
from rankcall.analysis.verdicts.verdict import Kept
from rankcall.errors import AuthenticationError, RankcallError
from rankcall.job.news import leaves_open
from rankcall.job.sealing import job_secret
from rankcall.problems import Problem
from rankcall.recovery.policy import UNCLEAR, Failure, family_of, is_of_peer
from rankcall.ring.layout import Header, read_header
from rankcall.ring.reader import read_ring
from rankcall.run.exits import read_exits
from rankcall.run.hangs import kept_at_ns
from rankcall.run.load import Run, load
from rankcall.run.paths import ring_paths
from rankcall.run.recoveries import AttemptEnd, Signature

# What differs between two failures of one kind: addresses, ports, sizes, times, file descriptors.
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_MOST_LINE = 200  # characters
_NEWEST = 256  # calls of a rank, in which one is looked for that ended after a verdict


@dataclass(frozen=True)
class Attempt:
    """An attempt as its agent knows it.

    Attributes:
        pids: The workers of this node, by rank. The process of a rank may be another one, which
            the worker started, if the worker is a shell script.
        world_size: The number of ranks of the job.
        host: The host of these workers; empty: any.
        started_ns: When the workers were started, in ns since the epoch.
        known_verdicts: The ids of the verdicts that the run had before.
        codes: How workers ended that ended first, by rank: exit statuses, or negative signals.
        noticed_ns: When the agent saw that, in ns since the epoch.
    """

    pids: Mapping[int, int] = field(default_factory=dict)
    world_size: int = 0
    host: str = ""
    started_ns: int = 0
    known_verdicts: Collection[str] = ()
    codes: Mapping[int, int] = field(default_factory=dict)
    noticed_ns: int = 0


@dataclass(frozen=True)
class Cause:
    """What ended an attempt. Times are in ns since the epoch; 0: not known."""

    signature: Signature
    family: str
    culprits: tuple[int, ...]
    summary: str
    steps: int  # that the attempt took
    saved: int  # the step that the program last said it saved; -1: it did not
    since_saved: int  # the steps since then
    fault_ns: int
    verdict_ns: int
    ended_ns: int
    verdict: str
    is_own: bool = True  # False: the error says that a connection to another rank broke

    def reached(self, saved: int, earlier: Sequence[Failure]) -> tuple[int, bool]:
        """Return the step that the job has reached, and whether none of the failures was so late.

        Each process counts its own steps. The step of the job is known once a program has said
        which one it saved: an attempt goes on from the newest checkpoint.

        Args:
            saved: The step from which this attempt went on; -1 if it is not known.
            earlier: The failures before this one.
        """
        if self.saved < 0 and saved < 0:
            return self.steps, self.steps > 0
        step = self.saved + self.since_saved if self.saved >= 0 else saved + self.steps
        return step, step > max((failure.step for failure in earlier), default=0)

    def as_end(self, restart: int, step: int, *, lost: int, progressed: bool) -> AttemptEnd:
        """Return what is noted of it, but for what only the agent knows: its decision."""
        return AttemptEnd(
            restart,
            self.signature,
            self.family,
            self.culprits,
            self.summary,
            step=step,
            steps=self.steps,
            lost=lost,
            progressed=progressed,
            fault_ns=max(0, self.fault_ns),
            verdict_ns=self.verdict_ns,
            ended_ns=self.ended_ns,
            verdict=self.verdict,
        )


def failure_of(end: AttemptEnd, seconds: float, *, by_window: bool) -> Failure:
    """Return a failure that was noted as the policy sees it (``Failure`` has the arguments)."""
    return Failure(end.signature, end.family, end.step, end.progressed, seconds, by_window)


def cause_of(run_dir: Path, attempt: Attempt) -> Cause:
    """Return what ended an attempt whose workers are gone.

    The watchers' verdict counts first: what follows it are consequences. Without one, the records
    and the exit statuses tell. A worker that ended before it recorded leaves its status alone.
    """
    headers = _headers(run_dir, attempt)
    kept = _new_verdict(run_dir, attempt)
    if kept is not None and _is_trusted(run_dir, attempt, headers):
        return _cause_by(kept, run_dir, attempt, headers)
    ended_ns = _first_end_ns(run_dir, attempt)
    fault_ns = ended_ns or attempt.noticed_ns
    recorded = _finding(run_dir) if headers else None
    finding = _by_status(attempt) if recorded is None else recorded
    return _cause(finding, attempt, headers, (fault_ns, 0, ended_ns), "")


def cause_elsewhere(run_dir: Path, attempt: Attempt, kind: str) -> Cause:
    """Return why workers of this node were ended of which none has failed.

    The launcher ended them, so neither their exit statuses nor their records say who is at fault. A
    verdict of all nodes does, if there is one. One that nothing on this node confirms counts only
    if it names this node, whose watchers may have no call that could confirm that, and if its ranks
    do not contradict it: those that it names held nobody up if they have ended later calls.

    Args:
        run_dir: The run directory.
        attempt: The attempt.
        kind: What to call it without a verdict.
    """
    rings = _rings(run_dir, attempt)
    headers = {rank: header for rank, (_, header) in rings.items()}
    kept = _new_verdict(run_dir, attempt)
    if kept is not None:
        named = [rank for rank in kept.verdict.findings[0].ranks if rank in attempt.pids]
        is_on_us = bool(named) and not _have_gone_on(kept, [rings.get(rank) for rank in named])
        if is_on_us or _is_trusted(run_dir, attempt, headers):
            return _cause_by(kept, run_dir, attempt, headers)
    progress = _progress(headers.values())
    return Cause(Signature(kind), UNCLEAR, (), "", *progress, attempt.noticed_ns, 0, 0, "")


def cause_in(run: Run) -> Cause | None:
    """Return what ended the last attempt of a run that nobody supervised; None if nothing did."""
    last = max((head.header.attempt for head in run.heads), default=0)
    headers = [head.header for head in run.heads if head.header.attempt == last]
    pids = {header.rank: header.pid for header in headers}
    started_ns = min((header.anchor_epoch_ns for header in headers), default=0)
    # Another job may have been recorded into the same directory before.
    known = {
        kept.verdict.origin.id
        for kept in kept_in(run.path)
        if kept.verdict.origin.epoch_ns < started_ns
    }
    codes = {
        ended.rank: ended.code
        for ended in read_exits(run.path)
        if ended.code and ended.pid in pids.values() and not ended.by_launcher
    }
    attempt = Attempt(
        pids, run.world_size, started_ns=started_ns, known_verdicts=known, codes=codes
    )
    cause = cause_of(run.path, attempt)
    return cause if cause.verdict or codes or cause.culprits else None


def _headers(run_dir: Path, attempt: Attempt) -> dict[int, Header]:
    return {rank: header for rank, (_, header) in _rings(run_dir, attempt).items()}


def _rings(run_dir: Path, attempt: Attempt) -> dict[int, tuple[Path, Header]]:
    """Return the rings of an attempt's workers with their headers, by rank; the newest of each.

    A pid is no key: containers that share a run may number their processes alike, and a worker that
    is a shell script has no ring, but a child of it has.
    """
    problems: list[Problem] = []
    rings = [
        (path, header)
        for path in ring_paths(run_dir, problems)
        if (header := read_header(path)) is not None
    ]
    return {
        header.rank: (path, header)
        for path, header in sorted(rings, key=lambda ring: ring[1].anchor_epoch_ns)
        if header.rank in attempt.pids
        and attempt.host in ("", header.host)
        and header.anchor_epoch_ns >= attempt.started_ns
    }


def _new_verdict(run_dir: Path, attempt: Attempt) -> Kept | None:
    """Return the newest verdict about a hang of this attempt that did not pass; None without."""
    new = [
        kept
        for kept in _new_verdicts(run_dir, attempt)
        if kept.over_s is None and kept.verdict.stops
    ]
    return new[-1] if new else None


def _new_verdicts(run_dir: Path, attempt: Attempt) -> list[Kept]:
    known = attempt.known_verdicts
    return [kept for kept in kept_in(run_dir) if kept.verdict.origin.id not in known]


def _is_trusted(run_dir: Path, attempt: Attempt, headers: Mapping[int, Header]) -> bool:
    """Return whether the newest verdict of this attempt may be taken for the cause of its end.

    The verdict of several nodes comes from the job's store. Without a secret, any process that
    reaches the store can have written it, and this node's watchers act on it only if their own
    rings confirm it. They count it then. So they have acted on all if they count as many as there
    are; earlier ones may have been about hangs that passed.
    """
    if not 0 < len(attempt.pids) < attempt.world_size or _has_secret():
        return True
    to_act_on = [
        kept
        for kept in _new_verdicts(run_dir, attempt)
        if kept.verdict.stops and not leaves_open(kept.verdict.findings)
    ]
    return sum(header.verdicts for header in headers.values()) >= max(1, len(to_act_on))


def _have_gone_on(kept: Kept, rings: Sequence[tuple[Path, Header] | None]) -> bool:
    """Return whether each of these ranks issued a call after a verdict was kept, and ended it.

    A call that failed does not count: a rank that wakes up when the others are gone has one.
    """
    try:
        since_ns = kept_at_ns(kept.folder)
        return all(ring is not None and _has_ended_call(*ring, since_ns) for ring in rings)
    except (OSError, RankcallError):
        return False


def _has_ended_call(path: Path, header: Header, since_ns: int) -> bool:
    calls = read_ring(path, newest=_NEWEST).records
    since = since_ns - header.anchor_epoch_ns + header.anchor_mono_ns
    issued = calls["enqueued_ns"].astype(np.int64)
    return bool(np.any((issued > since) & (calls["status"] == COMPLETED)))


def _has_secret() -> bool:
    try:
        return job_secret() is not None
    except AuthenticationError:
        return False


def _first_end_ns(run_dir: Path, attempt: Attempt) -> int:
    """Return when the first of this node's workers ended badly; 0 if no note says so."""
    ends = [
        ended.epoch_ns
        for ended in read_exits(run_dir)
        if ended.rank in attempt.pids
        and attempt.host in ("", ended.host)
        and ended.epoch_ns >= attempt.started_ns
        and ended.code not in (None, 0)
    ]
    return min(ends, default=0)


def _finding(run_dir: Path) -> Finding | None:
    with contextlib.suppress(RankcallError, OSError):
        causes = [finding for finding in diagnose(load(run_dir)).findings if finding.stops]
        return causes[0] if causes else None
    return None


def _by_status(attempt: Attempt) -> Finding:
    """Return a finding for workers that left no records: their exit statuses are all we know."""
    ranks = tuple(sorted(attempt.codes))
    codes = sorted(set(attempt.codes.values()))
    how = " and ".join(
        f"signal {-code}" if code < 0 else f"exit status {code}" for code in codes[:3]
    )
    workers = "A worker" if len(ranks) == 1 else f"{len(ranks)} workers"
    text = f"{workers} of this node ended with {how or 'an unknown status'}, without records."
    return Finding("dead", ranks, summary=text, call_site=how)


def _cause_by(kept: Kept, run_dir: Path, attempt: Attempt, headers: Mapping[int, Header]) -> Cause:
    """Return the cause that a verdict tells."""
    finding, made_ns = kept.verdict.findings[0], kept.verdict.origin.epoch_ns
    fault_ns = made_ns - int(finding.since_s * 1e9)
    times = fault_ns, made_ns, _first_end_ns(run_dir, attempt)
    return _cause(finding, attempt, headers, times, kept.folder.name)


def _cause(
    finding: Finding,
    attempt: Attempt,
    headers: Mapping[int, Header],
    times: tuple[int, int, int],
    verdict: str,
) -> Cause:
    culprits = finding.ranks
    errors = [headers[rank].failure for rank in culprits if rank in headers]
    error = next((text for text in errors if text), "")
    if not verdict and not errors:
        error = _lost_peer(attempt, headers)
    code = next((attempt.codes[rank] for rank in culprits if rank in attempt.codes), None)
    line = finding.culprit_line or finding.call_site
    if finding.kind == "dead":
        line = " ".join(part for part in (_NUMBERS.sub("N", error), line) if part)
    signature = Signature(
        finding.kind, finding.op, line[:_MOST_LINE], _role(culprits, attempt.world_size)
    )
    certain = finding.confidence == "certain"
    family = family_of(finding.kind, None if verdict else code, error, certain=certain)
    progress = _progress(headers.values())
    return Cause(
        *(signature, family, culprits, finding.summary, *progress, *times),
        verdict=verdict,
        is_own=bool(verdict) or not is_of_peer(error),
    )


def _lost_peer(attempt: Attempt, headers: Mapping[int, Header]) -> str:
    """Return the error of this node's workers if it only says that a peer was gone; else ''.

    If another node's workers are killed, this node has no records of them, and names those that it
    waited for. Without this error it would not be clear what is at fault, and a job that loses one
    machine after the other would end as one whose program fails again and again.
    """
    errors = [headers[rank].failure for rank in attempt.codes if rank in headers]
    known = [text for text in errors if text]
    return known[0] if known and all(map(is_of_peer, known)) else ""


def _progress(headers: Collection[Header]) -> tuple[int, int, int]:
    """Return the steps that ranks took, the step that was saved last, and the steps since then.

    One rank may save for all, and the ranks may be a step apart.
    """
    steps = max((header.step for header in headers), default=0)
    saved = max(((header.saved, header.saved_at) for header in headers), default=(0, 0))
    return steps, saved[0] - 1, max(0, steps - saved[1]) if saved[0] else 0


def _role(culprits: Sequence[int], world_size: int) -> str:
    """Return the part of these ranks in the job: a restart may give a host another rank."""
    if tuple(culprits) == (0,):
        return "rank 0"
    if not culprits or len(culprits) >= world_size > 0:
        return "all ranks"
    return "one rank" if len(culprits) == 1 else "some ranks"
