"""After a job: what is known of how its workers ended, and what the launcher says about it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from rankcall._hangs import id_of, text_of
from rankcall.analysis.diagnosis import diagnose
from rankcall.cli._engine import Outcome
from rankcall.errors import RankcallError
from rankcall.processes import Exit, note_exit, read_exits
from rankcall.report import diagnosis as diagnosis_report
from rankcall.ring.header import Header
from rankcall.run import load
from rankcall.watch import ABORT_STATUS, _verdict

_TERMINATED = -15  # how torchrun ends the workers that are left


def note_ends(run_dir: Path, outcome: Outcome, headers: Sequence[Header]) -> None:
    """Add to the run the ends that only torchrun has seen. Raises ``OSError``.

    ``headers`` are those of this node's rings. torchrun counts those among the failed that it
    ended itself because another had failed.
    """
    noted = {(each.rank, each.pid) for each in read_exits(run_dir)}
    asked = any(code != _TERMINATED for code in outcome.failed.values())
    for header in headers:
        code = outcome.failed.get((header.rank, header.pid))
        if code is not None and (header.rank, header.pid) not in noted:
            last = max(header.native_heartbeat_ns, header.python_heartbeat_ns, header.closed_ns)
            epoch_ns = header.anchor_epoch_ns + last - header.anchor_mono_ns
            by_launcher = asked and code == _TERMINATED
            about = header.rank, header.attempt, header.host, header.pid
            note_exit(run_dir, Exit(*about, code, epoch_ns, by_launcher))


def verdict_ids(run_dir: Path) -> frozenset[str]:
    """Return the ids of the verdicts that a run holds by now."""
    return frozenset(map(id_of, _verdict.written(run_dir)))


def verdict(
    run_dir: Path, outcome: Outcome, hang_after: float, told_before: Collection[str]
) -> str:
    """Return why workers failed, in words; empty if torchrun's own table says no less.

    ``told_before`` are the ids of the verdicts that the run held before the job.
    """
    if ABORT_STATUS in outcome.failed.values():
        told = [each for each in _verdict.written(run_dir) if id_of(each) not in told_before]
        if told:
            return f"{text_of(told[-1])}\nthe watcher ended the job: {told[-1]['place']}"
    try:
        found = diagnose(load(run_dir), hang_after)
    except (RankcallError, OSError):
        return ""
    return diagnosis_report.render(found) if found.findings else ""
