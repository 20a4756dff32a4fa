"""All_reduce: reductions, dtypes, shapes, call sites, and coalesced ops."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# Imported before recording is switched on, as a user's script does.
from torch.distributed import all_reduce
from torch.distributed.distributed_c10d import _coalescing_manager, all_reduce_coalesced
from world import Members, World, here

from op_cases.building import Cases, check, filled

CASES = Cases()
case = CASES.add


def _saw(w: World, g: Members, line: int, **columns: Any) -> None:
    """Expect an all_reduce, by default a sum."""
    known = {"api": "all_reduce", "line": line, "reduce_op": "sum", **columns}
    w.saw(g, "all_reduce", "allreduce_", **known)


# --- reductions and dtypes ---


@case
def all_reduce_ops(w: World, g: Members) -> None:
    """Every reduction that Gloo knows."""
    product = 1
    for rank in g.ranks:
        product *= rank + 1
    for op, name, result in (
        (dist.ReduceOp.SUM, "sum", sum(g.ranks) + g.n),
        (dist.ReduceOp.PRODUCT, "product", product),
        (dist.ReduceOp.MIN, "min", min(g.ranks) + 1),
        (dist.ReduceOp.MAX, "max", max(g.ranks) + 1),
    ):
        tensor = filled((2, 2, 2), w.rank + 1)
        line = here()
        dist.all_reduce(tensor, op=op, group=g.pg)
        _saw(w, g, line, both=32, shape=[2, 2, 2], reduce_op=name)
        check(tensor, result)


@case
def all_reduce_bits(w: World, g: Members) -> None:
    """Bitwise reductions, on integers."""
    both, either, odd = ~0, 0, 0
    for rank in g.ranks:
        both, either, odd = both & (rank + 4), either | (rank + 4), odd ^ (rank + 4)
    for op, name, result in (
        (dist.ReduceOp.BAND, "band", both),
        (dist.ReduceOp.BOR, "bor", either),
        (dist.ReduceOp.BXOR, "bxor", odd),
    ):
        tensor = filled((3,), w.rank + 4, torch.int32)
        line = here()
        dist.all_reduce(tensor, op=op, group=g.pg)
        _saw(w, g, line, both=12, shape=[3], reduce_op=name, dtype="int32")
        check(tensor, result)


@case
def all_reduce_dtypes(w: World, g: Members) -> None:
    """Dtypes of one to eight bytes."""
    for dtype, name, size in (
        (torch.uint8, "uint8", 1),
        (torch.int8, "int8", 1),
        (torch.float16, "float16", 2),
        (torch.bfloat16, "bfloat16", 2),
        (torch.int32, "int32", 4),
        (torch.int64, "int64", 8),
        (torch.float64, "float64", 8),
    ):
        tensor = filled((9,), w.rank, dtype)
        line = here()
        dist.all_reduce(tensor, group=g.pg)
        _saw(w, g, line, both=9 * size, shape=[9], dtype=name)
        check(tensor, sum(g.ranks))


@case
def all_reduce_complex(w: World, g: Members) -> None:
    """Torch sends a complex tensor as pairs of reals."""
    tensor = torch.full((3,), complex(w.rank, 1))
    line = here()
    dist.all_reduce(tensor, group=g.pg)
    _saw(w, g, line, both=24, shape=[3, 2])
    assert tensor.eq(complex(sum(g.ranks), g.n)).all()


# --- shapes ---


@case
def all_reduce_shapes(w: World, g: Members) -> None:
    """An empty tensor, a scalar, and seven dimensions."""
    for size, both, shape in (
        ((0, 4), 0, [0, 4]),
        ((), 4, []),
        ((1, 2, 1, 2, 1, 2, 1), 32, [1, 2, 1, 2, 1, 2]),
    ):
        tensor = filled(size, w.rank)
        line = here()
        dist.all_reduce(tensor, group=g.pg)
        _saw(w, g, line, both=both, shape=shape)
        check(tensor, sum(g.ranks))


@case
def all_reduce_view(w: World, g: Members) -> None:
    """A slice of a larger tensor counts its own bytes only."""
    whole = filled((10, 4), w.rank)
    line = here()
    dist.all_reduce(whole[2:5], group=g.pg)
    _saw(w, g, line, both=48, shape=[3, 4])
    check(whole[2:5], sum(g.ranks))
    check(whole[:2], w.rank)


@case
def all_reduce_sparse(w: World, g: Members) -> None:
    """A sparse tensor counts its indices and values, and is not broken by being measured."""
    tensor = torch.sparse_coo_tensor([[w.rank, 5]], [1.0, 2.0], (8,)).coalesce()
    line = here()
    dist.all_reduce(tensor, group=g.pg)
    _saw(w, g, line, both=2 * 8 + 2 * 4, shape=[])
    dense = tensor.to_dense()
    assert dense[5] == 2 * g.n
    assert all(dense[rank] == 1 for rank in g.ranks)


# --- ways to call it ---


@case
def all_reduce_async(w: World, g: Members) -> None:
    """Two in flight at once, waited for in the other order."""
    first, second = filled((100, 10), w.rank), filled((1,), w.rank)
    line = here()
    works = [dist.all_reduce(tensor, group=g.pg, async_op=True) for tensor in (first, second)]
    for work in reversed(works):
        work.wait()
    for both, shape in ((4000, [100, 10]), (4, [1])):
        _saw(w, g, line, both=both, shape=shape, async_op=True)
    check(first, sum(g.ranks))
    check(second, sum(g.ranks))


@case
def all_reduce_imported_early(w: World, g: Members) -> None:
    """A name that was imported before recording began is seen all the same."""
    tensor = filled((5,), w.rank)
    line = here()
    all_reduce(tensor, group=g.pg)
    _saw(w, g, line, both=20, shape=[5])
    check(tensor, sum(g.ranks))


@case
def all_reduce_in_inference_mode(w: World, g: Members) -> None:
    """Inference mode goes around autograd's keys, not around the recorder."""
    with torch.inference_mode():
        tensor = filled((5,), w.rank)
        line = here()
        dist.all_reduce(tensor, group=g.pg)
    _saw(w, g, line, both=20, shape=[5])
    check(tensor, sum(g.ranks))


@case
def through_a_function_of_the_users(w: World, g: Members) -> None:
    """The call site is the line that calls torch, not the one that calls the helper."""
    tensor = filled((2,), w.rank)
    line = _reduce_for_me(tensor, g)
    _saw(w, g, line, both=8, shape=[2], function="_reduce_for_me")


def _reduce_for_me(tensor: torch.Tensor, g: Members) -> int:
    line = here()
    dist.all_reduce(tensor, group=g.pg)
    return line


# --- several tensors, one op ---


@case
def all_reduce_coalesced_form(w: World, g: Members) -> None:
    """Several tensors, one op."""
    tensors = [filled((3,), w.rank), filled((2, 2), w.rank)]
    line = here()
    all_reduce_coalesced(tensors, group=g.pg)
    w.saw(
        g,
        "all_reduce",
        "allreduce_coalesced_",
        api="all_reduce_coalesced",
        line=line,
        both=12 + 16,
        shape=[3],
        tensors=2,
        reduce_op="sum",
    )
    for tensor in tensors:
        check(tensor, sum(g.ranks))


@case
def coalescing_manager(w: World, g: Members) -> None:
    """The three ops that the manager merges; the call is its with-statement."""
    n = g.n
    tensors = [filled((3,), w.rank), filled((5,), w.rank)]
    line = here()
    with _coalescing_manager(group=g.pg):
        for tensor in tensors:
            dist.all_reduce(tensor, group=g.pg)
    w.saw(
        g,
        "all_reduce",
        "allreduce_coalesced_",
        api="_coalescing_manager",
        line=line,
        both=12 + 20,
        shape=[3],
        tensors=2,
        reduce_op="sum",
    )
    outs = [torch.empty(2 * n), torch.empty(3 * n)]
    ins = [filled((2,), w.rank), filled((3,), w.rank)]
    line = here()
    with _coalescing_manager(group=g.pg):
        for out, own in zip(outs, ins, strict=True):
            dist.all_gather_into_tensor(out, own, group=g.pg)
    w.saw(
        g,
        "all_gather",
        "allgather_into_tensor_coalesced_",
        api="_coalescing_manager",
        line=line,
        in_bytes=20,
        out_bytes=20 * n,
        message_bytes=20 * n,
        shape=[2],
        tensors=2,
    )
    for out in outs:
        check(out, *g.ranks)
    outs, ins = [torch.empty(2), torch.empty(3)], [filled((2 * n,), 1.0), filled((3 * n,), 2.0)]
    line = here()
    with _coalescing_manager(group=g.pg, async_ops=True) as manager:
        for out, own in zip(outs, ins, strict=True):
            dist.reduce_scatter_tensor(out, own, group=g.pg)
    manager.wait()
    w.saw(
        g,
        "reduce_scatter",
        "reduce_scatter_tensor_coalesced_",
        api="_coalescing_manager",
        line=line,
        in_bytes=20 * n,
        out_bytes=20,
        message_bytes=20,
        shape=[2 * n],
        tensors=2,
        reduce_op="sum",
        async_op=True,
    )
    check(outs[0], n)
    check(outs[1], 2 * n)
