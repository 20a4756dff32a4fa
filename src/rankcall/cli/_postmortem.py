"""After a job: note how its workers ended, and explain why they failed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from rankcall._hangs import id_of, text_of
from rankcall.analysis.diagnosis import diagnose
from rankcall.cli._torchrun import Outcome
from rankcall.errors import RankcallError
from rankcall.processes import Exit, note_exit, read_exits
from rankcall.report import diagnosis as diagnosis_report
from rankcall.ring.header import Header
from rankcall.run import load
from rankcall.watch import ABORT_STATUS, _verdict

_TERMINATED = -15  # torchrun ends the remaining workers with SIGTERM


def note_ends(run_dir: Path, outcome: Outcome, headers: Sequence[Header]) -> None:
    """Note in the run the exits that only torchrun has seen.

    Args:
        run_dir: The run directory.
        outcome: How torchrun ended. It counts workers as failed that it ended itself after another
            worker had failed.
        headers: The headers of this node's rings.

    Raises:
        OSError: The run directory cannot be written.
    """
    noted = {(known.rank, known.pid) for known in read_exits(run_dir)}
    others_failed = any(code != _TERMINATED for code in outcome.failed.values())
    for header in headers:
        code = outcome.failed.get((header.rank, header.pid))
        if code is not None and (header.rank, header.pid) not in noted:
            last = max(header.native_heartbeat_ns, header.python_heartbeat_ns, header.closed_ns)
            epoch_ns = header.anchor_epoch_ns + last - header.anchor_mono_ns
            by_launcher = others_failed and code == _TERMINATED
            process = header.rank, header.attempt, header.host, header.pid
            note_exit(run_dir, Exit(*process, code, epoch_ns, by_launcher))


def verdict_ids(run_dir: Path) -> frozenset[str]:
    """Return the ids of the verdicts that a run has now."""
    return frozenset(map(id_of, _verdict.written(run_dir)))


def verdict(
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
    if ABORT_STATUS in outcome.failed.values():
        new = [kept for kept in _verdict.written(run_dir) if id_of(kept) not in earlier_ids]
        if new:
            return f"{text_of(new[-1])}\nthe watcher ended the job: {new[-1]['place']}"
    try:
        diagnosis = diagnose(load(run_dir), hang_after)
    except (RankcallError, OSError):
        return ""
    return diagnosis_report.render(diagnosis) if diagnosis.findings else ""
