"""After a job: what is known of how its workers ended, and what the launcher says about it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rankcall.analysis.diagnosis import diagnose
from rankcall.cli._engine import Outcome
from rankcall.errors import RankcallError
from rankcall.processes import Exit, note_exit
from rankcall.ring.reader import Header
from rankcall.run import load
from rankcall.watch import ABORT_STATUS, _verdict

_TERMINATED = -15  # how torchrun ends the workers that are left


def note_ends(run_dir: Path, outcome: Outcome, headers: Sequence[Header]) -> None:
    """Write into the run how this node's workers ended. Raises ``OSError``.

    ``headers`` are those of their rings; torchrun says who failed, and it ended those of the rest
    that did not leave of their own accord.
    """
    failed = {(each.rank, each.pid): each for each in outcome.failed}
    # torchrun counts those among the failed that it ended itself because another had failed.
    asked = any(each.code != _TERMINATED for each in outcome.failed)
    attempt = max((header.attempt for header in headers), default=0)
    for header in headers:
        failure = failed.get((header.rank, header.pid))
        about = header.rank, header.attempt, header.host, header.pid
        if failure is not None:
            by_launcher = asked and failure.code == _TERMINATED
            note_exit(run_dir, Exit(*about, failure.code, failure.epoch_ns, by_launcher))
        elif outcome.status and header.attempt == attempt and not header.closed_ns:
            last = max(header.native_heartbeat_ns, header.python_heartbeat_ns)
            epoch_ns = header.anchor_epoch_ns + last - header.anchor_mono_ns
            note_exit(run_dir, Exit(*about, _TERMINATED, epoch_ns, by_launcher=True))


def verdict(run_dir: Path, outcome: Outcome, hang_after: float, began_ns: int) -> str:
    """Return why workers failed, in words; empty where torchrun's own table says no less."""
    if any(each.code == ABORT_STATUS for each in outcome.failed):
        told = _verdict.written(run_dir, began_ns)
        if told:
            return f"{_verdict.text_of(told[-1])}\nthe watcher ended the job: {told[-1]['place']}"
    try:
        found = diagnose(load(run_dir), hang_after)
    except (RankcallError, OSError):
        return ""
    return _verdict.text(found) if found.findings else ""
