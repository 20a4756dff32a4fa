"""Barriers, and ops with a root: one member sends to all, or all to one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from world import Members, World, here

from op_cases.building import Cases, check, filled, pickled

CASES = Cases()
case = CASES.add


# --- barriers ---


@case
def barrier(w: World, g: Members) -> None:
    """A message of one byte, by the model's convention, and no data."""
    line = here()
    dist.barrier(group=g.pg)
    w.saw(
        g,
        "barrier",
        "barrier",
        api="barrier",
        line=line,
        message_bytes=1,
        in_bytes=0,
        out_bytes=0,
        tensors=0,
        shape=[],
        dtype="uint8",
    )


@case
def barrier_async(w: World, g: Members) -> None:
    """The end of its Work is the end of the record."""
    line = here()
    dist.barrier(group=g.pg, async_op=True).wait()
    w.saw(
        g,
        "barrier",
        "barrier",
        api="barrier",
        line=line,
        message_bytes=1,
        in_bytes=0,
        out_bytes=0,
        tensors=0,
        shape=[],
        dtype="uint8",
        async_op=True,
    )


@case
def monitored_barrier(w: World, g: Members) -> None:
    """It returns no Work, so it ends when it returns."""
    line = here()
    dist.monitored_barrier(group=g.pg, timeout=timedelta(seconds=30))
    w.saw(
        g,
        "barrier",
        "monitored_barrier_",
        api="monitored_barrier",
        line=line,
        message_bytes=1,
        in_bytes=0,
        out_bytes=0,
        tensors=0,
        shape=[],
        async_op=None,
    )


# --- one to all ---


@case
def broadcast(w: World, g: Members) -> None:
    """From the last member."""
    root, tensor = g.ranks[-1], filled((3, 5), w.rank)
    line = here()
    dist.broadcast(tensor, src=root, group=g.pg)
    w.saw(
        g,
        "broadcast",
        "broadcast_",
        api="broadcast",
        line=line,
        both=3 * 5 * 4,
        shape=[3, 5],
        root=root,
    )
    check(tensor, root)


@case
def broadcast_group_src(w: World, g: Members) -> None:
    """The root given by its place in the group, asynchronously."""
    tensor = filled((7,), w.rank)
    line = here()
    dist.broadcast(tensor, group_src=1, group=g.pg, async_op=True).wait()
    w.saw(
        g,
        "broadcast",
        "broadcast_",
        api="broadcast",
        line=line,
        both=28,
        shape=[7],
        root=g.ranks[1],
        async_op=True,
    )
    check(tensor, g.ranks[1])


@case
def broadcast_bool(w: World, g: Members) -> None:
    """One byte a bool."""
    tensor = torch.tensor([w.rank == g.ranks[1]] * 5)
    line = here()
    dist.broadcast(tensor, src=g.ranks[1], group=g.pg)
    w.saw(
        g,
        "broadcast",
        "broadcast_",
        api="broadcast",
        line=line,
        both=5,
        shape=[5],
        dtype="bool",
        root=g.ranks[1],
    )
    assert tensor.all()


@case
def broadcast_object_list(w: World, g: Members) -> None:
    """Sizes, then pickles: two ops of one call."""
    root, sent = g.ranks[-1], [{"from": g.ranks[-1]}, "x" * 100]
    objects: list[Any] = sent if w.rank == root else [None, None]
    line, call = here(), w.new_call()
    dist.broadcast_object_list(objects, src=root, group=g.pg)
    for both, dtype, shape in (
        (16, "int64", [2]),
        (sum(map(pickled, sent)), "uint8", [sum(map(pickled, sent))]),
    ):
        w.saw(
            g,
            "broadcast",
            "broadcast_",
            api="broadcast_object_list",
            line=line,
            both=both,
            dtype=dtype,
            shape=shape,
            root=root,
            call=call,
        )
    assert objects == sent


@case
def scatter(w: World, g: Members) -> None:
    """The source counts what it sends to others; they count what they get."""
    root, mine = g.ranks[1], torch.empty(4)
    parts = [filled((4,), rank) for rank in g.ranks] if w.rank == root else None
    line = here()
    dist.scatter(mine, parts, src=root, group=g.pg)
    _scattered(w, g, line, root, False)
    check(mine, w.rank)


@case
def scatter_group_src_async(w: World, g: Members) -> None:
    """The source given by its place in the group."""
    root, mine = g.ranks[-1], torch.empty(4)
    parts = [filled((4,), rank) for rank in g.ranks] if w.rank == root else None
    line = here()
    dist.scatter(mine, parts, group_src=g.n - 1, group=g.pg, async_op=True).wait()
    _scattered(w, g, line, root, True)
    check(mine, w.rank)


def _scattered(w: World, g: Members, line: int, root: int, async_op: bool) -> None:
    at_root = w.rank == root
    w.saw(
        g,
        "scatter",
        "scatter_",
        api="scatter",
        line=line,
        in_bytes=16 * g.n if at_root else 0,
        out_bytes=16,
        message_bytes=16 * (g.n - 1) if at_root else 16,
        shape=[4],
        root=root,
        tensors=g.n if at_root else 1,
        async_op=async_op,
    )


@case
def scatter_object_list(w: World, g: Members) -> None:
    """The largest size, the pickles, then their sizes: three ops of one call."""
    root, parts = g.ranks[-1], ["x" * (5 * place) for place in range(g.n)]
    mine: list[Any] = [None]
    line, call = here(), w.new_call()
    dist.scatter_object_list(mine, parts if w.rank == root else None, src=root, group=g.pg)
    most, at_root = pickled(parts[-1]), w.rank == root
    known: dict[str, Any] = {"api": "scatter_object_list", "line": line, "call": call, "root": root}
    w.saw(g, "broadcast", "broadcast_", both=8, dtype="int64", shape=[1], **known)
    for size, dtype in ((most, "uint8"), (8, "int64")):
        w.saw(
            g,
            "scatter",
            "scatter_",
            in_bytes=size * g.n if at_root else 0,
            out_bytes=size,
            message_bytes=size * (g.n - 1) if at_root else size,
            dtype=dtype,
            shape=[most if dtype == "uint8" else 1],
            tensors=g.n if at_root else 1,
            **known,
        )
    assert mine == [parts[g.me]]


# --- all to one ---


@case
def gather(w: World, g: Members) -> None:
    """The destination counts what the others send; they count what they send."""
    root, mine = g.ranks[1], filled((2, 3), w.rank)
    into = [torch.empty(2, 3) for _ in g.ranks] if w.rank == root else None
    line = here()
    dist.gather(mine, into, dst=root, group=g.pg)
    _gathered(w, g, line, root, False)
    for tensor, rank in zip(into or [], g.ranks, strict=False):
        check(tensor, rank)


@case
def gather_group_dst_async(w: World, g: Members) -> None:
    """The destination given by its place in the group."""
    root, mine = g.ranks[-1], filled((2, 3), w.rank)
    into = [torch.empty(2, 3) for _ in g.ranks] if w.rank == root else None
    line = here()
    dist.gather(mine, into, group_dst=g.n - 1, group=g.pg, async_op=True).wait()
    _gathered(w, g, line, root, True)
    for tensor, rank in zip(into or [], g.ranks, strict=False):
        check(tensor, rank)


def _gathered(w: World, g: Members, line: int, root: int, async_op: bool) -> None:
    at_root = w.rank == root
    w.saw(
        g,
        "gather",
        "gather_",
        api="gather",
        line=line,
        in_bytes=24,
        out_bytes=24 * g.n if at_root else 0,
        message_bytes=24 * (g.n - 1) if at_root else 24,
        shape=[2, 3],
        root=root,
        async_op=async_op,
    )


@case
def gather_object(w: World, g: Members) -> None:
    """All tell all their sizes, then the destination gathers pickles of the largest size."""
    root, mine = g.ranks[-1], {"rank": w.rank, "pad": "x" * (10 * g.me)}
    into: list[Any] | None = [None] * g.n if w.rank == root else None
    line, call = here(), w.new_call()
    dist.gather_object(mine, into, dst=root, group=g.pg)
    most = pickled({"rank": g.ranks[-1], "pad": "x" * (10 * (g.n - 1))})
    at_root = w.rank == root
    w.saw(
        g,
        "all_gather",
        "allgather_",
        api="gather_object",
        line=line,
        call=call,
        in_bytes=8,
        out_bytes=8 * g.n,
        message_bytes=8 * g.n,
        dtype="int64",
        shape=[1],
    )
    w.saw(
        g,
        "gather",
        "gather_",
        api="gather_object",
        line=line,
        call=call,
        in_bytes=most,
        out_bytes=most * g.n if at_root else 0,
        message_bytes=most * (g.n - 1) if at_root else most,
        dtype="uint8",
        shape=[most],
        root=root,
    )
    if into is not None:
        assert [sent["rank"] for sent in into] == g.ranks


@case
def reduce(w: World, g: Members) -> None:
    """To a destination, by each op in turn."""
    for root, op, name, expected in (
        (g.ranks[-1], dist.ReduceOp.SUM, "sum", sum(g.ranks)),
        (g.ranks[1], dist.ReduceOp.MAX, "max", max(g.ranks)),
    ):
        tensor = filled((6,), w.rank)
        line = here()
        dist.reduce(tensor, dst=root, op=op, group=g.pg)
        w.saw(
            g,
            "reduce",
            "reduce_",
            api="reduce",
            line=line,
            both=24,
            shape=[6],
            root=root,
            reduce_op=name,
        )
        if w.rank == root:
            check(tensor, expected)


@case
def reduce_group_dst_async(w: World, g: Members) -> None:
    """The destination given by its place in the group."""
    tensor = filled((6,), w.rank)
    line = here()
    dist.reduce(tensor, group_dst=1, group=g.pg, async_op=True).wait()
    w.saw(
        g,
        "reduce",
        "reduce_",
        api="reduce",
        line=line,
        both=24,
        shape=[6],
        root=g.ranks[1],
        reduce_op="sum",
        async_op=True,
    )
    if w.rank == g.ranks[1]:
        check(tensor, sum(g.ranks))
