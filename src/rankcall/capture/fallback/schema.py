"""Read the arguments of a c10d op by its schema, for the Python capture.

Corresponds to ``native/ops.h``: both have the same rules, because torch adds ops, and names their
arguments alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rankcall.record import MAX_DIMS, OPS, REDUCE_OPS, TABLE, op_of_variant

_SEND, _RECV = OPS.index("send"), OPS.index("recv")


@dataclass
class Op:
    """One c10d op: its code, and the positions of its arguments (None: it has no such argument)."""

    name: str
    overload: Any
    code: int
    process_group: int
    returns_work: bool
    positions: dict[str, int]
    p2p: bool
    message: str  # what message_bytes counts: one of record.MESSAGES
    peer: int | None
    outgoing: bool  # its peer is the destination
    reads: int | None = None
    writes: int | None = None
    other_tensor: int | None = None


class Sizes(NamedTuple):
    """Bytes of an argument's tensors, and the tensors."""

    bytes: int
    tensors: list[torch.Tensor]


NOTHING = Sizes(0, [])


def c10d_ops() -> list[Op]:
    """Return every c10d op that takes a process group, as the running torch declares it."""
    ops = []
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("c10d::"):
            op = _describe(torch._C._get_schema(*name.partition(".")[::2]))
            if op is not None:
                ops.append(op)
    return ops


def _describe(schema: Any) -> Op | None:
    positions = {argument.name: at for at, argument in enumerate(schema.arguments)}
    if "process_group" not in positions:
        return None
    name = schema.name.removeprefix("c10d::")
    returns = schema.returns
    code = OPS.index(op_of_variant(name))
    row = TABLE[code]
    op = Op(
        name=name,
        overload=getattr(torch.ops.c10d, name).default,
        code=code,
        process_group=positions["process_group"],
        returns_work=bool(returns) and "Work" in returns[-1].type.annotation_str,
        positions=positions,
        p2p=row.waits == "peer",
        message=row.message,
        peer=positions.get("dst", positions.get("src")),
        outgoing="dst" in positions,
    )
    for argument in schema.arguments:
        at = positions[argument.name]
        if "Tensor" not in argument.type.annotation_str or argument.name == "sparse_indices":
            continue
        if argument.name.startswith("output"):
            op.writes = at
        elif argument.name.startswith("input"):
            op.reads = at
        elif argument.name == "tensors":  # in place, but for a send and a receive
            op.reads = None if op.code == _RECV else at
            op.writes = None if op.code == _SEND else at
        else:
            op.other_tensor = at
    return op


def _flatten(value: Any, into: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        into.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _flatten(item, into)


def bytes_of(tensor: torch.Tensor) -> int:
    """Return a tensor's payload in bytes; a sparse one's indices and values."""
    if tensor.is_sparse:
        return bytes_of(tensor._indices()) + bytes_of(tensor._values())
    return tensor.nbytes


def sizes_at(arguments: tuple[Any, ...], at: int | None) -> Sizes:
    """Measure the argument at a position."""
    if at is None or at >= len(arguments):
        return NOTHING
    value = arguments[at]
    if type(value) is list and len(value) == 1 and isinstance(value[0], torch.Tensor):
        return Sizes(bytes_of(value[0]), value)
    tensors: list[torch.Tensor] = []
    _flatten(value, tensors)
    return Sizes(sum(bytes_of(tensor) for tensor in tensors), tensors)


def in_and_out(op: Op, arguments: tuple[Any, ...]) -> tuple[Sizes, Sizes]:
    """Return the sizes that an op reads and writes on this rank."""
    inputs = sizes_at(arguments, op.reads)
    return inputs, inputs if op.writes == op.reads else sizes_at(arguments, op.writes)


def message_bytes(
    op: Op, arguments: tuple[Any, ...], ins: Sizes, outs: Sizes, rank: int, size: int
) -> int:
    """Return what a message of this op carries on this rank (docs/records.md)."""
    if op.message == "input":  # most ops
        return ins.bytes
    if op.message == "output":
        return outs.bytes
    if op.message == "gathered":
        return outs.bytes - ins.bytes if outs.tensors else ins.bytes
    if op.message == "scattered":
        return ins.bytes - outs.bytes if ins.tensors else outs.bytes
    if op.message == "exchanged":
        return ins.bytes - _own_slice(op, arguments, ins, rank, size)
    return 1  # "one byte"


def _own_slice(op: Op, arguments: tuple[Any, ...], ins: Sizes, rank: int, size: int) -> int:
    at = op.positions.get("input_split_sizes")
    if at is None:
        return bytes_of(ins.tensors[rank]) if rank < len(ins.tensors) else 0
    splits = arguments[at]
    if not splits:
        return ins.bytes // size if size > 0 else 0
    rows = sum(splits)
    return ins.bytes // rows * splits[rank] if rows > 0 and rank < len(splits) else 0


def shape_of(tensors: list[torch.Tensor]) -> tuple[int, tuple[int, ...]]:
    """Return the first tensor's number of dimensions and its padded shape."""
    if not tensors or tensors[0].is_sparse:
        return 0, (0,) * MAX_DIMS
    dims = tuple(tensors[0].shape[:MAX_DIMS])
    return len(dims), dims + (0,) * (MAX_DIMS - len(dims))


def shape_hash(op: Op, arguments: tuple[Any, ...], tensors: list[torch.Tensor]) -> int:
    """Return a number that tells apart shapes and split sizes; 0 for one tensor without splits."""
    if "input_split_sizes" not in op.positions:
        lists = []
    else:
        names = "output_split_sizes", "input_split_sizes"
        lists = [arguments[op.positions[name]] for name in names]
    if len(tensors) < 2 and not any(lists):
        return 0
    words: list[int] = []
    for tensor in tensors:
        words += [tensor.dim(), *tensor.shape]
    if any(lists):
        for splits in lists:
            words += [-1, *splits]
    # FNV-1a, as in ``native/ops.h``: ranks with different captures compare these numbers.
    state = 0xCBF29CE484222325
    for word in words:
        state = ((state ^ (word & 0xFFFFFFFFFFFFFFFF)) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return (state ^ (state >> 32)) & 0xFFFFFFFF or 1


def reduce_code(op: Op, arguments: tuple[Any, ...]) -> int:
    """Return the code of an op's reduction; 0 if it has none, or one that is not known."""
    at = op.positions.get("reduce_op")
    if at is None:
        return 0
    code = int(arguments[at].op()) + 1  # RedOpType, shifted as in REDUCE_OPS
    return code if code < len(REDUCE_OPS) else 0


def async_code(op: Op, arguments: tuple[Any, ...]) -> int:
    """Return whether an op is asynchronous: 0 no, 1 yes, 2 it has no such argument."""
    at = op.positions.get("async_op")
    if at is None:
        return 2
    return int(arguments[at]) if at < len(arguments) else 1  # the schema's default
