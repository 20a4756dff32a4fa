"""How a job ended, for the program that decides whether to start it again: ``outcome.json``.

``docs/outcome.md`` describes the file for its readers. Each launcher writes it when its job has
ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from rankcall.files import open_file, write_private
from rankcall.run.recoveries import AttemptEnd

OUTCOME = "outcome.json"
SCHEMA = 1
# The exit statuses that rankcall gives itself. All others are the launcher's, or the command's.
DONE = 0
REPEATS = 65  # EX_DATAERR of sysexits.h: the same input will fail again
BARRED = 69  # EX_UNAVAILABLE
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class JobFailure:
    """What failed last. See ``docs/outcome.md``."""

    kind: str
    family: str
    op: str
    line: str
    role: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    step: int | None
    lost_steps: int | None
    summary: str

    @classmethod
    def of(cls, end: AttemptEnd, hosts: Iterable[str]) -> JobFailure:
        """Return for readers of other programs what ended an attempt; -1 is an unknown step."""
        signature = end.signature
        return cls(
            kind=signature.kind,
            family=end.family,
            op=signature.op,
            line=signature.line,
            role=signature.role,
            ranks=tuple(end.culprits),
            hosts=tuple(sorted(hosts)),
            step=end.step if end.step >= 0 else None,
            lost_steps=end.lost if end.lost >= 0 else None,
            summary=end.summary,
        )


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended, as one launcher saw it. See ``docs/outcome.md``."""

    status: int
    outcome: str
    restart_helps: bool | None
    reason: str
    failure: JobFailure | None
    failures: int
    host: str
    ended_epoch_ns: int
    schema: int = SCHEMA


def write_outcome(run_dir: Path, outcome: JobOutcome, began_ns: int) -> None:
    """Write how the job ended. Raises ``OSError``.

    Several nodes may share the run. If the policy of one has ended the job, the others end with
    torchrun's status, and must not hide the reason.

    Args:
        run_dir: The run directory.
        outcome: How the job ended.
        began_ns: When this launcher began, in ns since the epoch.
    """
    known_status, known_ns = _known(run_dir)
    if known_status == REPEATS != outcome.status and known_ns >= began_ns:
        return
    content = {"schema": outcome.schema, **asdict(outcome)}
    write_private(run_dir / OUTCOME, json.dumps(content, indent=1).encode() + b"\n")


def _known(run_dir: Path) -> tuple[int, int]:
    """Return the status and the time in the file that is there."""
    try:
        with open_file(run_dir / OUTCOME) as file:
            content = json.loads(file.read(_MOST_BYTES))
        return int(content["status"]), int(content["ended_epoch_ns"])
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return 0, 0
