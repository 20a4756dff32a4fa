"""From what logs say about a failure to its verdict.

A log has only what ranks wrote when they failed, and most of them are victims. So a rank is named
only for one of these reasons:

* torch itself compared the ranks: a mismatch or a monitored barrier of DETAIL mode, a report of
  TORCH_NCCL_DESYNC_DEBUG; or watchdogs wrote different calls of one number (``comparing``);
* NCCL wrote different calls of one number of a communicator (``enqueued``);
* Horovod compared which ops each rank has submitted (``stalls``);
* its process was killed, or its own device or exception ended it, and that does not follow from
  another rank (``failures``);
* it wrote that its last collective in a group is older than the one that others timed out in
  (``comparing``).

If no reason holds, the verdict is ``undecided``, and says what is known. ``nothing_found`` is only
said of a log in which no known message reports a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rankcall.analysis.logs.case import NOTHING, UNDECIDED, Case
from rankcall.analysis.logs.comparing import absent, behind, different, lagging, mismatch, models
from rankcall.analysis.logs.enqueued import enqueued_differently
from rankcall.analysis.logs.failures import dead
from rankcall.analysis.logs.stalls import not_submitted
from rankcall.analysis.logs.undecided import undecided
from rankcall.analysis.verdicts.verdict import Verdict
from rankcall.analysis.verdicts.wording import count_of
from rankcall.imports.logs.job import read_logs
from rankcall.problems import texts

__all__ = ["NOTHING", "UNDECIDED", "diagnose_logs"]

_REASONS = (  # the surest first
    *(mismatch, models, different, dead),
    *(enqueued_differently, absent, not_submitted, lagging, behind),
)


def diagnose_logs(paths: Sequence[Path]) -> Verdict:
    """Return the verdict of a job's logs; its confidence is never ``certain``.

    Args:
        paths: The logs, which may be compressed; ``-`` is stdin, and a folder stands for its files.

    Raises:
        CorruptRunError: No log can be read.
    """
    facts = read_logs(paths)
    case = Case(facts)
    findings = next(
        (reason_findings for reason in _REASONS if (reason_findings := reason(case))), None
    )
    name = ", ".join(log.name for log in facts.logs[:3])
    more = len(facts.logs) - 3
    name += f" and {count_of(more, 'more log')}" if more > 0 else ""
    findings = findings or [undecided(case)]
    return Verdict(name, findings, problems=texts(facts.problems))
