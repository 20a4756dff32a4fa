"""What NCCL said that each process enqueues: its newest calls on each communicator.

With NCCL_DEBUG_SUBSYS=COLL, NCCL writes a line for each call, before its device runs it. The lines
of one communicator can be compared by their numbers. The last line of a process is weak evidence:
what it wrote to a pipe is lost if it is ended before it is written out, and a log may be cut off.
So a rank that seems to be behind is told, and not blamed; different calls of one number are a
mismatch whatever is missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from rankcall.analysis.logs.case import SAME, Case, minority, subject
from rankcall.analysis.verdicts.facts import CallFact, Fact, Relation
from rankcall.analysis.verdicts.finding import Finding
from rankcall.imports.logs.facts import Enqueued, Member

_Process = tuple[str, int]  # host and pid
_P2P = ("send", "recv")
_MOST_AS_ONE = 32  # calls of one number; of more, the first may not have been kept


@dataclass(frozen=True)
class _Communicator:
    """One communicator: the calls of each of its processes, in order.

    ``is_named``: NCCL has written a name that is the same in all its processes.
    """

    size: int
    calls: Mapping[_Process, list[Enqueued]]
    is_named: bool

    @property
    def counts_alike(self) -> bool:
        """Whether all members count the same calls: sends and receives are made by two of them."""
        return not any(call.op in _P2P for calls in self.calls.values() for call in calls)


def enqueued_differently(case: Case) -> list[Finding]:
    """Return the calls that have one number on a communicator, and are not the same."""
    for communicator in _communicators(case):
        sides, number = _first_difference(communicator)
        if sides:
            return [_finding(case, communicator, sides, number)]
    return []


def last_enqueued(case: Case) -> list[Fact]:
    """Return the last call of each rank on the largest communicator in which they differ."""
    communicators = sorted(_communicators(case), key=lambda communicator: -communicator.size)
    for communicator in communicators:
        last = {process: calls[-1] for process, calls in communicator.calls.items()}
        ranks = _ranks(case, communicator)
        sides: dict[tuple[int, str], set[_Process]] = defaultdict(set)
        for process, call in last.items():
            sides[call.number, call.op].add(process)
        if len(last) == communicator.size and len({number for number, _ in sides}) > 1:
            return [
                _fact(Relation.LAST_ENQUEUED, communicator, ranks, sides[side], last)
                for side in sorted(sides)
            ]
    return []


def _communicators(case: Case) -> Iterator[_Communicator]:
    """Yield the communicators whose processes can be compared, those with a name first.

    Without a name, communicators of one size may be different ones. They are one if so many
    processes have one each, and no larger one exists, of which these processes are only a part.
    """
    members = {(fact.host, fact.pid, fact.pointer): fact for fact in case.facts(Member)}
    named: dict[tuple[str, int], dict[_Process, list[Enqueued]]] = {}
    unnamed: dict[int, dict[_Process, list[Enqueued]]] = {}
    pointers: dict[tuple[int, _Process], set[str]] = defaultdict(set)
    for call in case.facts(Enqueued):
        process = call.host, call.pid
        member = members.get((*process, call.pointer))
        if member is not None and member.name and _is_before(member, call):
            calls = named.setdefault((member.name, call.size), {})
        else:
            calls = unnamed.setdefault(call.size, {})
            pointers[call.size, process].add(call.pointer)
        earlier = calls.setdefault(process, [])
        if earlier and call.number < earlier[-1].number:
            earlier.clear()  # it counts from the beginning again: another attempt of the job
        earlier.append(call)
    for (_, size), calls in named.items():
        communicator = _Communicator(size, calls, is_named=True)
        if len(calls) <= size and communicator.counts_alike:
            yield communicator
    largest = _largest(case)
    for size, calls in unnamed.items():
        is_one = len(calls) == size and all(len(pointers[size, process]) == 1 for process in calls)
        communicator = _Communicator(size, calls, is_named=False)
        if size == largest and is_one and communicator.counts_alike:
            yield communicator


def _is_before(member: Member, call: Enqueued) -> bool:
    """Whether a communicator was made before a call: another one may have had its pointer."""
    same_log = member.line.writer.file == call.line.writer.file
    return not same_log or member.line.number < call.line.number


def _largest(case: Case) -> int:
    sizes = [member.size for member in case.facts(Member)]
    return max([*sizes, *(call.size for call in case.facts(Enqueued))], default=0)


def _first_difference(
    communicator: _Communicator,
) -> tuple[dict[tuple[str, str], dict[_Process, Enqueued]], int]:
    """Return the processes by what they called, and the first number at which that differs."""
    by_number: dict[int, dict[_Process, list[Enqueued]]] = defaultdict(dict)
    for process, calls in communicator.calls.items():
        for number, together in _by_number(calls).items():
            by_number[number][process] = together
    for number in sorted(by_number):
        processes = by_number[number]
        # Several calls that are made as one have one number. The last of them may be missing.
        for place in range(min(map(len, processes.values()))):
            sides: dict[tuple[str, str], dict[_Process, Enqueued]] = defaultdict(dict)
            for process, together in processes.items():
                call = together[place]
                sides[call.op, call.arguments][process] = call
            if len(sides) > 1:
                return sides, number
    return {}, 0


def _by_number(calls: list[Enqueued]) -> dict[int, list[Enqueued]]:
    """Return the calls of each number that are known from the first one on.

    Only the newest lines of a process are kept, so the oldest number may lack its first calls.
    """
    by_number: dict[int, list[Enqueued]] = {}
    for call in calls:
        by_number.setdefault(call.number, []).append(call)
    oldest = next(iter(by_number))
    if len(by_number) > 1 or len(by_number[oldest]) > _MOST_AS_ONE:
        del by_number[oldest]
    return by_number


def _finding(
    case: Case,
    communicator: _Communicator,
    sides: Mapping[tuple[str, str], Mapping[_Process, Enqueued]],
    number: int,
) -> Finding:
    calls = {process: call for side in sides.values() for process, call in side.items()}
    ranks = _ranks(case, communicator)
    if any(case.rank_of_fact(call) != ranks.get(process) for process, call in calls.items()):
        case.problem(
            "no line ties the processes of NCCL's lines to ranks of the job: a rank is taken to "
            "have its number in the communicator, or else that of its device"
        )
    is_whole = len(calls) == communicator.size and len(ranks) == len(communicator.calls)
    sets = [{ranks.get(process, -1) for process in side} for side in sides.values()]
    everybody = set().union(*sets) - {-1}
    named = minority(sets) if is_whole else tuple(sorted(everybody))
    ops = {op for op, _ in sides}
    return case.finding(
        "desync" if len(ops) > 1 else "mismatch",
        named,
        tuple(sorted(everybody - set(named))) if named else (),
        [
            _fact(Relation.ENQUEUED, communicator, ranks, side, calls)
            for side in sorted(sides.values(), key=lambda side: (len(side), min(side)))
        ],
        [call.line for call in calls.values()],
        SAME,
        "likely" if communicator.is_named and is_whole else "possible",
        op=min(ops) if len(ops) == 1 else "",
        seq=number,
    )


def _ranks(case: Case, communicator: _Communicator) -> dict[_Process, int]:
    """Return the ranks of processes in the job, as far as they are known.

    If no line ties a process to a rank, its number in the largest communicator is taken for it.
    RCCL writes that. Otherwise it is its device's if all members are on one host, and their devices
    are numbered as their ranks must be.
    """
    calls = {process: calls[-1] for process, calls in communicator.calls.items()}
    said = {process: case.rank_of_fact(call) for process, call in calls.items()}
    known = {process: rank for process, rank in said.items() if rank >= 0}
    if len(set(known.values())) < len(known):
        known = {}  # a launcher's prefix that stands before the lines of several ranks
    if len(known) == len(calls) or communicator.size != _largest(case):
        return known
    in_communicator = {process: call.rank for process, call in calls.items()}
    if -1 in in_communicator.values():
        is_one_host = len({host for host, _ in calls}) == 1
        in_communicator = {process: call.device for process, call in calls.items()}
        if not is_one_host or set(in_communicator.values()) != set(range(communicator.size)):
            return known
    is_sound = len(set(in_communicator.values())) == len(calls) and (
        max(in_communicator.values()) < communicator.size
    )
    agrees = all(in_communicator[process] == rank for process, rank in known.items())
    return in_communicator if is_sound and agrees else known


def _fact(
    relation: Relation,
    communicator: _Communicator,
    ranks: Mapping[_Process, int],
    processes: Iterable[_Process],
    calls: Mapping[_Process, Enqueued],
) -> Fact:
    """Return what some processes called; they are named by their ranks if all are known."""
    names = sorted(processes)
    call = calls[names[0]]
    are_known = all(process in ranks for process in names)
    values = {
        "number": f"{call.number:x}",
        "arguments": call.arguments,
        "size": str(communicator.size),
        "pids": "" if are_known else " ".join(str(pid) for _, pid in names),
        "host": "" if are_known or len({host for host, _ in names}) > 1 else names[0][0],
    }
    return Fact(
        relation,
        subject(ranks[process] for process in names) if are_known else None,
        CallFact(call.op, call.number),
        values=tuple((name, value) for name, value in values.items() if value),
    )
