"""After the job: note the exits that only torchrun has read, and explain a failure."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rankcall.analysis.verdicts import diagnose
from rankcall.analysis.verdicts.kept import kept_in, whole_verdict
from rankcall.cli.common import say
from rankcall.cli.torchrun import TERMINATED, Outcome
from rankcall.errors import RankcallError
from rankcall.job.notices import notify
from rankcall.job.watcher import ABORT_STATUS
from rankcall.process import host_name
from rankcall.recovery.history import History, decided, history_of, note_end
from rankcall.recovery.policy import decide
from rankcall.report import diagnosis_text as diagnosis_report
from rankcall.ring.layout import Header
from rankcall.run.exits import Exit, note_exit, read_exits
from rankcall.run.load import Run, load
from rankcall.run.outcome import BARRED, DONE, REPEATS, JobFailure, JobOutcome, write_outcome
from rankcall.run.recoveries import read_recoveries

_ENDED_BY_POLICY = "the policy of restarts has ended the job"


def note_failures(run_dir: Path, outcome: Outcome, headers: Sequence[Header]) -> None:
    """Note in the run the exit codes that only torchrun has read.

    Args:
        run_dir: The run directory.
        outcome: How torchrun ended. It counts workers as failed that it ended itself after another
            worker had failed.
        headers: The headers of this node's rings.

    Raises:
        OSError: The run directory cannot be written.
    """
    ends = {
        (header.rank, header.pid): Exit(
            *(header.rank, header.attempt, header.host, header.pid),
            code=None,
            epoch_ns=header.last_sign_epoch_ns,
        )
        for header in headers
    }
    # A worker that failed before it made a process group has no ring, but its end was seen.
    ends |= {(known.rank, known.pid): known for known in read_exits(run_dir)}
    others_failed = any(code != TERMINATED for code in outcome.failed.values())
    attempt = max((known.attempt for known in ends.values()), default=0)
    # torchrun ends the others once it has seen a failure.
    first_ns = min(
        (known.epoch_ns for known in ends.values() if known.attempt == attempt),
        default=time.time_ns(),
    )
    for process, code in outcome.failed.items():
        if process not in ends:  # gone before anybody had seen that it was a worker
            ends[process] = Exit(process[0], attempt, host_name(), process[1], None, first_ns)
        if ends[process].code is None:
            by_launcher = others_failed and code == TERMINATED
            note_exit(run_dir, replace(ends[process], code=code, by_launcher=by_launcher))


def note_own_exit(run: Run, pid: int, code: int) -> None:
    """Note how a child of this process ended, if it is itself a rank of the run.

    The note is lost if the run directory cannot be written.
    """
    for header in (head.header for head in run.heads):
        if header.pid == pid and header.process_state() == "gone":  # not "unknown": of this host
            process = header.rank, header.attempt, header.host, header.pid
            with contextlib.suppress(OSError):
                note_exit(run.path, Exit(*process, code, time.time_ns()))


def keep_outcome(run_dir: Path, status: int, began_ns: int, *, was_asked: bool = False) -> None:
    """Tell how the job ended, for the program that decides whether to start it again.

    It is written into the run, and sent to the receiver of notices if there is one.

    Args:
        run_dir: The run directory.
        status: The exit status of the command; negative for a signal.
        began_ns: When the command began, in ns since the epoch.
        was_asked: Whether a signal or Ctrl-C asked the job to end.
    """
    try:
        run = load(run_dir, exits_only=True)
        history = history_of(run) if status != DONE and not was_asked else None
    except (RankcallError, OSError):  # no rank made a ring, or the run was removed
        run, history = None, None
    failure = None
    if history is not None:
        hosts = {
            head.header.host
            for head in (run.heads if run else ())
            if head.header.rank in history.end.culprits
        }
        failure = JobFailure.of(history.end, hosts)
    outcome, helps, reason = _meaning(status, history, was_asked=was_asked)
    failures = 0 if history is None else len(history.case.earlier) + 1
    ended = JobOutcome(
        status=status,
        outcome=outcome,
        restart_helps=helps,
        reason=reason,
        failure=failure,
        failures=failures,
        host=host_name(),
        ended_epoch_ns=time.time_ns(),
    )
    notify("ended", run_dir, asdict(ended))
    try:
        write_outcome(run_dir, ended, began_ns)
        if history is not None and not history.is_supervised:
            note_end(run_dir, history)
    except OSError as error:
        say(f"cannot write how the job ended into {run_dir}: {error.strerror}")


def _meaning(
    status: int, history: History | None, *, was_asked: bool
) -> tuple[str, bool | None, str]:
    """Return what a status says: in one word, whether a restart may help, and why."""
    if status == DONE:
        return "done", False, "the job has ended well"
    if was_asked:
        return "interrupted", None, "a signal asked the job to end"
    if status == BARRED:
        return "barred", False, "this node is barred from the job, which goes on without it"
    decision = decide(history.case) if history is not None else None
    if status == REPEATS:
        known = decision is not None and decision.stops
        reason = decision.reason if decision is not None and known else _ENDED_BY_POLICY
        return "repeats", False, reason
    if decision is None:
        return "failed", None, "it is not known what failed"
    return "failed", not decision.stops, decision.reason


def verdict_ids(run_dir: Path) -> frozenset[str]:
    """Return the ids of the verdicts that a run has now."""
    return frozenset(kept.verdict.origin.id for kept in kept_in(run_dir))


def explain_failure(
    run_dir: Path, outcome: Outcome, hang_after: float, earlier_ids: Collection[str]
) -> str:
    """Return a text that says why workers failed.

    Args:
        run_dir: The run directory.
        outcome: How torchrun ended.
        hang_after: Seconds after which a call counts as hung.
        earlier_ids: The ids of the verdicts that the run had before the job.

    Returns:
        The text, or "" if torchrun's own table says as much.
    """
    new = [kept for kept in kept_in(run_dir) if kept.verdict.origin.id not in earlier_ids]
    if outcome.status == REPEATS:  # the verdict said more than can be seen of processes that ended
        last = [end.verdict for end in decided(read_recoveries(run_dir))[-1:]]
        new = [kept for kept in new if kept.folder.name in last]
    if new and (outcome.status == REPEATS or ABORT_STATUS in outcome.failed.values()):
        text = diagnosis_report.diagnosis_text(whole_verdict(new[-1]))
        return f"{text}\nthe watcher ended the job: {new[-1].folder}"
    try:
        diagnosis = diagnose(load(run_dir, exits_only=True), hang_after)
    except (RankcallError, OSError):
        return ""
    return diagnosis_report.diagnosis_text(diagnosis) if diagnosis.findings else ""
