"""What a program can ask about the attempt before its own."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from rankcall.run.recoveries import previous_end
from rankcall.whole_numbers import whole_number


@dataclass(frozen=True)
class PreviousAttempt:
    """Why this attempt of the job exists: how the one before it ended.

    Attributes:
        verdict: The kind of the verdict, such as ``missing``, ``stopped`` or ``dead``.
        culprits: The ranks at fault; none if no rank is named.
        summary: The verdict in a sentence.
        step: The step that the job had reached: the optimizer steps since the last checkpoint that
            ``rankcall.checkpointed`` has told of are added to its step. Without one, these are the
            steps of that attempt alone.
        lost_steps: The steps since the last checkpoint; None if the program has told of none.
        downtime_s: For how long nothing has gone on, until this call, in seconds.
        restarts: How often the job has been restarted, this time included.
        reason: Why the job was restarted, and not ended.
    """

    verdict: str
    culprits: tuple[int, ...]
    summary: str
    step: int
    lost_steps: int | None
    downtime_s: float
    restarts: int
    reason: str


def previous_attempt() -> PreviousAttempt | None:
    """Return how the attempt before this one ended; None in the first one.

    It works from the start of the program on, below ``rankcall run`` or ``rankcall exec`` with
    ``--on-hang recover``, in every worker. If another node failed, only the time is known here,
    and the result is None if this node's launcher was started after that.
    """
    restart = whole_number(os.environ.get("TORCHELASTIC_RESTART_COUNT", ""))
    end = previous_end() if restart else None
    if end is None or not restart:
        return None
    since_ns = end.fault_ns or end.noticed_ns
    return PreviousAttempt(
        end.signature.kind,
        end.culprits,
        end.summary,
        end.step,
        end.lost if end.lost >= 0 else None,
        max(0.0, (time.time_ns() - since_ns) / 1e9),
        restart,
        end.reason,
    )
