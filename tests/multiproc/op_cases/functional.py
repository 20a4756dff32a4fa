"""Functional collectives, which compiled code issues, and an op without a wait."""

from __future__ import annotations

import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from world import Members, World, here

from op_cases.building import Cases, check, filled

CASES = Cases()
case = CASES.add


@case
def functional(w: World, g: Members) -> None:
    """What compiled code issues; the end comes with wait_tensor."""
    n, mine = g.n, filled((4,), w.rank)
    line = here()
    reduced = funcol.wait_tensor(funcol.all_reduce(mine, "sum", g.pg))
    w.saw(
        g,
        "all_reduce",
        "allreduce_",
        api="all_reduce",
        line=line,
        both=16,
        shape=[4],
        reduce_op="sum",
        async_op=True,
    )
    check(reduced, sum(g.ranks))
    line = here()
    gathered = funcol.wait_tensor(funcol.all_gather_tensor(mine, 0, g.pg))
    w.saw(
        g,
        "all_gather",
        "allgather_into_tensor_coalesced_",
        api="all_gather_tensor",
        line=line,
        in_bytes=16,
        out_bytes=16 * n,
        message_bytes=16 * n,
        shape=[4],
        async_op=True,
    )
    check(gathered, *g.ranks)
    line = here()
    part = funcol.wait_tensor(funcol.reduce_scatter_tensor(filled((2 * n,), 1.0), "max", 0, g.pg))
    w.saw(
        g,
        "reduce_scatter",
        "reduce_scatter_tensor_coalesced_",
        api="reduce_scatter_tensor",
        line=line,
        in_bytes=8 * n,
        out_bytes=8,
        message_bytes=8,
        shape=[2 * n],
        reduce_op="max",
        async_op=True,
    )
    check(part, 1)


@case
def functional_more(w: World, g: Members) -> None:
    """Broadcast, all_to_all_single and the coalesced all_reduce."""
    n, mine = g.n, filled((3,), w.rank)
    line = here()
    sent = funcol.wait_tensor(funcol.broadcast(mine, 1, g.pg))
    w.saw(
        g,
        "broadcast",
        "broadcast_",
        api="broadcast",
        line=line,
        both=12,
        shape=[3],
        root=g.ranks[1],
        async_op=True,
    )
    check(sent, g.ranks[1])
    line = here()
    swapped = funcol.wait_tensor(funcol.all_to_all_single(filled((n,), w.rank), None, None, g.pg))
    w.saw(
        g,
        "all_to_all",
        "alltoall_base_",
        api="all_to_all_single",
        line=line,
        in_bytes=4 * n,
        out_bytes=4 * n,
        message_bytes=4 * (n - 1),
        shape=[n],
        async_op=True,
    )
    check(swapped, *g.ranks)
    line = here()
    both = funcol.all_reduce_coalesced([mine, filled((2,), w.rank)], "sum", g.pg)
    for tensor in both:
        check(funcol.wait_tensor(tensor), sum(g.ranks))
    w.saw(
        g,
        "all_reduce",
        "allreduce_coalesced_",
        api="all_reduce_coalesced",
        line=line,
        both=20,
        shape=[3],
        tensors=2,
        reduce_op="sum",
        async_op=True,
    )


@case
def one_work_for_several_tensors(w: World, g: Members) -> None:
    """Each tensor is waited for, and Gloo's Work behind both has no future."""
    n, ins = g.n, [filled((2 * g.n,), 1.0), filled((3 * g.n,), 2.0)]
    line = here()
    parts = funcol.reduce_scatter_tensor_coalesced(ins, "sum", [0, 0], g.pg)
    for part, value in zip(parts, (n, 2 * n), strict=True):
        check(funcol.wait_tensor(part), value)
    w.saw(
        g,
        "reduce_scatter",
        "reduce_scatter_tensor_coalesced_",
        api="reduce_scatter_tensor_coalesced",
        line=line,
        in_bytes=20 * n,
        out_bytes=20,
        message_bytes=20,
        shape=[2 * n],
        tensors=2,
        reduce_op="sum",
        async_op=True,
    )


@case
def all_reduce_never_waited_for(w: World, g: Members) -> None:
    """Its end is the back end's, not the call of wait(); also after ops that have no future."""
    tensor = filled((2,), w.rank)
    line = here()
    dist.all_reduce(tensor, group=g.pg, async_op=True)
    w.saw(
        g,
        "all_reduce",
        "allreduce_",
        api="all_reduce",
        line=line,
        both=8,
        shape=[2],
        reduce_op="sum",
        async_op=True,
    )
