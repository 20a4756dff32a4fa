"""Rows of the scoreboard: how a fault becomes the programs of all ranks and the right verdict.

The classes are those of the MPI Bugs Initiative (Laurent, Saillard and Quinson, 2021) and of
MPI-CorrBench (Lehr, Jammer and Bischof, 2021). A row says which fault is planted, in which op, and
on which ranks. The programs of all ranks and the right verdict follow from that, so no verdict is
copied from a diagnosis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from scoreboard_calls import Call

Program = list[list[Call]]  # by rank
Cause = tuple[str, tuple[int, ...]]  # kind, culprits

STEPS, AT = 6, 3  # steps of a program, and the step in which its fault is
TWINS = {"left": [], "right": []}  # groups of all ranks
# The op beside the one of a row: without it, a skipped call would look like a short program.
_BESIDE = {"all_gather": "all_reduce"}

# Classes of faults.
MATCHING = "call matching"
ORDERING = "call ordering"
DATATYPE = "datatype"
COUNT = "count"
ROOT = "root"
OPERATOR = "operator"
COMMUNICATOR = "communicator"
TAG = "tag"
RACE = "message race"
THREADS = "local concurrency: order"
BUFFERS = "local concurrency: buffers"
PARAMETER = "invalid parameter"
CORRECT = "correct"


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        name: The name, unique in the table.
        kind_of_fault: One of the classes above.
        program: The calls of each rank.
        causes: The right findings; none for a correct program.
        tie: As many ranks are on one side as on the other. The right verdict then blames no rank,
            and says that all ranks of a cause are concerned.
        silent: The program ends, with wrong results.
        groups: Groups to create, by name.
    """

    name: str
    kind_of_fault: str
    program: tuple[tuple[Call, ...], ...]
    causes: tuple[Cause, ...] = ()
    tie: bool = False
    silent: bool = False
    groups: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.program)


def sound_program(op: str, world_size: int, **fields: object) -> Program:
    """Return a sound program: in each step the op and another one, and a barrier at the end."""
    call = replace(Call(op), **fields)  # type: ignore[arg-type]
    beside = replace(Call(_BESIDE.get(op, "all_gather")), group=call.group)
    steps = [step_call for _ in range(STEPS) for step_call in (call, beside)]
    return [[*steps, Call("barrier")] for _ in range(world_size)]


def case_of(
    name: str, kind_of_fault: str, program: Program, *causes: Cause, **about: object
) -> Case:
    """Make a row; ``about`` has the other fields of ``Case``, with the groups as a dict."""
    groups = about.pop("groups", {})
    assert isinstance(groups, dict)
    everybody = tuple(range(len(program)))
    return Case(
        name,
        kind_of_fault,
        tuple(map(tuple, program)),
        causes,
        groups=tuple((name, tuple(ranks) or everybody) for name, ranks in groups.items()),
        **about,  # type: ignore[arg-type]
    )


def changed(
    kind_of_fault: str, op: str, ranks: Sequence[int], world_size: int = 4, **fields: object
) -> Case:
    """Some ranks issue the op with other arguments: ``mismatch``."""
    silent = bool(fields.pop("silent", False))
    sound_fields = {"dtype": "int32"} if fields.get("reduce_op") == "BOR" else {}
    if sound_fields:
        sound_fields["reduce_op"] = "BAND"
    program = sound_program(op, world_size, **sound_fields)
    for rank in ranks:
        program[rank][2 * AT] = replace(program[rank][2 * AT], **fields)  # type: ignore[arg-type]
    tie = 2 * len(ranks) == world_size
    concerned = tuple(range(world_size)) if tie else tuple(ranks)
    what = "-".join(str(value) for value in fields.values()).replace(" ", "")
    name = f"{kind_of_fault}: {op} {what} on {','.join(map(str, ranks))} of {world_size}"
    return case_of(name, kind_of_fault, program, ("mismatch", concerned), tie=tie, silent=silent)


def edited(
    kind_of_fault: str,
    name: str,
    op: str,
    ranks: Sequence[int],
    edit: Callable[[list[Call], int], None],
    cause: Cause,
    world_size: int = 4,
) -> Case:
    """Some ranks' lists of calls are edited at the step of the fault."""
    program = sound_program(op, world_size)
    for rank in ranks:
        edit(program[rank], 2 * AT)
    tie = cause[0] in ("desync", "mismatch") and len(cause[1]) == world_size
    name = f"{kind_of_fault}: {name} on {','.join(map(str, ranks))} of {world_size}"
    return case_of(name, kind_of_fault, program, cause, tie=tie)


def replaced(op: str, by: str, ranks: Sequence[int], world_size: int = 4) -> Case:
    """Some ranks issue another op: ``desync``."""

    def edit(calls: list[Call], at: int) -> None:
        calls[at] = Call(by)

    tie = 2 * len(ranks) == world_size
    concerned = tuple(range(world_size)) if tie else tuple(ranks)
    return edited(MATCHING, f"{op} as {by}", op, ranks, edit, ("desync", concerned), world_size)


def swapped(op: str, rank: int, world_size: int = 4) -> Case:
    """A rank issues two calls in the other order: ``desync``."""

    def edit(calls: list[Call], at: int) -> None:
        calls[at], calls[at + 1] = calls[at + 1], calls[at]

    concerned = (0, 1) if world_size == 2 else (rank,)
    return edited(ORDERING, f"{op} swapped", op, [rank], edit, ("desync", concerned), world_size)


def skipped(op: str, rank: int, world_size: int = 4) -> Case:
    """A rank leaves a call out and goes on: ``desync``."""

    def edit(calls: list[Call], at: int) -> None:
        del calls[at]

    return edited(ORDERING, f"{op} skipped", op, [rank], edit, ("desync", (rank,)), world_size)


def added(op: str, extra: str, rank: int, world_size: int = 4) -> Case:
    """A rank issues one call more than the others: ``desync``."""

    def edit(calls: list[Call], at: int) -> None:
        calls.insert(at, Call(extra))

    return edited(
        ORDERING, f"{extra} added to {op}", op, [rank], edit, ("desync", (rank,)), world_size
    )


def left_out(op: str, ranks: Sequence[int], world_size: int = 4, *, last: bool = False) -> Case:
    """Some ranks end their programs before the fault's step, or before the last barrier."""

    def edit(calls: list[Call], at: int) -> None:
        del calls[-1 if last else at :]

    what = f"{'last barrier' if last else op} left out"
    return edited(ORDERING, what, op, ranks, edit, ("exhausted", tuple(ranks)), world_size)


def invalid(name: str, op: str, rank: int, bad: Call, kind: str) -> Case:
    """One rank passes an argument that torch refuses; it fails, and the others wait."""

    def edit(calls: list[Call], at: int) -> None:
        calls[at] = bad

    return edited(PARAMETER, name, op, [rank], edit, (kind, (rank,)))


def messages(
    name: str,
    kind_of_fault: str,
    faulty: Sequence[Sequence[Call]],
    *causes: Cause,
    **about: object,
) -> Case:
    """Put calls that differ by rank between two sound all_reduces."""
    around = [Call("all_reduce")] * 2
    program = [[*around, *mine, *around] for mine in faulty]
    return case_of(f"{kind_of_fault}: {name}", kind_of_fault, program, *causes, **about)


def send(to: int, tag: int = 0, **fields: object) -> Call:
    """Return a send."""
    return replace(Call("send", peer=to, tag=tag), **fields)  # type: ignore[arg-type]


def recv(source: int = -1, tag: int = 0, **fields: object) -> Call:
    """Return a receive, from any rank if no source is given."""
    return replace(Call("recv", peer=source, tag=tag), **fields)  # type: ignore[arg-type]


def on(group: str, op: str = "all_reduce", **fields: object) -> Call:
    """Return a collective on a group."""
    return replace(Call(op, group=group), **fields)  # type: ignore[arg-type]
