"""The scoreboard's table: faults that the benchmarks of MPI tools define, for torch.distributed.

The classes are those of the MPI Bugs Initiative (Laguna et al., Correctness 2021) and of
MPI-CorrBench (Lehr et al., SC 2021). A row of the table says which fault is planted, in which op,
and on which ranks. From the row follow the programs of all ranks and the right verdict, so no
verdict is written down from what rankcall finds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from scoreboard_calls import Call

Program = list[list[Call]]  # by rank
Cause = tuple[str, tuple[int, ...]]  # kind, culprits

STEPS, AT = 6, 3  # steps of a program, and the step in which its fault is
TWINS = {"left": [], "right": []}  # groups of all ranks
# The op beside the one of a row: without it, a skipped call could not be told from a short program.
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


def _sound(op: str, world_size: int, **fields: object) -> Program:
    """Return a sound program: in each step the op and another one, and a barrier at the end."""
    call = replace(Call(op), **fields)  # type: ignore[arg-type]
    beside = replace(Call(_BESIDE.get(op, "all_gather")), group=call.group)
    steps = [each for _ in range(STEPS) for each in (call, beside)]
    return [[*steps, Call("barrier")] for _ in range(world_size)]


def _case(name: str, kind_of_fault: str, program: Program, *causes: Cause, **about: object) -> Case:
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


def _changed(
    kind_of_fault: str, op: str, ranks: Sequence[int], world_size: int = 4, **fields: object
) -> Case:
    """Some ranks issue the op with other arguments: ``mismatch``."""
    silent = bool(fields.pop("silent", False))
    given = {"dtype": "int32"} if fields.get("reduce_op") == "BOR" else {}
    if given:
        given["reduce_op"] = "BAND"
    program = _sound(op, world_size, **given)
    for rank in ranks:
        program[rank][2 * AT] = replace(program[rank][2 * AT], **fields)  # type: ignore[arg-type]
    tie = 2 * len(ranks) == world_size
    concerned = tuple(range(world_size)) if tie else tuple(ranks)
    what = "-".join(str(value) for value in fields.values()).replace(" ", "")
    name = f"{kind_of_fault}: {op} {what} on {','.join(map(str, ranks))} of {world_size}"
    return _case(name, kind_of_fault, program, ("mismatch", concerned), tie=tie, silent=silent)


def _edited(
    kind_of_fault: str,
    name: str,
    op: str,
    ranks: Sequence[int],
    edit: Callable[[list[Call], int], None],
    cause: Cause,
    world_size: int = 4,
) -> Case:
    """Some ranks' lists of calls are edited at the step of the fault."""
    program = _sound(op, world_size)
    for rank in ranks:
        edit(program[rank], 2 * AT)
    tie = cause[0] in ("desync", "mismatch") and len(cause[1]) == world_size
    name = f"{kind_of_fault}: {name} on {','.join(map(str, ranks))} of {world_size}"
    return _case(name, kind_of_fault, program, cause, tie=tie)


def _replaced(op: str, by: str, ranks: Sequence[int], world_size: int = 4) -> Case:
    def edit(calls: list[Call], at: int) -> None:
        calls[at] = Call(by)

    tie = 2 * len(ranks) == world_size
    concerned = tuple(range(world_size)) if tie else tuple(ranks)
    return _edited(MATCHING, f"{op} as {by}", op, ranks, edit, ("desync", concerned), world_size)


def _swapped(op: str, rank: int, world_size: int = 4) -> Case:
    def edit(calls: list[Call], at: int) -> None:
        calls[at], calls[at + 1] = calls[at + 1], calls[at]

    concerned = (0, 1) if world_size == 2 else (rank,)
    return _edited(ORDERING, f"{op} swapped", op, [rank], edit, ("desync", concerned), world_size)


def _skipped(op: str, rank: int, world_size: int = 4) -> Case:
    def edit(calls: list[Call], at: int) -> None:
        del calls[at]

    return _edited(ORDERING, f"{op} skipped", op, [rank], edit, ("desync", (rank,)), world_size)


def _added(op: str, extra: str, rank: int, world_size: int = 4) -> Case:
    def edit(calls: list[Call], at: int) -> None:
        calls.insert(at, Call(extra))

    return _edited(
        ORDERING, f"{extra} added to {op}", op, [rank], edit, ("desync", (rank,)), world_size
    )


def _left(op: str, ranks: Sequence[int], world_size: int = 4, *, last: bool = False) -> Case:
    """Some ranks end their programs before the fault's step, or before the last barrier."""

    def edit(calls: list[Call], at: int) -> None:
        del calls[-1 if last else at :]

    what = f"{'last barrier' if last else op} left out"
    return _edited(ORDERING, what, op, ranks, edit, ("exhausted", tuple(ranks)), world_size)


def _invalid(name: str, op: str, rank: int, bad: Call, kind: str) -> Case:
    """One rank passes an argument that torch refuses; it fails, and the others wait."""

    def edit(calls: list[Call], at: int) -> None:
        calls[at] = bad

    return _edited(PARAMETER, name, op, [rank], edit, (kind, (rank,)))


def _messages(
    name: str,
    kind_of_fault: str,
    faulty: Sequence[Sequence[Call]],
    *causes: Cause,
    **about: object,
) -> Case:
    """Put calls that differ by rank between two sound all_reduces."""
    around = [Call("all_reduce")] * 2
    program = [[*around, *mine, *around] for mine in faulty]
    return _case(f"{kind_of_fault}: {name}", kind_of_fault, program, *causes, **about)


def send(to: int, tag: int = 0, **fields: object) -> Call:
    """Return a send."""
    return replace(Call("send", peer=to, tag=tag), **fields)  # type: ignore[arg-type]


def recv(source: int = -1, tag: int = 0, **fields: object) -> Call:
    """Return a receive, from any rank if no source is given."""
    return replace(Call("recv", peer=source, tag=tag), **fields)  # type: ignore[arg-type]


def on(group: str, op: str = "all_reduce", **fields: object) -> Call:
    """Return a collective on a group."""
    return replace(Call(op, group=group), **fields)  # type: ignore[arg-type]


COLLECTIVES = [
    _replaced("all_reduce", "reduce", [1]),
    _replaced("all_reduce", "broadcast", [2]),
    _replaced("broadcast", "all_reduce", [3]),
    _replaced("all_gather", "gather", [0]),
    _replaced("reduce", "all_reduce", [2]),
    _replaced("barrier", "all_reduce", [1]),
    _replaced("scatter", "broadcast", [3]),
    _replaced("all_to_all", "all_gather", [1]),
    _replaced("reduce_scatter", "all_reduce", [0], 3),
    _replaced("gather", "reduce", [2], 3),
    _replaced("all_reduce", "broadcast", [1], 2),
    _replaced("all_reduce", "reduce", [1, 2]),
    _messages(
        "recv in place of all_reduce on 1 of 4",
        MATCHING,
        [[Call("all_reduce")], [recv(0)], [Call("all_reduce")], [Call("all_reduce")]],
        ("deadlock", (0, 1)),
    ),
]

ORDER = [
    _swapped("all_reduce", 2),
    _swapped("broadcast", 0),
    _swapped("reduce", 1, 3),
    _swapped("gather", 1, 2),
    _skipped("all_reduce", 2),
    _skipped("broadcast", 1),
    _skipped("reduce_scatter", 0, 3),
    _added("all_reduce", "broadcast", 3),
    _added("all_gather", "barrier", 1, 3),
    _left("all_reduce", [1]),
    _left("broadcast", [0]),
    _left("all_gather", [0, 2, 3]),
    _left("all_reduce", [3], last=True),
    _messages(
        "two receive first",
        ORDERING,
        [[recv(1), send(1)], [recv(0), send(0)]],
        ("deadlock", (0, 1)),
    ),
    _messages(
        "two send first", ORDERING, [[send(1), recv(1)], [send(0), recv(0)]], ("deadlock", (0, 1))
    ),
    _messages(
        "three receive first in a ring",
        ORDERING,
        [[recv(2), send(1)], [recv(0), send(2)], [recv(1), send(0)]],
        ("deadlock", (0, 1, 2)),
    ),
    _messages("send left out on 1 of 3", ORDERING, [[recv(1)], [], []], ("deadlock", (0, 1))),
    _messages("recv left out on 2 of 3", ORDERING, [[send(2)], [], []], ("deadlock", (0, 2))),
]

DTYPES = [
    _changed(DATATYPE, "all_reduce", [2], dtype="int32", silent=True),
    _changed(DATATYPE, "broadcast", [1], dtype="int32", silent=True),
    _changed(DATATYPE, "reduce", [3], dtype="int32", silent=True),
    _changed(DATATYPE, "all_gather", [0], dtype="int32", silent=True),
    _changed(DATATYPE, "gather", [2], dtype="int32", silent=True),
    _changed(DATATYPE, "scatter", [1], dtype="int32", silent=True),
    _changed(DATATYPE, "reduce_scatter", [1], dtype="int32", silent=True),
    _changed(DATATYPE, "all_to_all", [2], dtype="int32", silent=True),
    _changed(DATATYPE, "all_reduce", [1], 2, dtype="int32", silent=True),
    _changed(DATATYPE, "all_reduce", [3], dtype="float64", count=4, silent=True),
    _changed(DATATYPE, "all_reduce", [1], 3, dtype="float64"),
    _changed(DATATYPE, "broadcast", [2], 3, dtype="float16"),
    _messages(
        "message of the same size",
        DATATYPE,
        [[send(1)], [recv(0, dtype="int32")]],
        ("mismatch", (0, 1)),
        tie=True,
        silent=True,
    ),
]

COUNTS = [
    _changed(COUNT, "all_reduce", [2], count=6),
    _changed(COUNT, "broadcast", [1], count=12),
    _changed(COUNT, "reduce", [3], count=6),
    _changed(COUNT, "all_gather", [0], count=12),
    _changed(COUNT, "gather", [1], count=6),
    _changed(COUNT, "scatter", [3], count=12),
    _changed(COUNT, "reduce_scatter", [2], count=12),
    _changed(COUNT, "all_to_all", [1], count=12),
    _changed(COUNT, "all_reduce", [1], 2, count=6),
    _messages(
        "message shorter than its receive",
        COUNT,
        [[send(1, count=4)], [recv(0)]],
        ("mismatch", (0, 1)),
        tie=True,
        silent=True,
    ),
    _messages(
        "message longer than its receive",
        COUNT,
        [[], [send(2, count=12)], [recv(1)]],
        ("mismatch", (1, 2)),
        tie=True,
    ),
]

ROOTS = [
    _changed(ROOT, "broadcast", [2], root=2),
    _changed(ROOT, "broadcast", [1], root=3),
    _changed(ROOT, "reduce", [3], root=3),
    _changed(ROOT, "gather", [1], root=1),
    _changed(ROOT, "scatter", [2], root=2),
    _changed(ROOT, "broadcast", [1], 2, root=1),
]

OPERATORS = [
    _changed(OPERATOR, "all_reduce", [2], reduce_op="MAX", silent=True),
    _changed(OPERATOR, "all_reduce", [0], reduce_op="PRODUCT", silent=True),
    _changed(OPERATOR, "reduce", [1], reduce_op="MIN", silent=True),
    _changed(OPERATOR, "reduce_scatter", [3], reduce_op="MAX", silent=True),
    _changed(OPERATOR, "all_reduce", [1], reduce_op="BOR", silent=True),
    _changed(OPERATOR, "all_reduce", [1], 2, reduce_op="MAX", silent=True),
]

_ALL = (0, 1, 2, 3)
COMMUNICATORS = [
    _messages(
        "one rank on the twin group",
        COMMUNICATOR,
        [[on("left")], [on("right")], [on("left")], [on("left")]],
        ("deadlock", _ALL),
        groups=TWINS,
    ),
    _messages(
        "groups in opposite order on one rank",
        COMMUNICATOR,
        [[on("left"), on("right")] if rank != 2 else [on("right"), on("left")] for rank in _ALL],
        ("deadlock", _ALL),
        groups=TWINS,
    ),
    _messages(
        "broadcasts of two groups in opposite order",
        COMMUNICATOR,
        [
            [on("left", "barrier"), on("right", "all_gather")],
            [on("right", "all_gather"), on("left", "barrier")],
        ],
        ("deadlock", (0, 1)),
        groups=TWINS,
    ),
    _messages(
        "half of the world in place of the world",
        COMMUNICATOR,
        [
            [Call("all_gather")],
            [Call("all_gather")],
            [Call("all_gather")],
            [on("half", "all_gather")],
        ],
        ("deadlock", (2, 3)),
        groups={"half": [2, 3]},
    ),
    _messages(
        "three groups in a ring",
        COMMUNICATOR,
        [[on("01"), on("02")], [on("12"), on("01")], [on("02"), on("12")]],
        ("deadlock", (0, 1, 2)),
        groups={"01": [0, 1], "12": [1, 2], "02": [0, 2]},
    ),
    _messages(
        "message on another group",
        COMMUNICATOR,
        [[send(1, group="left")], [recv(0, group="right")], []],
        ("deadlock", (0, 1)),
        groups=TWINS,
    ),
]

TAGS = [
    _messages("wrong tag of a send", TAG, [[send(1, 5)], [recv(0, 4)]], ("deadlock", (0, 1))),
    _messages(
        "wrong tag of a receive", TAG, [[], [send(2, 1)], [recv(1, 2)], []], ("deadlock", (1, 2))
    ),
    _messages(
        "tags in opposite order",
        TAG,
        [[send(1, 1), send(1, 2)], [recv(0, 2), recv(0, 1)]],
        ("deadlock", (0, 1)),
    ),
]

RACES = [
    _messages(
        "any source takes the message of the next receive",
        RACE,
        [
            [recv(), Call("announce", key="taken"), recv(1)],
            [send(0)],
            [Call("await", key="taken"), send(0)],
        ],
        ("deadlock", (0, 1, 2)),
    ),
    _messages(
        "any source takes a message of another size",
        RACE,
        [
            [recv(count=8), Call("announce", key="taken"), recv(count=4)],
            [send(0, count=4)],
            [Call("await", key="taken"), send(0, count=8)],
        ],
        ("mismatch", (0, 1)),
        ("mismatch", (0, 2)),
        tie=True,
    ),
    _messages(
        "any source takes a message of another dtype",
        RACE,
        [
            [recv(), Call("announce", key="taken"), recv(dtype="int32")],
            [send(0, dtype="int32")],
            [Call("await", key="taken"), send(0)],
        ],
        ("mismatch", (0, 1)),
        ("mismatch", (0, 2)),
        tie=True,
        silent=True,
    ),
    _messages(
        "two receives of any source for one message",
        RACE,
        [[recv(), recv()], [send(0)], []],
        ("deadlock", (0, 1, 2)),
    ),
]

_IN_ORDER = (Call("all_reduce"), Call("broadcast"))
CONCURRENCY = [
    _messages(
        "two threads, in another order on 2 of 4",
        THREADS,
        [[Call("threads", threads=_IN_ORDER if rank != 2 else _IN_ORDER[::-1])] for rank in _ALL],
        ("desync", (2,)),
    ),
    _messages(
        "async calls in another order on 1 of 3",
        THREADS,
        [
            [Call(op) for op in (ops if rank != 1 else ops[::-1])] + [Call("wait")]
            for rank in range(3)
            for ops in [("all_reduce_async", "broadcast_async")]
        ],
        ("desync", (1,)),
    ),
    _messages(
        "async all_reduces of two sizes in another order on 0 of 3",
        THREADS,
        [
            [replace(Call("all_reduce_async"), count=count) for count in counts] + [Call("wait")]
            for counts in [(16, 8), (8, 16), (8, 16)]
        ],
        ("desync", (0,)),
    ),
    _messages(
        "tensor written before the wait on 1 of 3",
        BUFFERS,
        [[Call("all_reduce" if rank != 1 else "all_reduce_written")] for rank in range(3)],
        ("race", (1,)),
        silent=True,
    ),
    _messages(
        "tensor read before the wait on 2 of 3",
        BUFFERS,
        [[Call("broadcast" if rank != 2 else "broadcast_read")] for rank in range(3)],
        ("race", (2,)),
        silent=True,
    ),
]

PARAMETERS = [
    _changed(PARAMETER, "broadcast", [2], root=9),
    _changed(PARAMETER, "reduce", [0], 3, root=9),
    _changed(PARAMETER, "all_reduce", [1], reduce_op="BAND"),
    _invalid("list too short", "all_gather", 0, Call("all_gather_short"), "mismatch"),
    _invalid("negative tag", "all_reduce", 1, send(0, tag=-1), "dead"),
    _invalid("peer outside the group", "all_reduce", 3, send(9), "dead"),
]

FAULTY = [
    *COLLECTIVES,
    *ORDER,
    *DTYPES,
    *COUNTS,
    *ROOTS,
    *OPERATORS,
    *COMMUNICATORS,
    *TAGS,
    *RACES,
    *CONCURRENCY,
    *PARAMETERS,
]


def _fine(name: str, program: Program, **about: object) -> Case:
    return _case(f"correct: {name}", CORRECT, program, **about)


def _everywhere(world_size: int, *calls: Call) -> Program:
    return [list(calls) * STEPS for _ in range(world_size)]


_NEXT = [[send((rank + 1) % 4), recv((rank - 1) % 4)] for rank in range(4)]
SOUND = [
    *(
        _fine(f"{op} on {world_size}", _sound(op, world_size))
        for op, world_size in (
            ("all_reduce", 4),
            ("broadcast", 3),
            ("reduce", 4),
            ("all_gather", 2),
            ("gather", 4),
            ("scatter", 3),
            ("reduce_scatter", 4),
            ("all_to_all", 3),
            ("barrier", 4),
            ("all_gather_object", 3),
            ("broadcast_object", 4),
            ("ddp", 2),
            ("batch", 4),
        )
    ),
    _fine(
        "each rank is the root in turn",
        _everywhere(
            4, *(Call(op, root=root) for root in range(4) for op in ("broadcast", "reduce"))
        ),
    ),
    _fine(
        "sizes and dtypes change from call to call",
        _everywhere(
            3,
            Call("all_reduce", count=4),
            Call("all_reduce", count=64, dtype="int64"),
            Call("all_gather", dtype="float64"),
            Call("all_reduce", dtype="bfloat16"),
        ),
    ),
    _fine(
        "reduce ops change from call to call",
        _everywhere(4, Call("all_reduce", reduce_op="MAX"), Call("all_reduce"), Call("reduce")),
    ),
    _fine(
        "uneven all_to_all",
        [
            [Call("all_to_all", splits=((1, 2), (1, 3)))] * STEPS,
            [Call("all_to_all", splits=((3, 4), (2, 4)))] * STEPS,
        ],
    ),
    _fine(
        "two groups in one order",
        _everywhere(4, on("left"), on("right", "broadcast"), on("left", "all_gather")),
        groups=TWINS,
    ),
    _fine(
        "halves do different things",
        [
            [on("low")] * STEPS if rank < 2 else [on("high", "broadcast", root=3)] * 2 * STEPS
            for rank in range(4)
        ],
        groups={"low": [0, 1], "high": [2, 3]},
    ),
    _fine(
        "groups that overlap",
        [
            [on("01"), on("02")] * STEPS,
            [on("01"), on("12")] * STEPS,
            [on("02"), on("12")] * STEPS,
        ],
        groups={"01": [0, 1], "12": [1, 2], "02": [0, 2]},
    ),
    _fine("messages in a ring", [m if r else m[::-1] for r, m in enumerate(_NEXT)]),
    _fine(
        "async messages in a ring",
        [
            [Call("isend", peer=(rank + 1) % 3), Call("irecv", peer=(rank - 1) % 3), Call("wait")]
            * STEPS
            for rank in range(3)
        ],
    ),
    _fine(
        "tags out of order, without waiting",
        [
            [Call("isend", peer=1, tag=1), Call("isend", peer=1, tag=2), Call("wait")],
            [recv(0, 2), recv(0, 1)],
        ],
    ),
    _fine(
        "messages of two sizes and dtypes",
        [
            [send(1, count=4), send(1, dtype="int64")] * STEPS,
            [recv(0, count=4), recv(0, dtype="int64")] * STEPS,
        ],
    ),
    _fine(
        "any source, all messages alike",
        [[recv()] * 2 * STEPS, [send(0)] * STEPS, [send(0)] * STEPS],
    ),
    _fine(
        "any source, then the one that is left",
        [
            [recv(tag=1), Call("announce", key="taken"), recv(2, 1)],
            [send(0, 1)],
            [Call("await", key="taken"), send(0, 1)],
        ],
    ),
    _fine("two threads in one order", _everywhere(3, Call("threads", threads=_IN_ORDER))),
    _fine(
        "two threads with groups of their own",
        [
            [Call("threads", threads=both if rank else both[::-1])] * STEPS
            for rank in range(2)
            for both in [(on("left"), on("right"))]
        ],
        groups=TWINS,
    ),
    _fine(
        "async calls that are waited for backwards",
        _everywhere(4, Call("all_reduce_async"), Call("broadcast_async"), Call("wait")),
    ),
    _fine(
        "two ranks exchange messages beside the others' collectives",
        [
            [on("low"), send(2), Call("barrier")] * STEPS,
            [on("low"), Call("barrier")] * STEPS,
            [recv(0), Call("barrier")] * STEPS,
        ],
        groups={"low": [0, 1]},
    ),
    _fine(
        "ranks end one after the other",
        [[Call("all_reduce"), *[send(2)] * rank] for rank in range(2)]
        + [[Call("all_reduce"), recv(1)]],
    ),
]

CASES = [*FAULTY, *SOUND]
