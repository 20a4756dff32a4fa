"""The table of ops: one row says everything that rankcall knows about an op.

The native recorder is built from it (``capture/native``), the fallback capture reads it,
and so do bandwidths, waiting times, comparisons between members, traffic and exports. To add an op,
add a row at the end: docs/architecture.md has the recipe.

Bandwidths are those of nccl-tests, so that figures compare with ``all_reduce_perf``:
``algbw = S / t`` and ``busbw = algbw * f``; 1 GB = 1e9 bytes. The table has S and f of each op, in
terms of what a record holds. Their source:
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "BATCH",
    "BYTES_PER_GB",
    "FROM_ROOT",
    "MESSAGES",
    "OBJECT_CALLS",
    "OPS",
    "ROOT_DESCRIBES",
    "SIZE_TO_AGREE_ON",
    "SYNCHRONISING",
    "TABLE",
    "TO_ROOT",
    "Op",
    "bandwidth_sizes",
    "bus_factor",
    "op_of_variant",
    "public_name",
]

Columns = Mapping[str, npt.NDArray[Any]]
Sizes = Callable[[Columns, int], npt.NDArray[Any]]  # from the columns of records, and the members

# What ``message_bytes`` counts on a rank (docs/records.md).
MESSAGES = (
    "input",  # the tensors that the op reads
    "output",  # the tensors that it writes
    "gathered",  # at the root: the output without its own part; elsewhere: the input
    "scattered",  # at the root: the input without its own part; elsewhere: the output
    "exchanged",  # the input without the slice for the rank itself
    "one byte",
)


class Op(NamedTuple):
    """One row: an op, all forms of which have its name in records.

    Attributes:
        name: The name in records, that of torch.distributed's function.
        forms: How the names of its c10d ops begin, without leading underscores.
        message: What ``message_bytes`` counts; one of ``MESSAGES``.
        moved: S, the bytes from which algbw is computed, as far as a rank can know them. The
            largest S of all members is the collective's. None if the op moves no data.
        factor: f, the factor from algbw to busbw, for a number of members.
        waits: The ranks that a member waits for: ``all`` members; the root (``from root``); no
            rank, but the root waits for all (``to root``); or its ``peer``.
        agree_on: The column of sizes in which the members must agree; None if they may differ.
        root_describes: Whether only the root describes the op in a trace, because the other
            members send or receive just a part of it.
    """

    name: str
    forms: tuple[str, ...] = ()
    message: str = "input"
    moved: Sizes | None = None
    factor: Callable[[int], float] = lambda members: 0.0
    waits: str = "all"
    agree_on: str | None = None
    root_describes: bool = False


def _message(columns: Columns, members: int) -> npt.NDArray[Any]:
    return columns["message_bytes"]


def _output(columns: Columns, members: int) -> npt.NDArray[Any]:
    return columns["out_bytes"]


def _all_outputs(columns: Columns, members: int) -> npt.NDArray[Any]:
    return columns["out_bytes"] * float(members)


def _all_inputs(columns: Columns, members: int) -> npt.NDArray[Any]:
    return columns["in_bytes"] * float(members)


def _larger(columns: Columns, members: int) -> npt.NDArray[Any]:
    """In an uneven all_to_all a member may send more than it receives."""
    larger: npt.NDArray[Any] = np.maximum(columns["in_bytes"], columns["out_bytes"])
    return larger


def _once(members: int) -> float:
    return 1.0


def _others(members: int) -> float:
    return (members - 1) / members


def _both_ways(members: int) -> float:
    return 2.0 * (members - 1) / members


# A record holds an op's index in this table, so rows are only ever added at the end.
TABLE = (
    Op("unknown"),
    Op("all_reduce", ("allreduce",), "input", _message, _both_ways, "all", "message_bytes"),
    Op("all_gather", ("allgather",), "output", _output, _others, "all", "message_bytes"),
    Op("reduce_scatter", ("reduce_scatter",), "output", _all_outputs, _others, "all", "in_bytes"),
    Op("broadcast", ("broadcast",), "input", _message, _once, "from root", "message_bytes"),
    Op("reduce", ("reduce",), "input", _message, _once, "to root", "message_bytes"),
    Op("all_to_all", ("alltoall",), "exchanged", _larger, _others, "all"),
    Op("gather", ("gather",), "gathered", _all_inputs, _others, "to root", "in_bytes", True),
    Op("scatter", ("scatter",), "scattered", _all_outputs, _others, "from root", "out_bytes", True),
    Op("barrier", ("barrier", "monitored_barrier"), "one byte"),
    Op("send", ("send",), "input", _message, _once, "peer"),
    Op("recv", ("recv",), "output", _message, _once, "peer"),
)

OPS = tuple(op.name for op in TABLE)  # a record's code is the index in this
# Ops that no member can leave before the last has come: their ends align clocks, and the time that
# a member spends in them beyond the shortest duration is waiting.
SYNCHRONISING = tuple(op.name for op in TABLE if op.waits == "all" and op.forms)
FROM_ROOT = tuple(op.name for op in TABLE if op.waits == "from root")
TO_ROOT = tuple(op.name for op in TABLE if op.waits == "to root")
ROOT_DESCRIBES = tuple(code for code, op in enumerate(TABLE) if op.root_describes)
SIZE_TO_AGREE_ON = {op.name: op.agree_on for op in TABLE if op.agree_on is not None}

BYTES_PER_GB = 1e9
_ROWS = {row.name: row for row in TABLE}
_SIZE_COLUMNS = ("message_bytes", "in_bytes", "out_bytes")  # that S is computed from

# torch.distributed's functions that send pickles, and how many ops each call issues: the lengths
# of the pickles are sent before them, or after them.
OBJECT_CALLS = {
    "all_gather_object": 2,
    "broadcast_object_list": 2,
    "gather_object": 2,
    "recv_object_list": 2,
    "scatter_object_list": 3,
    "send_object_list": 2,
}
BATCH = "batch_isend_irecv"
_NAMES_OF_VARIANTS = {
    "alltoall_base_": "all_to_all_single",
    "monitored_barrier_": "monitored_barrier",
}


def op_of_variant(variant: str) -> str:
    """Name the op that a c10d op (``_allgather_base_``, ``recv_any_source_``) is a form of.

    The longest known beginning decides, so that forms that torch adds later are named, too.
    Returns ``unknown`` if none fits.
    """
    bare = variant.strip("_")
    fits = [(len(form), op.name) for op in TABLE for form in op.forms if bare.startswith(form)]
    return max(fits)[1] if fits else "unknown"


def public_name(variant: str) -> str:
    """Return the name of torch.distributed's function for a c10d op, or the c10d op's own name."""
    op = op_of_variant(variant)
    return _NAMES_OF_VARIANTS.get(variant, op if op != "unknown" else variant)


def bus_factor(op: str, n: int) -> float:
    """Return f, the factor from an op's algbw to the bandwidth that its hardware carries.

    ``n`` is the number of members. An op that is not known, or moves no data, has the factor 0.
    """
    row = _ROWS.get(op)
    return row.factor(n) if row is not None and n > 0 else 0.0


def bandwidth_sizes(columns: dict[str, npt.NDArray[Any]], n: int) -> npt.NDArray[np.float64]:
    """Return each record's S in bytes, as far as its own rank can know it (0: moves no data).

    The largest S of all members is the collective's: in a gather only the destination knows its
    output, and in an uneven all_to_all each member has a size of its own.
    """
    op = columns["op"]
    result = np.zeros(len(op), np.float64)
    for code in np.flatnonzero(np.bincount(op, minlength=len(TABLE))):
        moved, rows = TABLE[code].moved, op == code
        if moved is not None:
            result[rows] = moved({name: columns[name][rows] for name in _SIZE_COLUMNS}, n)
    return result
