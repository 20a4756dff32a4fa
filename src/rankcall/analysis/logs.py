"""From what logs say about a failure to its verdict.

A log has only what ranks wrote when they failed, and most of them are victims. So a rank is named
only for one of these reasons:

* its process was killed, or its own exception ended it, and that does not follow from another rank;
* torch itself compared the ranks: a mismatch or a monitored barrier of DETAIL mode, a report of
  TORCH_NCCL_DESYNC_DEBUG;
* it wrote that its last collective in a group is older than the one that others timed out in.

Numbers of ranks in messages are those within a process group. They are believed only if they are
the same as in the whole job (``log_cases.Ranks``). If no reason holds, the verdict is
``undecided``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rankcall.analysis.log_cases import (
    NOTHING,
    UNDECIDED,
    Case,
    absent,
    behind,
    different,
    lagging,
    late_ranks,
    mismatch,
    ranks_text,
)
from rankcall.analysis.snapshot import Snapshot, no_calls
from rankcall.analysis.verdicts import Diagnosis
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.wording import begin_sentence, count_of
from rankcall.imports.logs.facts import Failure, Raised, read_logs
from rankcall.imports.logs.messages import (
    BarrierFailed,
    LauncherExit,
    Progress,
    StoreBarrier,
    Timeout,
    Trouble,
)

__all__ = [
    "NOTHING",
    "UNDECIDED",
    "diagnose_logs",
]

# Ranks that failed by themselves: a signal ended them, or an exception of their own.


_SIGKILL = 9
# Signals that no failure of another rank sends.
_OWN_SIGNALS = {4: "SIGILL", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV"}


def dead(case: Case) -> list[Finding]:
    """Return the ranks that were killed, or that their own exception ended."""
    return _killed(case) or _by_launcher(case) or _raised(case)


def _killed(case: Case) -> list[Finding]:
    """Return the ranks that torchrun saw die first, by a signal that no failure sends.

    A rank that timed out or lost a connection can crash while it shuts down.
    """
    victims = set(case.victims(set()))
    killed = [
        failure
        for failure in case.failures
        if failure.first and _signal(failure.code) in _OWN_SIGNALS and failure.rank not in victims
    ]
    if not killed:
        return []
    first = min(failure.time for failure in killed)
    killed = [failure for failure in killed if failure.time == first or len(killed) == 1]
    return [_dead_by_signal(case, failure) for failure in killed]


def _dead_by_signal(case: Case, failure: Failure) -> Finding:
    name = _OWN_SIGNALS[_signal(failure.code)]
    why = (
        " If it used much memory, the kernel may have killed it: look for oom-kill in dmesg on "
        f"{failure.host}."
        if name == "SIGKILL"
        else ""
    )
    return case.finding(
        "dead",
        (failure.rank,),
        case.victims({failure.rank}),
        f"Rank {failure.rank} was ended by {name} at {failure.time.replace('_', ' ')}, before "
        "any other rank failed on its node.",
        [failure.line, *case.trouble()],
        f"Find out what ended process {failure.pid}.{why}",
        "likely",
        hosts=(failure.host,),
    )


def _by_launcher(case: Case) -> list[Finding]:
    """Return the ranks that mpirun or srun saw die by a signal that no failure sends.

    mpirun tells only of the process that died first. srun tells of all, and it kills the others
    itself.
    """
    exits = [
        ending
        for ending in case.facts(LauncherExit)
        if ending.signal in _OWN_SIGNALS and (ending.signal != _SIGKILL or ending.is_first)
    ]
    if not exits or not case.all.tasks_are_ranks:
        return []
    ranks = {rank for ending in exits for rank in ending.tasks}
    name = _OWN_SIGNALS[exits[0].signal]
    be = "was" if len(ranks) == 1 else "were"
    return [
        case.finding(
            "dead",
            tuple(ranks),
            case.victims(ranks),
            f"{begin_sentence(ranks_text(ranks))} {be} ended by {name}, says the launcher.",
            [*(ending.line for ending in exits), *case.trouble()],
            "Find out what ended that process: look for oom-kill in dmesg on its node, and for "
            "a core dump.",
            "likely",
        )
    ]


def _raised(case: Case) -> list[Finding]:
    """Return the ranks whose own exception ended them, and not the end of another rank."""
    failed = {failure.rank: failure for failure in case.failures}
    exceptions: dict[int, Raised] = {}
    follows: set[int] = set(case.waited)
    for raised in case.raised:
        rank = case.rank(raised.line)
        if raised.follows:
            follows.add(rank)
        elif rank >= 0 and (raised.unhandled or rank in failed):
            exceptions.setdefault(rank, raised)
    for failure in case.failures:
        if failure.raised is not None and not failure.raised.follows:
            exceptions.setdefault(failure.rank, failure.raised)
    own = {rank: exception for rank, exception in exceptions.items() if rank not in follows}
    if not own:
        return []
    files = {exception.line.source.file for exception in own.values()}
    first = min(own, key=lambda rank: (rank not in case.first(), own[rank].line.number))
    kinds = {exception.kind for exception in own.values()}
    if len(files) > 1 and len(kinds) > 1 and first not in case.first():
        return []  # nothing tells which of them was first
    alike = {rank for rank, exception in own.items() if exception.kind == own[first].kind}
    raised = own[first]
    where = f" at {raised.site}" if raised.site else ""
    message = f": {raised.message[:200]}" if raised.message else ""
    they = "its" if len(alike) == 1 else "their"
    return [
        case.finding(
            "dead",
            tuple(alike),
            case.victims(alike),
            f"{begin_sentence(ranks_text(alike))} failed with {they} own exception{where}: "
            f"{raised.kind.rpartition('.')[2]}{message}",
            [*(own[rank].line for rank in sorted(alike)[:3]), *case.trouble()],
            f"Look at the traceback of rank {first}.",
            "likely" if len(alike) == 1 else "possible",
        )
    ]


def _signal(code: int) -> int:
    """Return the signal behind an exit code; a shell adds 128 to it."""
    return -code if code < 0 else code - 128 if code > 128 else 0


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
