"""Ranks that failed by themselves: a signal ended them, or an exception of their own."""

from __future__ import annotations

from rankcall.analysis.logs.case import Case, ranks_text
from rankcall.analysis.verdicts.finding import Finding, begin_sentence
from rankcall.imports.log_facts import Failure, Raised
from rankcall.imports.log_messages import LauncherExit

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
