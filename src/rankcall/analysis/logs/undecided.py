"""What a log says if it names no rank: what is known all the same, and what would tell more."""

from __future__ import annotations

from rankcall.analysis.logs.advice import advice_for
from rankcall.analysis.logs.case import NOTHING, UNDECIDED, Case, ranks_text
from rankcall.analysis.logs.comparing import late_ranks
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.wording import begin_sentence, count_of
from rankcall.imports.logs.blame import OWN_SIGNALS
from rankcall.imports.logs.facts import (
    Aborting,
    AttemptEnded,
    BarrierFailed,
    DeviceFault,
    Fatal,
    Fragment,
    LauncherExit,
    Mismatch,
    Outside,
    Progress,
    SpawnedExit,
    StoreBarrier,
    Timeout,
    Trouble,
    WorkerExit,
)
from rankcall.imports.logs.prefixes import Line

_RECORD = (
    "Next time, start the job with `rankcall run`: it names the rank and the line. Or let NCCL "
    "write Flight Recorder dumps (TORCH_FR_BUFFER_SIZE=2000, TORCH_NCCL_DUMP_ON_TIMEOUT=1), and "
    "give their folder to `rankcall diagnose`; on Gloo, set TORCH_DISTRIBUTED_DEBUG=DETAIL."
)
_ALL_LOGS = "Give this command the logs of all ranks and of all nodes, too."
# Facts that show a failure, the most telling first. A rank's place in a communicator, a restart and
# a worker that the launcher ended are no failure of their own.
_TELLING = (
    DeviceFault,
    Fatal,
    Outside,
    BarrierFailed,
    Mismatch,
    Timeout,
    Progress,
    StoreBarrier,
    LauncherExit,
    WorkerExit,
    SpawnedExit,
    AttemptEnded,
    Trouble,
    Aborting,
    Fragment,
)


def undecided(case: Case) -> Finding:
    """Return what the log says instead of a rank."""
    lines = _evidence(case)
    if not lines:
        count = sum(log.count for log in case.all.logs)
        return case.finding(
            NOTHING,
            (),
            (),
            f"No line that rankcall knows reports a failure; it read {count_of(count, 'line')}.",
            [],
            f"{_ALL_LOGS} {_RECORD}",
            "possible",
        )
    seqs = {timeout.seq for timeout in case.timeouts}
    groups = {state.group.name for state in case.progress if state.failed > 0}
    finding = case.finding(
        UNDECIDED,
        (),
        case.victims(set()),
        f"The log does not say which rank is at fault.{_known(case)}",
        lines,
        " ".join(filter(None, [_advice(case), *_next_time(case)])),
        "possible",
        group=next(iter(groups)) if len(groups) == 1 else "",
        seq=next(iter(seqs)) if len(seqs) == 1 else 0,
        op=case.timeouts[0].op if len({timeout.op for timeout in case.timeouts}) == 1 else "",
        since=case.longest(),
    )
    return finding


def _next_time(case: Case) -> tuple[str, ...]:
    """Return what would tell more. If something outside ended the job, no rank is to be found."""
    return () if case.facts(Outside) else (_ALL_LOGS, _RECORD)


def _evidence(case: Case) -> list[Line]:
    """Return the lines that show a failure."""
    lines = case.lines(*_TELLING)
    lines += [
        raised.line for raised in case.raised if case.rank(raised.line) >= 0 or raised.of_a_job
    ]
    return lines + [failure.line for failure in case.all.failures]


def _known(case: Case) -> str:
    """Say what is known of the ranks, without a conclusion."""
    texts = [*_causes(case)]
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


def _causes(case: Case) -> list[str]:
    """Say what is known of a cause whose rank is not: from outside, or of a process by its pid."""
    texts = []
    outside = case.facts(Outside)
    if outside:
        what = outside[0].what[:160].rstrip(".")
        texts.append(f"Something outside the ranks ended the job: {what}")
    for what, line, host, pid in _own_faults(case)[:1]:
        process = f"process {pid}" if pid >= 0 else "a process"
        where = f" on {host or line.writer.host}" if host or line.writer.host else ""
        texts.append(f"{begin_sentence(process)}{where} failed with {what[:160].rstrip('.')}")
    for spawned in case.facts(SpawnedExit)[:1]:
        how = f"ended by {OWN_SIGNALS[spawned.signal]}" if spawned.signal > 0 else "failed"
        texts.append(f"Process {spawned.process} of those that torch.multiprocessing started {how}")
    for ending in case.facts(WorkerExit)[:1]:
        worker = f"local rank {ending.local_rank}" if ending.local_rank >= 0 else "a worker"
        host = ending.line.writer.host
        where = f" on {host}" if host else ""
        texts.append(f"{begin_sentence(worker)}{where} ended with code {ending.code}")
    return texts


def _own_faults(case: Case) -> list[tuple[str, Line, str, int]]:
    """Return the words, line, host and pid of each process that failed by its own fault."""
    devices = [(fact.what, fact.line, fact.host, fact.pid) for fact in case.facts(DeviceFault)]
    fatal = [fact for fact in case.facts(Fatal) if fact.blame == "own"]
    return devices + [(fact.what, fact.line, fact.host, fact.pid) for fact in fatal]


def _advice(case: Case) -> str:
    """Return the next step for what the log shows, if it shows anything that has one."""
    causes = [(what, line) for what, line, _, _ in _own_faults(case)]
    causes += [(fact.what, fact.line) for fact in case.facts(Outside)]
    for what, line in causes:
        advice = advice_for(what, (line.writer.host,) if line.writer.host else ())
        if advice:
            return advice
    for raised in case.raised:
        advice = advice_for(f"{raised.kind} {raised.message}", ())
        if advice:
            return advice
    peers = [fact for fact in case.facts(Trouble) if fact.peer]
    if peers:
        first = peers[0]
        ends = f"{first.host or first.line.writer.host or 'this process'} and {first.peer}"
        return (
            f"A connection between {ends} broke: look at both ends, and at the link between them."
        )
    return ""
