"""What a log says if it names no rank: what is known all the same, and what would tell more."""

from __future__ import annotations

import re
import signal
from collections import Counter
from dataclasses import replace

from rankcall.analysis.logs.case import NOTHING, UNDECIDED, Case, subject
from rankcall.analysis.logs.comparing import late_ranks
from rankcall.analysis.logs.enqueued import last_enqueued
from rankcall.analysis.verdicts.facts import CallFact, Fact, Relation
from rankcall.analysis.verdicts.finding import Finding
from rankcall.imports.logs.blame import OWN_SIGNALS, signal_of
from rankcall.imports.logs.facts import (
    Aborting,
    AttemptEnded,
    BarrierFailed,
    DeviceFault,
    Fatal,
    Fragment,
    Gone,
    IssuedAt,
    Killed,
    LauncherExit,
    Mismatch,
    Outside,
    Progress,
    SpawnedExit,
    Stall,
    Stalled,
    StoreBarrier,
    StoreWait,
    Timeout,
    Trouble,
    WorkerExit,
)
from rankcall.imports.logs.prefixes import Line

_RUN = "Next time, start the job with `rankcall run`: it names the rank and the line."
_DUMPS = (
    "Or let NCCL write Flight Recorder dumps (TORCH_FR_BUFFER_SIZE=2000, "
    "TORCH_NCCL_DUMP_ON_TIMEOUT=1), and give their folder to `rankcall diagnose`"
)
_HAS_DUMPS = "Flight Recorder was on: give the folder of its dumps to `rankcall diagnose`"
_DETAIL = "; on Gloo, set TORCH_DISTRIBUTED_DEBUG=DETAIL."
# A host is named for its links if so many hosts and messages are there, and most are of it.
_FEW_HOSTS, _FEW_LINK_ERRORS, _MOST_OF_THEM = 2, 5, 0.75
_ALL_LOGS = "Give this command the logs of all ranks and of all nodes, too."
# Facts that show a failure, the most telling first. A launcher that ends a worker does so because
# another one failed. A rank's place in a communicator and a restart are no failure of their own.
_TELLING = (
    DeviceFault,
    Fatal,
    Outside,
    BarrierFailed,
    Mismatch,
    Timeout,
    Progress,
    StoreBarrier,
    Stall,
    Stalled,
    LauncherExit,
    WorkerExit,
    SpawnedExit,
    AttemptEnded,
    Trouble,
    Gone,
    Aborting,
    Fragment,
    StoreWait,
    Killed,
)
_HOW_IT_ENDED = (Relation.WORKER_ENDED, Relation.SPAWNED_ENDED)  # and not why
_FEW_CALLS = 3  # that ranks timed out in; more are not told one by one
_LONGEST = 200  # characters of a line that is quoted in a sentence
_PROCESS = re.compile(r"\bpid: (\d{1,10})\b")
_ADDRESS = re.compile(r"\bip: ([\w.:-]{1,100})")


def undecided(case: Case) -> Finding:
    """Return what the log says instead of a rank."""
    lines = _evidence(case)
    if not lines:
        count = sum(log.count for log in case.all.logs)
        return case.finding(
            NOTHING,
            (),
            (),
            [Fact(Relation.NO_FAILURE_SEEN, number=count, unit="lines")],
            [],
            f"{_ALL_LOGS} {_record(case)}",
            "possible",
        )
    seqs = {timeout.seq for timeout in case.timeouts}
    groups = {state.group.name for state in case.progress if state.failed > 0}
    finding = case.finding(
        UNDECIDED,
        (),
        case.victims(set()),
        [Fact(Relation.RANK_NOT_SAID), *_known(case)],
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
    return () if case.facts(Outside) else (_ALL_LOGS, _record(case))


def _record(case: Case) -> str:
    """Return what to record next time, without what this job has recorded already."""
    recorded = case.facts(IssuedAt) or case.has_said("TORCH_FR_BUFFER_SIZE=", "_TRACE_BUFFER_SIZE=")
    in_detail = case.facts(Mismatch) or case.has_said("TORCH_DISTRIBUTED_DEBUG=DETAIL")
    dumps = _HAS_DUMPS if recorded else _DUMPS
    return f"{_RUN} {dumps}{'.' if in_detail else _DETAIL}"


def _evidence(case: Case) -> list[Line]:
    """Return the lines that show a failure."""
    lines = case.lines(*_TELLING)
    lines += [
        raised.line
        for raised in case.raised
        if case.rank(raised.line) >= 0 or raised.of_a_job or raised.ended_program
    ]
    return lines + [failure.line for failure in case.all.failures]


def _known(case: Case) -> list[Fact]:
    """Return what is known of the ranks, without a conclusion."""
    facts = [*_causes(case), *_interrupted(case), *_timed_out(case)]
    late = late_ranks(case)
    if late is not None:
        call = CallFact("", late.seq, late.states[0].group.name)
        facts.append(Fact(Relation.MAY_BE_BEHIND, subject(late.ranks), call))
    first = _failed_first(case)
    if first:
        facts.append(Fact(Relation.FAILED_FIRST, subject(first)))
    facts = facts or _said(case)
    # A job that was ended from outside stops wherever it is.
    return facts if case.facts(Outside) else [*facts, *last_enqueued(case)]


def _interrupted(case: Case) -> list[Fact]:
    """Return where Ctrl-C met the ranks: if the job hung, one may stand elsewhere than the others.

    Of a rank that waited in C++, the call failed first, because another one had ended.
    """
    calls = {
        case.rank(raised.line): raised.op
        for raised in case.all.raised
        if raised.led_on and raised.op
    }
    ranks: dict[CallFact, set[int]] = {}
    for raised in case.raised:
        rank = case.rank(raised.line)
        if raised.kind == "KeyboardInterrupt" and raised.site and rank >= 0:
            op = raised.op or calls.get(rank, "")
            ranks.setdefault(CallFact(op, line=raised.site), set()).add(rank)
    few = len(ranks) <= _FEW_CALLS
    return [Fact(Relation.INTERRUPTED_AT, subject(of), call) for call, of in ranks.items() if few]


def _failed_first(case: Case) -> set[int]:
    """Return the ranks that torchrun saw fail first, as far as whole seconds tell."""
    first = case.first()
    seconds = {failure.time for failure in case.failures if failure.rank in first}
    beside = {
        failure.rank
        for failure in case.failures
        if failure.time in seconds and signal_of(failure.code) != signal.SIGTERM
    }
    return first | beside


def _timed_out(case: Case) -> list[Fact]:
    """Return which ranks timed out, and in which calls; without the calls if they are many."""
    ranks: dict[CallFact, set[int]] = {}
    nobodys: dict[CallFact, Timeout] = {}
    for timeout in case.timeouts:
        rank, call = case.rank(timeout.line), _call_of(case, timeout)
        if rank >= 0:
            ranks.setdefault(call, set()).add(rank)
        else:
            nobodys.setdefault(call, timeout)
    if ranks:
        if len(ranks) > _FEW_CALLS:
            return [Fact(Relation.TIMED_OUT, subject(set().union(*ranks.values())))]
        return [Fact(Relation.TIMED_OUT, subject(of), call) for call, of in ranks.items()]
    return [
        replace(
            _fact(
                Relation.TIMED_OUT,
                in_group=str(timeout.in_group) if timeout.in_group >= 0 else "",
                pid=str(timeout.line.writer.pid) if timeout.line.writer.pid >= 0 else "",
                host=timeout.line.writer.host,
            ),
            call=call,
        )
        for call, timeout in [*nobodys.items()][:_FEW_CALLS]
    ]


def _call_of(case: Case, timeout: Timeout) -> CallFact:
    """Return the call that a rank timed out in; its state, in another line, has the group."""
    writer, group = timeout.line.writer, None
    for state in case.progress:
        if state.line.writer == writer and state.failed == timeout.seq:
            group = state.group
            break
    rank = case.rank(timeout.line)
    return CallFact(
        timeout.op,
        timeout.seq,
        group.name if group else "",
        group.description if group else "",
        line=case.site({rank}) if rank >= 0 else "",
    )


def _said(case: Case) -> list[Fact]:
    """Return the line that tells most, if nothing that was understood has more than a line."""
    raised = [exception.line for exception in case.raised if exception.message]
    lines = [*case.lines(Trouble), *raised, *_evidence(case)]
    if not lines:
        return []
    line, text = lines[0], " ".join(lines[0].text.split())
    at = next((raised for raised in case.raised if raised.line == line), None)
    if at is not None and at.said != at.message:  # it tells more than what stands before it
        text = f"{_shown(text, _LONGEST // 2)} … {at.said}"
    rank, pid = case.rank(line), line.writer.pid
    shown = _shown(text, _LONGEST)
    fact = _fact(Relation.SAID, text=shown, pid=str(pid) if pid >= 0 else "", host=line.writer.host)
    call = CallFact(at.op, line=at.site) if at is not None and (at.op or at.site) else None
    return [replace(fact, ranks=subject({rank}) if rank >= 0 else None, call=call)]


def _shown(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most].rstrip()}…"


def _causes(case: Case) -> list[Fact]:
    """Return what is known of a cause without a rank: from outside, or a process with its pid."""
    facts = []
    for outside in case.facts(Outside)[:1]:
        what = outside.what[:160].rstrip(".")
        at_start = "yes" if outside.at_start else ""
        facts.append(_fact(Relation.ENDED_FROM_OUTSIDE, what=what, at_start=at_start))
    for fault in case.facts(DeviceFault)[:1]:
        if fault.by_kernel and fault.pid < 0:
            error = fault.what[:160].rstrip(".")
            facts.append(_fact(Relation.KERNEL_REPORTS, error=error, host=fault.host))
            return [*facts, *_link_errors(case)]
    for what, line, host, pid in _own_faults(case)[:1]:
        known_pid = pid if pid >= 0 else line.writer.pid
        facts.append(
            _fact(
                Relation.PROCESS_FAILED,
                error=what[:160].rstrip("."),
                pid=str(known_pid) if known_pid >= 0 else "",
                host=host or line.writer.host,
            )
        )
    for spawned in case.facts(SpawnedExit)[:1]:
        facts.append(
            _fact(
                Relation.SPAWNED_ENDED,
                process=str(spawned.process),
                signal=OWN_SIGNALS[spawned.signal] if spawned.signal > 0 else "",
            )
        )
    for ending in _worker_exits(case)[:1]:
        facts.append(
            _fact(
                Relation.WORKER_ENDED,
                local_rank=str(ending.local_rank) if ending.local_rank >= 0 else "",
                host=ending.line.writer.host,
                code=str(ending.code),
                pid=str(ending.pid) if ending.pid >= 0 and ending.local_rank < 0 else "",
            )
        )
    facts += _gone(case)[:1]
    # A process that fails by itself has said more than its exception does.
    says_why = any(fact.relation not in _HOW_IT_ENDED for fact in facts)
    facts += _waited_for(case) or ([] if says_why else _raised(case)[:1])
    return [*facts, *_link_errors(case)]


def _worker_exits(case: Case) -> list[WorkerExit | AttemptEnded]:
    """Return how workers ended, as far as torchrun's report does not say it of their ranks."""
    reported = {failure.pid for failure in case.all.failures}
    ended = [ending for ending in case.facts(WorkerExit) if ending.pid not in reported]
    return [*ended, *([] if case.all.failures else case.facts(AttemptEnded))]


def _gone(case: Case) -> list[Fact]:
    """Return the processes that a framework misses; Ray's exception has them, too."""
    processes = [(fact.by, fact.pid, fact.host) for fact in case.facts(Gone)]
    for raised in case.raised:
        if raised.kind.endswith(("ActorDiedError", "RayActorError")):
            pid, host = _PROCESS.search(raised.details), _ADDRESS.search(raised.details)
            if pid:
                processes.append(("Ray", int(pid[1]), host[1] if host else ""))
    return [
        _fact(Relation.PROCESS_GONE, by=by, pid=str(pid), host=host) for by, pid, host in processes
    ]


def _waited_for(case: Case) -> list[Fact]:
    """Return whom a process waited for, if its library says it."""
    facts = []
    for waited in [fact for fact in case.facts(Trouble) if fact.has_waited and fact.peer][:1]:
        rank = case.rank_of_fact(waited)
        values = _fact(
            Relation.WAITED_FOR,
            peer=waited.peer,
            pid=str(waited.pid) if waited.pid >= 0 and rank < 0 else "",
        ).values
        facts.append(
            Fact(Relation.WAITED_FOR, subject([rank]) if rank >= 0 else None, values=values)
        )
    return facts


def _raised(case: Case) -> list[Fact]:
    """Return the exceptions of processes whose rank is not known, if they are about no other."""
    facts = []
    for raised in case.raised:
        writer = raised.line.writer
        if raised.follows or not raised.of_a_job or case.rank(raised.line) >= 0:
            continue
        error = f"{raised.kind.rpartition('.')[2]}{f': {raised.said}' if raised.said else ''}"
        facts.append(
            _fact(
                Relation.PROCESS_RAISED,
                error=error[:160].rstrip("."),
                pid=str(writer.pid) if writer.pid >= 0 else "",
                host=writer.host,
                worker=writer.worker,
            )
        )
    return facts


def _link_errors(case: Case) -> list[Fact]:
    """Return the host that most messages about broken connections name, if several hosts are named.

    One that reports most of them has a link that fails; one that most others cannot reach has, too.
    """
    troubles = [fact for fact in case.facts(Trouble) if fact.host or fact.peer]
    facts = []
    for end in ("host", "peer"):
        names = Counter(getattr(fact, end).partition("<")[0] for fact in troubles)
        names.pop("", None)
        if len(names) < _FEW_HOSTS or names.total() < _FEW_LINK_ERRORS:
            continue
        host, count = names.most_common(1)[0]
        if count >= _MOST_OF_THEM * names.total():
            values = ("host", host), ("end", end), ("all", str(names.total()))
            facts.append(Fact(Relation.LINK_ERRORS, number=count, values=values))
    return facts


def _fact(relation: Relation, **values: str) -> Fact:
    """Return a fact about a process whose rank is not known, with the values that are."""
    return Fact(relation, values=tuple((name, value) for name, value in values.items() if value))


def _own_faults(case: Case) -> list[tuple[str, Line, str, int]]:
    """Return the words, line, host and pid of each process that failed by its own fault."""
    devices = [(fact.what, fact.line, fact.host, fact.pid) for fact in case.facts(DeviceFault)]
    fatal = [fact for fact in case.facts(Fatal) if fact.blame == "own"]
    return devices + [(fact.what, fact.line, fact.host, fact.pid) for fact in fatal]


def _advice(case: Case) -> str:
    """Return the next step for what the log shows, if it shows anything that has one."""
    causes = [(what, line) for what, line, _, _ in _own_faults(case)]
    causes += [(fact.what, fact.line) for fact in case.facts(Outside)]
    causes += [
        (OWN_SIGNALS[signal_of(ending.code)], ending.line)
        for ending in _worker_exits(case)
        if signal_of(ending.code) in OWN_SIGNALS
    ]
    for what, line in causes:
        advice = case.advice(what, (line.writer.host,) if line.writer.host else ())
        if advice:
            return advice
    for raised in case.raised:
        advice = case.advice(f"{raised.kind} {raised.message}{raised.details}", ())
        if advice:
            return advice
    for fact in case.facts(Fragment):
        advice = case.advice(fact.line.text, ())
        if advice:
            return advice
    for trouble in case.facts(Trouble):
        advice = case.advice(trouble.line.text, (trouble.host,) if trouble.host else ())
        if advice:
            return advice
    peers = [fact for fact in case.facts(Trouble) if fact.peer and not fact.has_waited]
    if peers:
        first = peers[0]
        ends = f"{first.host or first.line.writer.host or 'this process'} and {first.peer}"
        return (
            f"The connection between {ends} failed: look at both ends, and at the link between "
            "them."
        )
    return ""
