"""Every op of torch.distributed, on a group: each case checks its result and says its record.

Sizes are worked out by hand from the shapes: 4 bytes a float32, 8 an int64. Roots and peers are
global ranks. ``here()`` stands on the line before each call.
"""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

# Imported before recording is switched on, as a user's script does.
from torch.distributed import P2POp, all_reduce, irecv, isend
from torch.distributed.distributed_c10d import (
    _coalescing_manager,
    all_gather_coalesced,
    all_reduce_coalesced,
)
from world import Case, Members, World, here

CASES: list[Case] = []


def case(function: Case) -> Case:
    """List a case."""
    CASES.append(function)
    return function


def _full(size: tuple[int, ...], value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(size, value, dtype=dtype)


def _check(tensor: torch.Tensor, *rows: float) -> None:
    """Assert that each row of a tensor (or the whole of it) holds one value."""
    parts = tensor.chunk(len(rows)) if len(rows) > 1 else [tensor]
    for part, value in zip(parts, rows, strict=True):
        assert part.eq(value).all(), f"{part} is not {value}"


def _pickled(value: Any) -> int:
    return len(pickle.dumps(value))


# --- barriers ---


@case
def barrier(w: World, g: Members) -> None:
    """A message of one byte, by the model's convention, and no data."""
    line = here()
    dist.barrier(group=g.pg)
    w.saw(g, "barrier", "barrier", api="barrier", line=line, message_bytes=1, in_bytes=0,
          out_bytes=0, tensors=0, shape=[], dtype="uint8")  # fmt: skip


@case
def barrier_async(w: World, g: Members) -> None:
    """Its end is told by its Work."""
    line = here()
    work = dist.barrier(group=g.pg, async_op=True)
    work.wait()
    w.saw(g, "barrier", "barrier", api="barrier", line=line, message_bytes=1, in_bytes=0,
          out_bytes=0, tensors=0, shape=[], dtype="uint8", async_op=True)  # fmt: skip


@case
def monitored_barrier(w: World, g: Members) -> None:
    """It returns no Work: its end is its return."""
    line = here()
    dist.monitored_barrier(group=g.pg, timeout=timedelta(seconds=30))
    w.saw(g, "barrier", "monitored_barrier_", api="monitored_barrier", line=line, message_bytes=1,
          in_bytes=0, out_bytes=0, tensors=0, shape=[], async_op=None)  # fmt: skip


# --- one to all, all to one ---


@case
def broadcast(w: World, g: Members) -> None:
    """From the last member."""
    root, tensor = g.ranks[-1], _full((3, 5), w.rank)
    line = here()
    dist.broadcast(tensor, src=root, group=g.pg)
    w.saw(g, "broadcast", "broadcast_", api="broadcast", line=line, both=3 * 5 * 4, shape=[3, 5],
          root=root)  # fmt: skip
    _check(tensor, root)


@case
def broadcast_group_src(w: World, g: Members) -> None:
    """The root given by its place in the group, asynchronously."""
    tensor = _full((7,), w.rank)
    line = here()
    work = dist.broadcast(tensor, group_src=1, group=g.pg, async_op=True)
    work.wait()
    w.saw(g, "broadcast", "broadcast_", api="broadcast", line=line, both=28, shape=[7],
          root=g.ranks[1], async_op=True)  # fmt: skip
    _check(tensor, g.ranks[1])


@case
def broadcast_object_list(w: World, g: Members) -> None:
    """Sizes, then pickles: two ops of one call."""
    root, sent = g.ranks[-1], [{"from": g.ranks[-1]}, "x" * 100]
    objects: list[Any] = sent if w.rank == root else [None, None]
    line, call = here(), w.new_call()
    dist.broadcast_object_list(objects, src=root, group=g.pg)
    for both, dtype, shape in (
        (16, "int64", [2]),
        (sum(map(_pickled, sent)), "uint8", [sum(map(_pickled, sent))]),
    ):
        w.saw(g, "broadcast", "broadcast_", api="broadcast_object_list", line=line, both=both,
              dtype=dtype, shape=shape, root=root, call=call)  # fmt: skip
    assert objects == sent


@case
def gather(w: World, g: Members) -> None:
    """The destination counts what the others send; they count what they send."""
    root, mine = g.ranks[1], _full((2, 3), w.rank)
    into = [torch.empty(2, 3) for _ in g.ranks] if w.rank == root else None
    line = here()
    dist.gather(mine, into, dst=root, group=g.pg)
    _gathered(w, g, line, root, False)
    for tensor, rank in zip(into or [], g.ranks, strict=False):
        _check(tensor, rank)


@case
def gather_group_dst_async(w: World, g: Members) -> None:
    """The destination given by its place in the group."""
    root, mine = g.ranks[-1], _full((2, 3), w.rank)
    into = [torch.empty(2, 3) for _ in g.ranks] if w.rank == root else None
    line = here()
    work = dist.gather(mine, into, group_dst=g.n - 1, group=g.pg, async_op=True)
    work.wait()
    _gathered(w, g, line, root, True)


def _gathered(w: World, g: Members, line: int, root: int, async_op: bool) -> None:
    at_root = w.rank == root
    w.saw(g, "gather", "gather_", api="gather", line=line, in_bytes=24,
          out_bytes=24 * g.n if at_root else 0, message_bytes=24 * (g.n - 1) if at_root else 24,
          shape=[2, 3], root=root, async_op=async_op)  # fmt: skip


@case
def gather_object(w: World, g: Members) -> None:
    """All tell all their sizes, then the destination gathers pickles of the largest size."""
    root, mine = g.ranks[-1], {"rank": w.rank, "pad": "x" * (10 * g.me)}
    into: list[Any] | None = [None] * g.n if w.rank == root else None
    line, call = here(), w.new_call()
    dist.gather_object(mine, into, dst=root, group=g.pg)
    most = _pickled({"rank": g.ranks[-1], "pad": "x" * (10 * (g.n - 1))})
    at_root = w.rank == root
    w.saw(g, "all_gather", "allgather_", api="gather_object", line=line, call=call, in_bytes=8,
          out_bytes=8 * g.n, message_bytes=8 * g.n, dtype="int64", shape=[1])  # fmt: skip
    w.saw(g, "gather", "gather_", api="gather_object", line=line, call=call, in_bytes=most,
          out_bytes=most * g.n if at_root else 0,
          message_bytes=most * (g.n - 1) if at_root else most, dtype="uint8", shape=[most],
          root=root)  # fmt: skip
    if into is not None:
        assert [each["rank"] for each in into] == g.ranks


@case
def scatter(w: World, g: Members) -> None:
    """The source counts what it sends to others; they count what they get."""
    root, mine = g.ranks[1], torch.empty(4)
    parts = [_full((4,), rank) for rank in g.ranks] if w.rank == root else None
    line = here()
    dist.scatter(mine, parts, src=root, group=g.pg)
    _scattered(w, g, line, root, False)
    _check(mine, w.rank)


@case
def scatter_group_src_async(w: World, g: Members) -> None:
    """The source given by its place in the group."""
    root, mine = g.ranks[-1], torch.empty(4)
    parts = [_full((4,), rank) for rank in g.ranks] if w.rank == root else None
    line = here()
    work = dist.scatter(mine, parts, group_src=g.n - 1, group=g.pg, async_op=True)
    work.wait()
    _scattered(w, g, line, root, True)
    _check(mine, w.rank)


def _scattered(w: World, g: Members, line: int, root: int, async_op: bool) -> None:
    at_root = w.rank == root
    w.saw(g, "scatter", "scatter_", api="scatter", line=line, in_bytes=16 * g.n if at_root else 0,
          out_bytes=16, message_bytes=16 * (g.n - 1) if at_root else 16, shape=[4], root=root,
          tensors=g.n if at_root else 1, async_op=async_op)  # fmt: skip


@case
def scatter_object_list(w: World, g: Members) -> None:
    """The largest size, the pickles, then their sizes: three ops of one call."""
    root, parts = g.ranks[-1], ["x" * (5 * place) for place in range(g.n)]
    mine: list[Any] = [None]
    line, call = here(), w.new_call()
    dist.scatter_object_list(mine, parts if w.rank == root else None, src=root, group=g.pg)
    most, at_root = _pickled(parts[-1]), w.rank == root
    known: dict[str, Any] = {"api": "scatter_object_list", "line": line, "call": call, "root": root}
    w.saw(g, "broadcast", "broadcast_", both=8, dtype="int64", shape=[1], **known)
    for size, dtype in ((most, "uint8"), (8, "int64")):
        w.saw(g, "scatter", "scatter_", in_bytes=size * g.n if at_root else 0, out_bytes=size,
              message_bytes=size * (g.n - 1) if at_root else size, dtype=dtype,
              shape=[most if dtype == "uint8" else 1], tensors=g.n if at_root else 1,
              **known)  # fmt: skip
    assert mine == [parts[g.me]]


@case
def reduce(w: World, g: Members) -> None:
    """To a destination, by each op in turn."""
    for root, op, name, result in (
        (g.ranks[-1], dist.ReduceOp.SUM, "sum", sum(g.ranks)),
        (g.ranks[1], dist.ReduceOp.MAX, "max", max(g.ranks)),
    ):
        tensor = _full((6,), w.rank)
        line = here()
        dist.reduce(tensor, dst=root, op=op, group=g.pg)
        w.saw(g, "reduce", "reduce_", api="reduce", line=line, both=24, shape=[6], root=root,
              reduce_op=name)  # fmt: skip
        if w.rank == root:
            _check(tensor, result)


@case
def reduce_group_dst_async(w: World, g: Members) -> None:
    """The destination given by its place in the group."""
    tensor = _full((6,), w.rank)
    line = here()
    work = dist.reduce(tensor, group_dst=1, group=g.pg, async_op=True)
    work.wait()
    w.saw(g, "reduce", "reduce_", api="reduce", line=line, both=24, shape=[6], root=g.ranks[1],
          reduce_op="sum", async_op=True)  # fmt: skip


# --- all_reduce ---


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
        tensor = _full((2, 2, 2), w.rank + 1)
        line = here()
        dist.all_reduce(tensor, op=op, group=g.pg)
        w.saw(g, "all_reduce", "allreduce_", api="all_reduce", line=line, both=32,
              shape=[2, 2, 2], reduce_op=name)  # fmt: skip
        _check(tensor, result)


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
        tensor = _full((3,), w.rank + 4, torch.int32)
        line = here()
        dist.all_reduce(tensor, op=op, group=g.pg)
        w.saw(g, "all_reduce", "allreduce_", api="all_reduce", line=line, both=12, shape=[3],
              reduce_op=name, dtype="int32")  # fmt: skip
        _check(tensor, result)


@case
def all_reduce_async(w: World, g: Members) -> None:
    """Two in flight at once, waited for in the other order."""
    first, second = _full((100, 10), w.rank), _full((1,), w.rank)
    line = here()
    works = [dist.all_reduce(tensor, group=g.pg, async_op=True) for tensor in (first, second)]
    for work in reversed(works):
        work.wait()
    for both, shape in ((4000, [100, 10]), (4, [1])):
        w.saw(g, "all_reduce", "allreduce_", api="all_reduce", line=line, both=both, shape=shape,
              reduce_op="sum", async_op=True)  # fmt: skip
    _check(first, sum(g.ranks))
    _check(second, sum(g.ranks))


@case
def all_reduce_imported_early(w: World, g: Members) -> None:
    """A name that was imported before recording began is seen all the same."""
    tensor = _full((5,), w.rank)
    line = here()
    all_reduce(tensor, group=g.pg)
    w.saw(g, "all_reduce", "allreduce_", api="all_reduce", line=line, both=20, shape=[5],
          reduce_op="sum")  # fmt: skip
    _check(tensor, sum(g.ranks))


@case
def all_reduce_in_inference_mode(w: World, g: Members) -> None:
    """Inference mode goes around autograd's keys, not around the recorder."""
    with torch.inference_mode():
        tensor = _full((5,), w.rank)
        line = here()
        dist.all_reduce(tensor, group=g.pg)
    w.saw(g, "all_reduce", "allreduce_", api="all_reduce", line=line, both=20, shape=[5],
          reduce_op="sum")  # fmt: skip
    _check(tensor, sum(g.ranks))


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
        tensor = _full((9,), w.rank, dtype)
        line = here()
        dist.all_reduce(tensor, group=g.pg)
        w.saw(g, "all_reduce", "allreduce_", api="all_reduce", line=line, both=9 * size, shape=[9],
              reduce_op="sum", dtype=name)  # fmt: skip
        _check(tensor, sum(g.ranks))


@case
def broadcast_bool(w: World, g: Members) -> None:
    """One byte a bool."""
    tensor = torch.tensor([w.rank == g.ranks[1]] * 5)
    line = here()
    dist.broadcast(tensor, src=g.ranks[1], group=g.pg)
    w.saw(g, "broadcast", "broadcast_", api="broadcast", line=line, both=5, shape=[5],
          dtype="bool", root=g.ranks[1])  # fmt: skip
    assert tensor.all()


@case
def all_reduce_complex(w: World, g: Members) -> None:
    """Torch sends a complex tensor as pairs of reals."""
    tensor = torch.full((3,), complex(w.rank, 1))
    line = here()
    dist.all_reduce(tensor, group=g.pg)
    w.saw(g, "all_reduce", "allreduce_", api="all_reduce", line=line, both=24, shape=[3, 2],
          reduce_op="sum")  # fmt: skip
    assert tensor.eq(complex(sum(g.ranks), g.n)).all()


@case
def all_reduce_shapes(w: World, g: Members) -> None:
    """An empty tensor, a scalar, a view with gaps in a larger one, and seven dimensions."""
    for size, both, shape in (
        ((0, 4), 0, [0, 4]),
        ((), 4, []),
        ((1, 2, 1, 2, 1, 2, 1), 32, [1, 2, 1, 2, 1, 2]),
    ):
        tensor = _full(size, w.rank)
        line = here()
        dist.all_reduce(tensor, group=g.pg)
        w.saw(g, "all_reduce", "allreduce_", api="all_reduce", line=line, both=both, shape=shape,
              reduce_op="sum")  # fmt: skip
        _check(tensor, sum(g.ranks))


@case
def all_reduce_view(w: World, g: Members) -> None:
    """A slice of a larger tensor counts its own bytes only."""
    whole = _full((10, 4), w.rank)
    line = here()
    dist.all_reduce(whole[2:5], group=g.pg)
    w.saw(g, "all_reduce", "allreduce_", api="all_reduce", line=line, both=48, shape=[3, 4],
          reduce_op="sum")  # fmt: skip
    _check(whole[2:5], sum(g.ranks))


@case
def all_reduce_sparse(w: World, g: Members) -> None:
    """A sparse tensor counts its indices and values, and is not broken by being measured."""
    tensor = torch.sparse_coo_tensor([[w.rank, 5]], [1.0, 2.0], (8,)).coalesce()
    line = here()
    dist.all_reduce(tensor, group=g.pg)
    w.saw(g, "all_reduce", "allreduce_", api="all_reduce", line=line, both=2 * 8 + 2 * 4, shape=[],
          reduce_op="sum")  # fmt: skip
    dense = tensor.to_dense()
    assert dense[5] == 2 * g.n
    assert all(dense[rank] == 1 for rank in g.ranks)


@case
def all_reduce_coalesced_form(w: World, g: Members) -> None:
    """Several tensors, one op."""
    tensors = [_full((3,), w.rank), _full((2, 2), w.rank)]
    line = here()
    all_reduce_coalesced(tensors, group=g.pg)
    w.saw(g, "all_reduce", "allreduce_coalesced_", api="all_reduce_coalesced", line=line,
          both=12 + 16, shape=[3], tensors=2, reduce_op="sum")  # fmt: skip
    for tensor in tensors:
        _check(tensor, sum(g.ranks))


@case
def coalescing_manager(w: World, g: Members) -> None:
    """The three ops that the manager merges; the call is its with-statement."""
    n = g.n
    tensors = [_full((3,), w.rank), _full((5,), w.rank)]
    line = here()
    with _coalescing_manager(group=g.pg):
        for tensor in tensors:
            dist.all_reduce(tensor, group=g.pg)
    w.saw(g, "all_reduce", "allreduce_coalesced_", api="_coalescing_manager", line=line,
          both=12 + 20, shape=[3], tensors=2, reduce_op="sum")  # fmt: skip
    outs, ins = [torch.empty(2 * n), torch.empty(3 * n)], [_full((2,), w.rank), _full((3,), w.rank)]
    line = here()
    with _coalescing_manager(group=g.pg):
        for out, each in zip(outs, ins, strict=True):
            dist.all_gather_into_tensor(out, each, group=g.pg)
    w.saw(g, "all_gather", "allgather_into_tensor_coalesced_", api="_coalescing_manager",
          line=line, in_bytes=20, out_bytes=20 * n, message_bytes=20 * n, shape=[2],
          tensors=2)  # fmt: skip
    for out in outs:
        _check(out, *g.ranks)
    outs, ins = [torch.empty(2), torch.empty(3)], [_full((2 * n,), 1.0), _full((3 * n,), 2.0)]
    line = here()
    with _coalescing_manager(group=g.pg, async_ops=True) as manager:
        for out, each in zip(outs, ins, strict=True):
            dist.reduce_scatter_tensor(out, each, group=g.pg)
    manager.wait()
    w.saw(g, "reduce_scatter", "reduce_scatter_tensor_coalesced_", api="_coalescing_manager",
          line=line, in_bytes=20 * n, out_bytes=20, message_bytes=20, shape=[2 * n], tensors=2,
          reduce_op="sum", async_op=True)  # fmt: skip
    _check(outs[0], n)
    _check(outs[1], 2 * n)


# --- all_gather, reduce_scatter ---


@case
def all_gather(w: World, g: Members) -> None:
    """The list form counts the whole output."""
    for async_op in (False, True):
        into = [torch.empty(3, 2) for _ in g.ranks]
        mine = _full((3, 2), w.rank)
        line = here()
        work = dist.all_gather(into, mine, group=g.pg, async_op=async_op)
        if work is not None:
            work.wait()
        w.saw(g, "all_gather", "allgather_", api="all_gather", line=line, in_bytes=24,
              out_bytes=24 * g.n, message_bytes=24 * g.n, shape=[3, 2],
              async_op=async_op)  # fmt: skip
        for tensor, rank in zip(into, g.ranks, strict=True):
            _check(tensor, rank)


@case
def all_gather_into_tensor(w: World, g: Members) -> None:
    """The same into one tensor, under both of its names."""
    for function, async_op in (
        (dist.all_gather_into_tensor, False),
        (dist.all_gather_into_tensor, True),
        (getattr(dist, "all_gather_single", dist.all_gather_into_tensor), False),
    ):
        into, mine = torch.empty(3 * g.n), _full((3,), w.rank)
        line = here()
        work = function(into, mine, group=g.pg, async_op=async_op)
        if work is not None:
            work.wait()
        w.saw(g, "all_gather", "_allgather_base_", api=function.__name__, line=line, in_bytes=12,
              out_bytes=12 * g.n, message_bytes=12 * g.n, shape=[3], async_op=async_op)  # fmt: skip
        _check(into, *g.ranks)


@case
def all_gather_coalesced_form(w: World, g: Members) -> None:
    """Two all_gathers of lists in one op."""
    ins = [_full((2,), w.rank), _full((3,), w.rank)]
    outs = [[torch.empty_like(each) for each in ins] for _ in g.ranks]
    line = here()
    all_gather_coalesced(outs, ins, group=g.pg)
    w.saw(g, "all_gather", "allgather_coalesced_", api="all_gather_coalesced", line=line,
          in_bytes=20, out_bytes=20 * g.n, message_bytes=20 * g.n, shape=[2],
          tensors=2)  # fmt: skip
    for row, rank in zip(outs, g.ranks, strict=True):
        for tensor in row:
            _check(tensor, rank)


@case
def all_gather_object(w: World, g: Members) -> None:
    """Sizes, then pickles of the largest size."""
    into: list[Any] = [None] * g.n
    mine = "x" * (3 * g.me)
    line, call = here(), w.new_call()
    dist.all_gather_object(into, mine, group=g.pg)
    most = _pickled("x" * (3 * (g.n - 1)))
    for size, dtype in ((8, "int64"), (most, "uint8")):
        w.saw(g, "all_gather", "allgather_", api="all_gather_object", line=line, call=call,
              in_bytes=size, out_bytes=size * g.n, message_bytes=size * g.n, dtype=dtype,
              shape=[1 if dtype == "int64" else most])  # fmt: skip
    assert into == ["x" * (3 * place) for place in range(g.n)]


@case
def reduce_scatter(w: World, g: Members) -> None:
    """The list form counts the output; Gloo's Work for it has no future."""
    for async_op in (False, True):
        mine, parts = torch.empty(4), [_full((4,), w.rank + place) for place in range(g.n)]
        line = here()
        work = dist.reduce_scatter(mine, parts, group=g.pg, async_op=async_op)
        if work is not None:
            work.wait()
        w.saw(g, "reduce_scatter", "reduce_scatter_", api="reduce_scatter", line=line,
              in_bytes=16 * g.n, out_bytes=16, message_bytes=16, shape=[4], tensors=g.n,
              reduce_op="sum", async_op=async_op)  # fmt: skip
        _check(mine, sum(g.ranks) + g.n * g.me)


@case
def reduce_scatter_tensor(w: World, g: Members) -> None:
    """The same from one tensor, under both of its names."""
    for function, async_op, op, name in (
        (dist.reduce_scatter_tensor, False, dist.ReduceOp.SUM, "sum"),
        (dist.reduce_scatter_tensor, True, dist.ReduceOp.MAX, "max"),
        (getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor), False,
         dist.ReduceOp.MIN, "min"),
    ):  # fmt: skip
        mine, parts = torch.empty(4), _full((4 * g.n,), w.rank)
        line = here()
        work = function(mine, parts, op=op, group=g.pg, async_op=async_op)
        if work is not None:
            work.wait()
        w.saw(g, "reduce_scatter", "_reduce_scatter_base_", api=function.__name__, line=line,
              in_bytes=16 * g.n, out_bytes=16, message_bytes=16, shape=[4 * g.n], reduce_op=name,
              async_op=async_op)  # fmt: skip
        _check(mine, {"sum": sum(g.ranks), "max": max(g.ranks), "min": min(g.ranks)}[name])


# --- all to all ---


def _amount(source: int, target: int) -> int:
    """Return how many rows the uneven case sends from one place in the group to another."""
    return source + 2 * target + 1


@case
def all_to_all(w: World, g: Members) -> None:
    """Lists of tensors (Gloo takes equal ones only); the one for oneself is no message."""
    for async_op in (False, True):
        sends = [_full((3, 2), w.rank) for _ in g.ranks]
        takes = [torch.empty(3, 2) for _ in g.ranks]
        line = here()
        work = dist.all_to_all(takes, sends, group=g.pg, async_op=async_op)
        if work is not None:
            work.wait()
        w.saw(g, "all_to_all", "alltoall_", api="all_to_all", line=line, in_bytes=24 * g.n,
              out_bytes=24 * g.n, message_bytes=24 * (g.n - 1), shape=[3, 2], tensors=g.n,
              async_op=async_op)  # fmt: skip
        for tensor, rank in zip(takes, g.ranks, strict=True):
            _check(tensor, rank)


@case
def all_to_all_single(w: World, g: Members) -> None:
    """Without split sizes every member gets an equal share."""
    for async_op in (False, True):
        send, take = _full((2 * g.n, 3), w.rank), torch.empty(2 * g.n, 3)
        line = here()
        work = dist.all_to_all_single(take, send, group=g.pg, async_op=async_op)
        if work is not None:
            work.wait()
        w.saw(g, "all_to_all", "alltoall_base_", api="all_to_all_single", line=line,
              in_bytes=24 * g.n, out_bytes=24 * g.n, message_bytes=24 * (g.n - 1),
              shape=[2 * g.n, 3], async_op=async_op, shape_hash=0)  # fmt: skip
        _check(take, *g.ranks)


@case
def all_to_all_single_uneven(w: World, g: Members) -> None:
    """With split sizes the own slice is what they say it is."""
    gives = [_amount(g.me, to) for to in range(g.n)]
    takes = [_amount(source, g.me) for source in range(g.n)]
    send, take = _full((sum(gives), 3), w.rank), torch.empty(sum(takes), 3)
    line = here()
    dist.all_to_all_single(take, send, takes, gives, group=g.pg)
    w.saw(g, "all_to_all", "alltoall_base_", api="all_to_all_single", line=line,
          in_bytes=12 * sum(gives), out_bytes=12 * sum(takes),
          message_bytes=12 * (sum(gives) - gives[g.me]), shape=[sum(gives), 3])  # fmt: skip
    for part, rank in zip(take.split(takes), g.ranks, strict=True):
        _check(part, rank)


# --- point to point: round the ring of members ---


@case
def isend_irecv(w: World, g: Members) -> None:
    """Two tags, three messages: the sequence counts for each tag."""
    to, source = g.after(1), g.after(-1)
    for tag, size in ((0, 3), (7, 5), (0, 2)):
        send, take = _full((size,), w.rank), torch.empty(size)
        line = here() + 1
        works = [
            dist.isend(send, dst=to, group=g.pg, tag=tag),
            dist.irecv(take, src=source, group=g.pg, tag=tag),
        ]
        for work in works:
            work.wait()
        w.sent(g, to, 4 * size, api="isend", line=line, tag=tag, shape=[size])
        w.received(g, source, 4 * size, api="irecv", line=line + 1, tag=tag, shape=[size])
        _check(take, source)


@case
def send_recv(w: World, g: Members) -> None:
    """From the first member to the last and back, the peer given both ways."""
    first, last = g.ranks[0], g.ranks[-1]
    tensor = _full((2, 3), w.rank)
    if w.rank == first:
        line = here()
        dist.send(tensor, dst=last, group=g.pg)
        dist.recv(tensor, group_src=g.n - 1, group=g.pg)
        w.sent(g, last, 24, api="send", line=line, shape=[2, 3])
        w.received(g, last, 24, api="recv", line=line + 1, shape=[2, 3])
        _check(tensor, last)
    elif w.rank == last:
        back = _full((2, 3), w.rank)
        line = here()
        dist.recv(tensor, src=first, group=g.pg)
        dist.send(back, group_dst=0, group=g.pg)
        w.received(g, first, 24, api="recv", line=line, shape=[2, 3])
        w.sent(g, first, 24, api="send", line=line + 1, shape=[2, 3])
        _check(tensor, first)


@case
def recv_any_source(w: World, g: Members) -> None:
    """Who sent is known at the end only, and with it the sequence number."""
    root = g.ranks[1]
    for source in (rank for rank in g.ranks if rank != root):
        tensor = _full((3,), w.rank)
        if w.rank == source:
            line = here()
            dist.send(tensor, dst=root, group=g.pg, tag=3)
            w.sent(g, root, 12, api="send", line=line, tag=3, shape=[3])
        elif w.rank == root:
            line = here()
            sender = dist.recv(tensor, group=g.pg, tag=3)
            assert sender == source
            w.received(g, source, 12, api="recv", line=line, tag=3, shape=[3],
                       variant="recv_any_source_")  # fmt: skip
        line = here()
        dist.barrier(group=g.pg)
        w.saw(g, "barrier", "barrier", api="barrier", line=line, message_bytes=1, tensors=0,
              dtype="uint8")  # fmt: skip


@case
def batch_isend_irecv(w: World, g: Members) -> None:
    """The ops of one batch share a correlation, those of the next have another."""
    to, source = g.after(1), g.after(-1)
    for size in (3, 4):
        send, take = _full((size,), w.rank), torch.empty(size)
        ops = [P2POp(isend, send, to, g.pg), P2POp(irecv, take, source, g.pg)]
        line, call = here(), w.new_call()
        works = dist.batch_isend_irecv(ops)
        for work in works:
            work.wait()
        w.sent(g, to, 4 * size, api="batch_isend_irecv", line=line, call=call, shape=[size])
        w.received(g, source, 4 * size, api="batch_isend_irecv", line=line, call=call,
                   shape=[size])  # fmt: skip
        _check(take, source)


@case
def send_recv_object_list(w: World, g: Members) -> None:
    """Sizes, then pickles."""
    first, last, sent = g.ranks[0], g.ranks[-1], ["hello", {"n": g.n}]
    total = sum(map(_pickled, sent))
    call = w.new_call()
    if w.rank == first:
        line = here()
        dist.send_object_list(sent, dst=last, group=g.pg)
        known: dict[str, Any] = {"api": "send_object_list", "line": line, "call": call}
        w.sent(g, last, 16, dtype="int64", shape=[2], **known)
        w.sent(g, last, total, dtype="uint8", shape=[total], **known)
    elif w.rank == last:
        got: list[Any] = [None, None]
        line = here()
        dist.recv_object_list(got, src=first, group=g.pg)
        known = {"api": "recv_object_list", "line": line, "call": call}
        w.received(g, first, 16, dtype="int64", shape=[2], **known)
        w.received(g, first, total, dtype="uint8", shape=[total], **known)
        assert got == sent


# --- functional collectives ---


@case
def functional(w: World, g: Members) -> None:
    """What compiled code issues; the end comes with wait_tensor."""
    n, mine = g.n, _full((4,), w.rank)
    line = here()
    reduced = funcol.wait_tensor(funcol.all_reduce(mine, "sum", g.pg))
    w.saw(g, "all_reduce", "allreduce_", api="all_reduce", line=line, both=16, shape=[4],
          reduce_op="sum", async_op=True)  # fmt: skip
    _check(reduced, sum(g.ranks))
    line = here()
    gathered = funcol.wait_tensor(funcol.all_gather_tensor(mine, 0, g.pg))
    w.saw(g, "all_gather", "allgather_into_tensor_coalesced_", api="all_gather_tensor",
          line=line, in_bytes=16, out_bytes=16 * n, message_bytes=16 * n, shape=[4],
          async_op=True)  # fmt: skip
    _check(gathered, *g.ranks)
    line = here()
    part = funcol.wait_tensor(funcol.reduce_scatter_tensor(_full((2 * n,), 1.0), "max", 0, g.pg))
    w.saw(g, "reduce_scatter", "reduce_scatter_tensor_coalesced_", api="reduce_scatter_tensor",
          line=line, in_bytes=8 * n, out_bytes=8, message_bytes=8, shape=[2 * n], reduce_op="max",
          async_op=True)  # fmt: skip
    _check(part, 1)


@case
def functional_more(w: World, g: Members) -> None:
    """Broadcast, all_to_all_single and the coalesced all_reduce."""
    n, mine = g.n, _full((3,), w.rank)
    line = here()
    sent = funcol.wait_tensor(funcol.broadcast(mine, 1, g.pg))
    w.saw(g, "broadcast", "broadcast_", api="broadcast", line=line, both=12, shape=[3],
          root=g.ranks[1], async_op=True)  # fmt: skip
    _check(sent, g.ranks[1])
    line = here()
    swapped = funcol.wait_tensor(funcol.all_to_all_single(_full((n,), w.rank), None, None, g.pg))
    w.saw(g, "all_to_all", "alltoall_base_", api="all_to_all_single", line=line, in_bytes=4 * n,
          out_bytes=4 * n, message_bytes=4 * (n - 1), shape=[n], async_op=True)  # fmt: skip
    _check(swapped, *g.ranks)
    line = here()
    both = funcol.all_reduce_coalesced([mine, _full((2,), w.rank)], "sum", g.pg)
    for tensor in both:
        _check(funcol.wait_tensor(tensor), sum(g.ranks))
    w.saw(g, "all_reduce", "allreduce_coalesced_", api="all_reduce_coalesced", line=line, both=20,
          shape=[3], tensors=2, reduce_op="sum", async_op=True)  # fmt: skip


@case
def one_work_for_several_tensors(w: World, g: Members) -> None:
    """Each tensor is waited for, and Gloo's Work behind both has no future."""
    n, ins = g.n, [_full((2 * g.n,), 1.0), _full((3 * g.n,), 2.0)]
    line = here()
    parts = funcol.reduce_scatter_tensor_coalesced(ins, "sum", [0, 0], g.pg)
    for part, value in zip(parts, (n, 2 * n), strict=True):
        _check(funcol.wait_tensor(part), value)
    w.saw(g, "reduce_scatter", "reduce_scatter_tensor_coalesced_",
          api="reduce_scatter_tensor_coalesced", line=line, in_bytes=20 * n, out_bytes=20,
          message_bytes=20, shape=[2 * n], tensors=2, reduce_op="sum", async_op=True)  # fmt: skip


@case
def all_reduce_never_waited_for(w: World, g: Members) -> None:
    """Its end is the back end's, not the call of wait(); also after ops that have no future."""
    tensor = _full((2,), w.rank)
    line = here()
    dist.all_reduce(tensor, group=g.pg, async_op=True)
    w.saw(g, "all_reduce", "allreduce_", api="all_reduce", line=line, both=8, shape=[2],
          reduce_op="sum", async_op=True)  # fmt: skip


@case
def through_a_function_of_the_users(w: World, g: Members) -> None:
    """The call site is the line that calls torch, not the one that calls the helper."""
    tensor = _full((2,), w.rank)
    line = _reduce_for_me(tensor, g)
    w.saw(g, "all_reduce", "allreduce_", api="all_reduce", line=line, both=8, shape=[2],
          reduce_op="sum", function="_reduce_for_me")  # fmt: skip


def _reduce_for_me(tensor: torch.Tensor, g: Members) -> int:
    line = here()
    dist.all_reduce(tensor, group=g.pg)
    return line
