"""The faulty rows of the scoreboard, by class."""

from __future__ import annotations

from dataclasses import replace

from scoreboard_calls import Call
from scoreboard_case import (
    BUFFERS,
    COMMUNICATOR,
    COUNT,
    DATATYPE,
    MATCHING,
    OPERATOR,
    ORDERING,
    PARAMETER,
    RACE,
    ROOT,
    TAG,
    THREADS,
    TWINS,
    added,
    changed,
    invalid,
    left_out,
    messages,
    on,
    recv,
    replaced,
    send,
    skipped,
    swapped,
)

COLLECTIVES = [
    replaced("all_reduce", "reduce", [1]),
    replaced("all_reduce", "broadcast", [2]),
    replaced("broadcast", "all_reduce", [3]),
    replaced("all_gather", "gather", [0]),
    replaced("reduce", "all_reduce", [2]),
    replaced("barrier", "all_reduce", [1]),
    replaced("scatter", "broadcast", [3]),
    replaced("all_to_all", "all_gather", [1]),
    replaced("reduce_scatter", "all_reduce", [0], 3),
    replaced("gather", "reduce", [2], 3),
    replaced("all_reduce", "broadcast", [1], 2),
    replaced("all_reduce", "reduce", [1, 2]),
    messages(
        "recv in place of all_reduce on 1 of 4",
        MATCHING,
        [[Call("all_reduce")], [recv(0)], [Call("all_reduce")], [Call("all_reduce")]],
        ("deadlock", (0, 1)),
    ),
]

ORDER = [
    swapped("all_reduce", 2),
    swapped("broadcast", 0),
    swapped("reduce", 1, 3),
    swapped("gather", 1, 2),
    skipped("all_reduce", 2),
    skipped("broadcast", 1),
    skipped("reduce_scatter", 0, 3),
    added("all_reduce", "broadcast", 3),
    added("all_gather", "barrier", 1, 3),
    left_out("all_reduce", [1]),
    left_out("broadcast", [0]),
    left_out("all_gather", [0, 2, 3]),
    left_out("all_reduce", [3], last=True),
    messages(
        "two receive first",
        ORDERING,
        [[recv(1), send(1)], [recv(0), send(0)]],
        ("deadlock", (0, 1)),
    ),
    messages(
        "two send first", ORDERING, [[send(1), recv(1)], [send(0), recv(0)]], ("deadlock", (0, 1))
    ),
    messages(
        "three receive first in a ring",
        ORDERING,
        [[recv(2), send(1)], [recv(0), send(2)], [recv(1), send(0)]],
        ("deadlock", (0, 1, 2)),
    ),
    messages("send left out on 1 of 3", ORDERING, [[recv(1)], [], []], ("deadlock", (0, 1))),
    messages("recv left out on 2 of 3", ORDERING, [[send(2)], [], []], ("deadlock", (0, 2))),
]

DTYPES = [
    changed(DATATYPE, "all_reduce", [2], dtype="int32", silent=True),
    changed(DATATYPE, "broadcast", [1], dtype="int32", silent=True),
    changed(DATATYPE, "reduce", [3], dtype="int32", silent=True),
    changed(DATATYPE, "all_gather", [0], dtype="int32", silent=True),
    changed(DATATYPE, "gather", [2], dtype="int32", silent=True),
    changed(DATATYPE, "scatter", [1], dtype="int32", silent=True),
    changed(DATATYPE, "reduce_scatter", [1], dtype="int32", silent=True),
    changed(DATATYPE, "all_to_all", [2], dtype="int32", silent=True),
    changed(DATATYPE, "all_reduce", [1], 2, dtype="int32", silent=True),
    changed(DATATYPE, "all_reduce", [3], dtype="float64", count=4),
    changed(DATATYPE, "all_reduce", [1], 3, dtype="float64"),
    changed(DATATYPE, "broadcast", [2], 3, dtype="float16"),
    messages(
        "message of the same size",
        DATATYPE,
        [[send(1)], [recv(0, dtype="int32")]],
        ("mismatch", (0, 1)),
        tie=True,
        silent=True,
    ),
]

COUNTS = [
    changed(COUNT, "all_reduce", [2], count=6),
    changed(COUNT, "broadcast", [1], count=12),
    changed(COUNT, "reduce", [3], count=6),
    changed(COUNT, "all_gather", [0], count=12),
    changed(COUNT, "gather", [1], count=6, silent=True),
    changed(COUNT, "scatter", [3], count=12, silent=True),
    changed(COUNT, "reduce_scatter", [2], count=12),
    changed(COUNT, "all_to_all", [1], count=12),
    changed(COUNT, "all_reduce", [1], 2, count=6),
    messages(
        "message shorter than its receive",
        COUNT,
        [[send(1, count=4)], [recv(0)]],
        ("mismatch", (0, 1)),
        tie=True,
        silent=True,
    ),
    messages(
        "message longer than its receive",
        COUNT,
        [[], [send(2, count=12)], [recv(1)]],
        ("mismatch", (1, 2)),
        tie=True,
    ),
]

ROOTS = [
    changed(ROOT, "broadcast", [2], root=2),
    changed(ROOT, "broadcast", [1], root=3),
    changed(ROOT, "reduce", [3], root=3),
    changed(ROOT, "gather", [1], root=1),
    changed(ROOT, "scatter", [2], root=2),
    changed(ROOT, "broadcast", [1], 2, root=1),
]

OPERATORS = [
    changed(OPERATOR, "all_reduce", [2], reduce_op="MAX", silent=True),
    changed(OPERATOR, "all_reduce", [0], reduce_op="PRODUCT", silent=True),
    changed(OPERATOR, "reduce", [1], reduce_op="MIN", silent=True),
    changed(OPERATOR, "reduce_scatter", [3], reduce_op="MAX", silent=True),
    changed(OPERATOR, "all_reduce", [1], reduce_op="BOR", silent=True),
    changed(OPERATOR, "all_reduce", [1], 2, reduce_op="MAX", silent=True),
]

_ALL = (0, 1, 2, 3)
COMMUNICATORS = [
    messages(
        "one rank on the twin group",
        COMMUNICATOR,
        [[on("left")], [on("right")], [on("left")], [on("left")]],
        ("deadlock", _ALL),
        groups=TWINS,
    ),
    messages(
        "groups in opposite order on one rank",
        COMMUNICATOR,
        [[on("left"), on("right")] if rank != 2 else [on("right"), on("left")] for rank in _ALL],
        ("deadlock", _ALL),
        groups=TWINS,
    ),
    messages(
        "broadcasts of two groups in opposite order",
        COMMUNICATOR,
        [
            [on("left", "barrier"), on("right", "all_gather")],
            [on("right", "all_gather"), on("left", "barrier")],
        ],
        ("deadlock", (0, 1)),
        groups=TWINS,
    ),
    messages(
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
    messages(
        "three groups in a ring",
        COMMUNICATOR,
        [[on("01"), on("02")], [on("12"), on("01")], [on("02"), on("12")]],
        ("deadlock", (0, 1, 2)),
        groups={"01": [0, 1], "12": [1, 2], "02": [0, 2]},
    ),
    messages(
        "message on another group",
        COMMUNICATOR,
        [[send(1, group="left")], [recv(0, group="right")], []],
        ("deadlock", (0, 1)),
        groups=TWINS,
    ),
]

TAGS = [
    messages("wrong tag of a send", TAG, [[send(1, 5)], [recv(0, 4)]], ("deadlock", (0, 1))),
    messages(
        "wrong tag of a receive", TAG, [[], [send(2, 1)], [recv(1, 2)], []], ("deadlock", (1, 2))
    ),
    messages(
        "tags in opposite order",
        TAG,
        [[send(1, 1), send(1, 2)], [recv(0, 2), recv(0, 1)]],
        ("deadlock", (0, 1)),
    ),
]

RACES = [
    messages(
        "any source takes the message of the next receive",
        RACE,
        [
            [recv(), Call("announce", key="taken"), recv(1)],
            [send(0)],
            [Call("await", key="taken"), send(0)],
        ],
        ("deadlock", (0, 1, 2)),
    ),
    messages(
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
    messages(
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
    messages(
        "two receives of any source for one message",
        RACE,
        [[recv(), recv()], [send(0)], []],
        ("deadlock", (0, 1, 2)),
    ),
]

_IN_ORDER = (Call("all_reduce"), Call("broadcast"))
CONCURRENCY = [
    messages(
        "two threads, in another order on 2 of 4",
        THREADS,
        [[Call("threads", threads=_IN_ORDER if rank != 2 else _IN_ORDER[::-1])] for rank in _ALL],
        ("desync", (2,)),
    ),
    messages(
        "async calls in another order on 1 of 3",
        THREADS,
        [
            [Call(op) for op in (ops if rank != 1 else ops[::-1])] + [Call("wait")]
            for rank in range(3)
            for ops in [("all_reduce_async", "broadcast_async")]
        ],
        ("desync", (1,)),
    ),
    messages(
        "async all_reduces of two sizes in another order on 0 of 3",
        THREADS,
        [
            [replace(Call("all_reduce_async"), count=count) for count in counts] + [Call("wait")]
            for counts in [(16, 8), (8, 16), (8, 16)]
        ],
        ("desync", (0,)),
    ),
    messages(
        "tensor written before the wait on 1 of 3",
        BUFFERS,
        [[Call("all_reduce" if rank != 1 else "all_reduce_written")] for rank in range(3)],
        ("race", (1,)),
        silent=True,
    ),
    messages(
        "tensor read before the wait on 2 of 3",
        BUFFERS,
        [[Call("broadcast" if rank != 2 else "broadcast_read")] for rank in range(3)],
        ("race", (2,)),
        silent=True,
    ),
]

PARAMETERS = [
    changed(PARAMETER, "broadcast", [2], root=9),
    changed(PARAMETER, "reduce", [0], 3, root=9),
    changed(PARAMETER, "all_reduce", [1], reduce_op="BAND"),
    invalid("list too short", "all_gather", 0, Call("all_gather_short"), "mismatch"),
    invalid("negative tag", "all_reduce", 1, send(0, tag=-1), "dead"),
    invalid("peer outside the group", "all_reduce", 3, send(9), "dead"),
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
