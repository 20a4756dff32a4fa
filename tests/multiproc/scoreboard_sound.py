"""The correct programs of the scoreboard: no finding is right for them."""

from __future__ import annotations

from scoreboard_calls import Call
from scoreboard_case import (
    CORRECT,
    STEPS,
    TWINS,
    Case,
    Program,
    case_of,
    on,
    recv,
    send,
    sound_program,
)

_IN_ORDER = (Call("all_reduce"), Call("broadcast"))


def _fine(name: str, program: Program, **about: object) -> Case:
    return case_of(f"correct: {name}", CORRECT, program, **about)


def _everywhere(world_size: int, *calls: Call) -> Program:
    return [list(calls) * STEPS for _ in range(world_size)]


_NEXT = [[send((rank + 1) % 4), recv((rank - 1) % 4)] for rank in range(4)]
SOUND = [
    *(
        _fine(f"{op} on {world_size}", sound_program(op, world_size))
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
