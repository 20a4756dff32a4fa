"""All_gather, reduce_scatter and all_to_all: every member gets something from every member."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# Imported before recording is switched on, as a user's script does.
from torch.distributed.distributed_c10d import all_gather_coalesced
from world import Members, World, here

from op_cases.building import Cases, check, ended, filled, pickled

CASES = Cases()
case = CASES.add


# --- all_gather, reduce_scatter ---


@case
def all_gather(w: World, g: Members) -> None:
    """The list form counts the whole output."""
    for async_op in (False, True):
        into = [torch.empty(3, 2) for _ in g.ranks]
        mine = filled((3, 2), w.rank)
        line = here()
        work = dist.all_gather(into, mine, group=g.pg, async_op=async_op)
        ended(work)
        w.saw(
            g,
            "all_gather",
            "allgather_",
            api="all_gather",
            line=line,
            in_bytes=24,
            out_bytes=24 * g.n,
            message_bytes=24 * g.n,
            shape=[3, 2],
            async_op=async_op,
        )
        for tensor, rank in zip(into, g.ranks, strict=True):
            check(tensor, rank)


@case
def all_gather_into_tensor(w: World, g: Members) -> None:
    """The same into one tensor, under both of its names."""
    for function, async_op in (
        (dist.all_gather_into_tensor, False),
        (dist.all_gather_into_tensor, True),
        (getattr(dist, "all_gather_single", dist.all_gather_into_tensor), False),
    ):
        into, mine = torch.empty(3 * g.n), filled((3,), w.rank)
        line = here()
        work = function(into, mine, group=g.pg, async_op=async_op)
        ended(work)
        w.saw(
            g,
            "all_gather",
            "_allgather_base_",
            api=function.__name__,
            line=line,
            in_bytes=12,
            out_bytes=12 * g.n,
            message_bytes=12 * g.n,
            shape=[3],
            async_op=async_op,
        )
        check(into, *g.ranks)


@case
def all_gather_coalesced_form(w: World, g: Members) -> None:
    """Two all_gathers of lists in one op."""
    ins = [filled((2,), w.rank), filled((3,), w.rank)]
    outs = [[torch.empty_like(own) for own in ins] for _ in g.ranks]
    line = here()
    all_gather_coalesced(outs, ins, group=g.pg)
    w.saw(
        g,
        "all_gather",
        "allgather_coalesced_",
        api="all_gather_coalesced",
        line=line,
        in_bytes=20,
        out_bytes=20 * g.n,
        message_bytes=20 * g.n,
        shape=[2],
        tensors=2,
    )
    for row, rank in zip(outs, g.ranks, strict=True):
        for tensor in row:
            check(tensor, rank)


@case
def all_gather_object(w: World, g: Members) -> None:
    """Sizes, then pickles of the largest size."""
    into: list[Any] = [None] * g.n
    mine = "x" * (3 * g.me)
    line, call = here(), w.new_call()
    dist.all_gather_object(into, mine, group=g.pg)
    most = pickled("x" * (3 * (g.n - 1)))
    is_newer = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
    for size, dtype in ((8, "int64"), (most, "uint8")):
        w.saw(
            g,
            "all_gather",
            "_allgather_base_" if is_newer else "allgather_",
            api="all_gather_object",
            line=line,
            call=call,
            in_bytes=size,
            out_bytes=size * g.n,
            message_bytes=size * g.n,
            dtype=dtype,
            shape=[1 if dtype == "int64" else most],
        )
    assert into == ["x" * (3 * place) for place in range(g.n)]


@case
def reduce_scatter(w: World, g: Members) -> None:
    """The list form counts the output; Gloo's Work for it has no future."""
    for async_op in (False, True):
        mine, parts = torch.empty(4), [filled((4,), w.rank + place) for place in range(g.n)]
        line = here()
        work = dist.reduce_scatter(mine, parts, group=g.pg, async_op=async_op)
        ended(work)
        w.saw(
            g,
            "reduce_scatter",
            "reduce_scatter_",
            api="reduce_scatter",
            line=line,
            in_bytes=16 * g.n,
            out_bytes=16,
            message_bytes=16,
            shape=[4],
            tensors=g.n,
            reduce_op="sum",
            async_op=async_op,
        )
        check(mine, sum(g.ranks) + g.n * g.me)


@case
def reduce_scatter_tensor(w: World, g: Members) -> None:
    """The same from one tensor, under both of its names."""
    for function, async_op, op, name in (
        (dist.reduce_scatter_tensor, False, dist.ReduceOp.SUM, "sum"),
        (dist.reduce_scatter_tensor, True, dist.ReduceOp.MAX, "max"),
        (
            getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor),
            False,
            dist.ReduceOp.MIN,
            "min",
        ),
    ):
        mine, parts = torch.empty(4), filled((4 * g.n,), w.rank)
        line = here()
        work = function(mine, parts, op=op, group=g.pg, async_op=async_op)
        ended(work)
        w.saw(
            g,
            "reduce_scatter",
            "_reduce_scatter_base_",
            api=function.__name__,
            line=line,
            in_bytes=16 * g.n,
            out_bytes=16,
            message_bytes=16,
            shape=[4 * g.n],
            reduce_op=name,
            async_op=async_op,
        )
        check(mine, {"sum": sum(g.ranks), "max": max(g.ranks), "min": min(g.ranks)}[name])


# --- all_to_all ---


def _amount(source: int, target: int) -> int:
    """Return how many rows the uneven case sends from one place in the group to another."""
    return source + 2 * target + 1


@case
def all_to_all(w: World, g: Members) -> None:
    """Lists of tensors (Gloo takes equal ones only); the one for oneself is no message."""
    for async_op in (False, True):
        sends = [filled((3, 2), w.rank) for _ in g.ranks]
        takes = [torch.empty(3, 2) for _ in g.ranks]
        line = here()
        work = dist.all_to_all(takes, sends, group=g.pg, async_op=async_op)
        ended(work)
        w.saw(
            g,
            "all_to_all",
            "alltoall_",
            api="all_to_all",
            line=line,
            in_bytes=24 * g.n,
            out_bytes=24 * g.n,
            message_bytes=24 * (g.n - 1),
            shape=[3, 2],
            tensors=g.n,
            async_op=async_op,
        )
        for tensor, rank in zip(takes, g.ranks, strict=True):
            check(tensor, rank)


@case
def all_to_all_single(w: World, g: Members) -> None:
    """Without split sizes every member gets an equal share."""
    for async_op in (False, True):
        send, take = filled((2 * g.n, 3), w.rank), torch.empty(2 * g.n, 3)
        line = here()
        work = dist.all_to_all_single(take, send, group=g.pg, async_op=async_op)
        ended(work)
        w.saw(
            g,
            "all_to_all",
            "alltoall_base_",
            api="all_to_all_single",
            line=line,
            in_bytes=24 * g.n,
            out_bytes=24 * g.n,
            message_bytes=24 * (g.n - 1),
            shape=[2 * g.n, 3],
            async_op=async_op,
            shape_hash=0,
        )
        check(take, *g.ranks)


@case
def all_to_all_single_uneven(w: World, g: Members) -> None:
    """With split sizes the own slice is what they say it is."""
    gives = [_amount(g.me, to) for to in range(g.n)]
    takes = [_amount(source, g.me) for source in range(g.n)]
    send, take = filled((sum(gives), 3), w.rank), torch.empty(sum(takes), 3)
    line = here()
    dist.all_to_all_single(take, send, takes, gives, group=g.pg)
    w.saw(
        g,
        "all_to_all",
        "alltoall_base_",
        api="all_to_all_single",
        line=line,
        in_bytes=12 * sum(gives),
        out_bytes=12 * sum(takes),
        message_bytes=12 * (sum(gives) - gives[g.me]),
        shape=[sum(gives), 3],
    )
    for part, rank in zip(take.split(takes), g.ranks, strict=True):
        check(part, rank)
