"""Ranks that failed by themselves: their device, a signal or an exception of their own ended them.

Most of what a failed job writes comes from victims. So a rank is named only if its words or its
signal cannot follow from another rank (``rankcall.imports.logs.blame``), and if it did not write
before that it waited for one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rankcall.analysis.logs.case import Case, Numbering, ranks_text, subject
from rankcall.analysis.verdicts.facts import Fact, Relation
from rankcall.analysis.verdicts.finding import Finding
from rankcall.imports.logs.blame import OWN_SIGNALS, signal_of
from rankcall.imports.logs.facts import DeviceFault, Fatal, LauncherExit, Member
from rankcall.imports.logs.prefixes import Line
from rankcall.imports.logs.tracebacks import Failure, Raised

_SIGKILL, _SIGTERM = 9, 15
# Words of programs and settings that make several groups, in which ranks have other numbers.
_DIVIDED = (
    *("vllm", "Vllm", "sglang", "SGLang", "megatron", "Megatron", "mesh"),
    *(f"{kind}{dash}parallel" for kind in ("model", "tensor", "pipeline") for dash in "-_ "),
)
# Failures within this time are one set: their order is not known. Clocks of hosts differ by more.
_SAME_MOMENT_S, _HOSTS_APART_S = 1.0, 5.0


def dead(case: Case) -> list[Finding]:
    """Return the ranks that were killed, or that their own device or exception ended."""
    return _killed(case) or _by_device(case) or _by_launcher(case) or _raised(case)


def _killed(case: Case) -> list[Finding]:
    """Return the ranks that torchrun saw die first, by a signal that no failure sends.

    A rank that timed out or lost a connection can crash while it shuts down. Ranks that died by the
    same signal in the same second are one set: the first of torchrun's list is not special.
    """
    victims = set(case.victims(set()))
    killed = [
        failure
        for failure in case.failures
        if signal_of(failure.code) in OWN_SIGNALS and failure.rank not in victims
    ]
    roots = [failure for failure in killed if failure.first]
    if not roots:
        return []
    first = min(failure.time for failure in roots)
    signals = {signal_of(failure.code) for failure in roots if failure.time == first}
    together = {
        failure.rank: failure
        for failure in killed
        if failure.time == first and signal_of(failure.code) in signals
    }
    by_signal: dict[int, list[Failure]] = {}
    for rank in sorted(together):
        by_signal.setdefault(signal_of(together[rank].code), []).append(together[rank])
    return [_dead_by_signal(case, failures) for failures in by_signal.values()]


def _dead_by_signal(case: Case, failures: Sequence[Failure]) -> Finding:
    name = OWN_SIGNALS[signal_of(failures[0].code)]
    ranks = {failure.rank for failure in failures}
    hosts = tuple(dict.fromkeys(failure.host for failure in failures))
    when = failures[0].time.replace("_", " ")
    # torchrun writes whole seconds: of failures in one of them, none is known to be the first.
    beside = {
        failure.rank
        for failure in case.failures
        if failure.time == failures[0].time
        and failure.rank not in ranks
        and signal_of(failure.code) != _SIGTERM
    }
    why = _because_of_memory(case, {failure.pid for failure in failures})
    ended = "these processes" if len(ranks) > 1 else f"process {failures[0].pid}"
    return case.finding(
        "dead",
        tuple(ranks),
        case.victims(ranks),
        [
            Fact(
                Relation.ENDED_BY_SIGNAL,
                subject(ranks, hosts),
                others=subject(beside) if beside else None,
                values=(("signal", name), ("time", when), *why),
            )
        ],
        [*(failure.line for failure in failures), *case.trouble()],
        " ".join(
            filter(
                None,
                ["" if why else f"Find out what ended {ended}.", case.advice(name, hosts)],
            )
        ),
        "likely",
        hosts=hosts,
    )


def _because_of_memory(case: Case, pids: set[int]) -> tuple[tuple[str, str], ...]:
    """Return why processes were killed, if the kernel wrote so of each of them."""
    killed = {fact.pid for fact in case.facts(Fatal) if "memory ran out" in fact.what}
    return (("why", "memory ran out"),) if pids <= killed else ()


@dataclass(frozen=True)
class _Fault:
    """One rank that says that its own device or process failed."""

    rank: int
    line: Line
    what: str
    host: str


def _by_device(case: Case) -> list[Finding]:
    """Return the ranks whose device failed, or that ran out of memory."""
    waited_at = {(line.writer.file, case.rank(line)): line.number for line in _waits(case)}
    faults: dict[int, _Fault] = {}
    in_group = _rank_of_only_group(case)
    for fact in case.all.facts:
        if not isinstance(fact, DeviceFault) and not (
            isinstance(fact, Fatal) and fact.blame == "own"
        ):
            continue
        rank = case.rank_of_fact(fact)
        if rank < 0 and isinstance(fact, DeviceFault) and fact.in_group >= 0:
            rank = in_group
        # A watchdog that ends a process can make calls to its device fail.
        waited = waited_at.get((fact.line.writer.file, rank))
        if rank >= 0 and (waited is None or fact.line.number < waited):
            host = fact.host or fact.line.writer.host
            faults.setdefault(rank, _Fault(rank, fact.line, fact.what, host))
    first = _first(list(faults.values()))
    if not first:
        return []
    ranks = {fault.rank for fault in first}
    hosts = tuple(dict.fromkeys(fault.host for fault in first if fault.host))
    what = first[0].what[:200]
    return [
        case.finding(
            "dead",
            tuple(ranks),
            case.victims(ranks),
            [Fact(Relation.OWN_ERROR, subject(ranks, hosts), values=(("error", what),))],
            [*(fault.line for fault in first), *case.trouble()],
            case.advice(what, hosts)
            or f"Look at the log of {ranks_text(ranks)}, and at that node's device and memory.",
            "likely" if ranks != {in_group} and len(ranks) == 1 else "possible",
            hosts=hosts,
        )
    ]


def _rank_of_only_group(case: Case) -> int:
    """Return the rank of the device fault whose watchdog wrote only a number in a group; else -1.

    torch before 2.3 wrote no more. A process has a watchdog for each of its groups, and they may
    number it differently. So the number is taken for the rank only if nothing shows a second group:
    all watchdogs speak of one call, each number is of one process, and no rank has another number.
    """
    faults = [fault for fault in case.facts(DeviceFault) if fault.in_group >= 0]
    numbers = {fault.in_group for fault in faults if case.rank_of_fact(fault) < 0}
    waiting = [timeout.in_group for timeout in case.timeouts]
    numbering = Numbering()
    for fault in faults:
        numbering.note(case.rank(fault.line), fault.in_group)
    for timeout in case.timeouts:
        numbering.note(case.rank(timeout.line), timeout.in_group)
    is_one_group = (
        len({timeout.seq for timeout in case.timeouts}) <= 1
        and len(set(waiting)) == len(waiting)
        and not case.progress
        and not numbering.wrong
        and not case.has_said(*_DIVIDED)
        and not any(word in fault.line.writer.stream for fault in faults for word in _DIVIDED)
    )
    if len(numbers) != 1 or not is_one_group or numbers & set(waiting):
        return -1
    number = numbers.pop()
    reported = {failure.rank for failure in case.failures}
    sizes = [member.size for member in case.facts(Member)]
    if (reported and number not in reported) or number >= max(sizes, default=number + 1):
        return -1
    case.problem(
        f"torch before 2.3 wrote the number of rank {number} in a process group: it is the rank in "
        "the job if that group has all ranks"
    )
    return number


def _waits(case: Case) -> Iterable[Line]:
    return reversed([timeout.line for timeout in case.timeouts])


def _first(faults: list[_Fault]) -> list[_Fault]:
    """Return the faults that came first, as far as their times tell; all of them if they do not."""
    if not faults or any(not fault.line.resolution for fault in faults):
        return faults
    start = min(fault.line.time for fault in faults)
    host = next(fault.host for fault in faults if fault.line.time == start)
    return [
        fault
        for fault in faults
        if fault.line.time - start
        <= max(_SAME_MOMENT_S if fault.host == host else _HOSTS_APART_S, fault.line.resolution)
    ]


def _by_launcher(case: Case) -> list[Finding]:
    """Return the ranks that a launcher saw die by a signal that no failure sends.

    mpirun tells only of the process that died first. srun tells of all, and it kills the others
    itself. horovodrun tells of all in their order, and a later one can crash as it loses the first.
    """
    exits = [
        ending
        for ending in case.facts(LauncherExit)
        if ending.signal in OWN_SIGNALS
        and (ending.is_first or not (ending.signal == _SIGKILL or ending.in_order))
    ]
    if not exits or not case.all.tasks_are_ranks:
        return []
    ranks = {rank for ending in exits for rank in ending.tasks}
    name, why = OWN_SIGNALS[exits[0].signal], {ending.why for ending in exits}
    reason = tuple(("why", text) for text in why if text and len(why) == 1)
    advice = case.advice(" ".join([name, *why]), ())
    return [
        case.finding(
            "dead",
            tuple(ranks),
            case.victims(ranks),
            [Fact(Relation.ENDED_BY_SIGNAL, subject(ranks), values=(("signal", name), *reason))],
            [*(ending.line for ending in exits), *case.trouble()],
            advice or "Find out what ended that process: look for a core dump on its node.",
            "likely",
        )
    ]


def _raised(case: Case) -> list[Finding]:
    """Return the ranks whose own exception ended them, and not the end of another rank."""
    own = _own_exceptions(case)
    if not own:
        return []
    files = {exception.line.writer.file for exception in own.values()}
    first = min(own, key=lambda rank: (rank not in case.first(), own[rank].line.number))
    kinds = {exception.kind for exception in own.values()}
    if len(files) > 1 and len(kinds) > 1 and first not in case.first():
        return []  # nothing tells which of them was first
    alike = {rank for rank, exception in own.items() if exception.kind == own[first].kind}
    raised = own[first]
    line = (("line", raised.site),) if raised.site else ()
    message = f": {raised.said[:200]}" if raised.said else ""
    error = f"{raised.kind.rpartition('.')[2]}{message}"
    more = case.advice(f"{raised.kind} {raised.message}{raised.details}", ())
    return [
        case.finding(
            "dead",
            tuple(alike),
            case.victims(alike),
            [Fact(Relation.OWN_EXCEPTION, subject(alike), values=(("error", error), *line))],
            [*(own[rank].line for rank in sorted(alike)[:3]), *case.trouble()],
            " ".join(filter(None, [f"Look at the traceback of rank {first}.", more])),
            "likely" if len(alike) == 1 else "possible",
        )
    ]


def _own_exceptions(case: Case) -> dict[int, Raised]:
    """Return the exception that ended each rank, of those that did not wait for another rank."""
    failed = {failure.rank for failure in case.failures}
    if case.all.tasks_are_ranks:
        exits = case.facts(LauncherExit)
        failed |= {task for ending in exits if ending.is_first for task in ending.tasks}
    exceptions: dict[int, Raised] = {}
    follows: set[int] = set(case.waited)
    for raised in case.raised:
        rank = case.rank(raised.line)
        if raised.follows or raised.is_about_another(rank):
            follows.add(rank)
        elif rank >= 0 and (raised.unhandled or rank in failed):
            exceptions.setdefault(rank, raised)
    for failure in case.failures:
        recorded = failure.raised
        if recorded is None or recorded.follows or recorded.is_about_another(failure.rank):
            continue
        exceptions.setdefault(failure.rank, recorded)
    return {rank: raised for rank, raised in exceptions.items() if rank not in follows}
