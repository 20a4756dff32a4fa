"""From what logs say about a failure to its verdict.

::

    case       one failed job: the facts of its logs, and which numbers of ranks can be believed
    ended      ranks that failed by themselves
    compared   ranks that can be compared by what they wrote

A log has only what ranks wrote when they failed, and most of them are victims. So a rank is named
only for one of these reasons:

* its process was killed, or its own exception ended it, and that does not follow from another rank;
* torch itself compared the ranks: a mismatch or a monitored barrier of DETAIL mode, a report of
  TORCH_NCCL_DESYNC_DEBUG;
* it wrote that its last collective in a group is older than the one that others timed out in.

Numbers of ranks in messages are those within a process group. They are believed only if they are
the same as in the whole job (``case.Ranks``). If no reason holds, the verdict is ``undecided``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rankcall.analysis.diagnosis import Diagnosis
from rankcall.analysis.logs.case import NOTHING, UNDECIDED, Case, ranks_text
from rankcall.analysis.logs.compared import (
    absent,
    behind,
    different,
    lagging,
    late_ranks,
    mismatch,
)
from rankcall.analysis.logs.ended import dead
from rankcall.analysis.state.snapshot import Snapshot, no_calls
from rankcall.analysis.verdicts.finding import Finding, begin_sentence, count_of
from rankcall.imports.log_facts import read_logs
from rankcall.imports.log_messages import (
    BarrierFailed,
    LauncherExit,
    Progress,
    StoreBarrier,
    Timeout,
    Trouble,
)

__all__ = ["NOTHING", "UNDECIDED", "diagnose_logs"]

_RECORD = (
    "Next time, start the job with `rankcall run`: it names the rank and the line. Or let NCCL "
    "write Flight Recorder dumps (TORCH_FR_BUFFER_SIZE=2000, TORCH_NCCL_DUMP_ON_TIMEOUT=1), and "
    "give their folder to `rankcall diagnose`; on Gloo, set TORCH_DISTRIBUTED_DEBUG=DETAIL."
)
_ALL_LOGS = "Give this command the logs of all ranks and of all nodes, too."
_REASONS = (mismatch, dead, absent, lagging, behind, different)  # the surest first


def diagnose_logs(paths: Sequence[Path]) -> Diagnosis:
    """Return the verdict of a job's logs; its confidence is never ``certain``.

    Args:
        paths: The logs, which may be compressed; ``-`` is stdin, and a folder stands for its files.

    Raises:
        CorruptRun: No log can be read.
    """
    facts = read_logs(paths)
    case = Case(facts)
    findings = next(
        (reason_findings for reason in _REASONS if (reason_findings := reason(case))), None
    )
    name = ", ".join(log.name for log in facts.logs[:3])
    more = len(facts.logs) - 3
    name += f" and {count_of(more, 'more log')}" if more > 0 else ""
    snapshot = Snapshot([], no_calls(), problems=facts.problems)
    return Diagnosis(name, snapshot, findings or [undecided(case)], 0.0)


def undecided(case: Case) -> Finding:
    """Return what the log says instead of a rank."""
    lines = case.lines(BarrierFailed, Timeout, Progress, StoreBarrier, LauncherExit, Trouble)
    lines += [raised.line for raised in case.raised if case.rank(raised.line) >= 0]
    lines += [failure.line for failure in case.all.failures]
    if not lines:
        count = sum(log.count for log in case.all.logs)
        return case.finding(
            NOTHING,
            (),
            (),
            f"The log says nothing about a failure: {count_of(count, 'line')} read, and none "
            "of them is a message of torch or of its launchers about one.",
            [],
            f"{_ALL_LOGS} {_RECORD}",
            "possible",
        )
    return case.finding(
        UNDECIDED,
        (),
        case.victims(set()),
        f"The log does not say which rank is at fault.{_hint(case)}",
        lines,
        f"{_ALL_LOGS} {_RECORD}",
        "possible",
        op=case.timeouts[0].op if case.timeouts else "",
        since=case.longest(),
    )


def _hint(case: Case) -> str:
    """Say what is known of the ranks, without a conclusion."""
    texts = []
    waited = sorted(case.waited - {-1})
    if waited:
        texts.append(f"{begin_sentence(ranks_text(waited))} timed out, and waited for others")
    late = late_ranks(case)
    if late is not None:
        texts.append(
            f"{begin_sentence(ranks_text(late.ranks))} had not come to #{late.seq} of group "
            f"{late.states[0].group.name}, but may have waited in another group"
        )
    first = sorted(case.first())
    if first:
        texts.append(
            f"The first failure that torchrun saw is that of {ranks_text(first)}, and that can "
            "be a rank that waited for another one"
        )
    return "".join(f" {text}." for text in texts)
