"""What one collective is: the table of ops, the fields of its record, and the name of each fact.

This is the only definition of the record. The native recorder is built against a header generated
from it and asserts every offset; the Python recorder and all readers use ``RECORD`` directly.

``copy_rows`` and the functions beside it treat records as plain bytes. NumPy copies, joins and
selects the rows of a structure field by field, and keeps the GIL meanwhile. On plain bytes of the
same length it is thirty times as fast.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# The table of ops: one row says everything that rankcall knows about an op.
#
# The native recorder is built from it (``capture/native``), the fallback capture reads it, and so
# do bandwidths, waiting times, comparisons between members, traffic and exports. To add an op, add
# a row at the end: docs/recipes.md has the recipe.
#
# Bandwidths are those of nccl-tests, so that figures compare with ``all_reduce_perf``: ``algbw = S
# / t`` and ``busbw = algbw * f``; 1 GB = 1e9 bytes. The table has S and f of each op, in terms of
# what a record holds. Their source:
# https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md


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


# A record's commit word is ``(index + 1) << 2 | state``. ``index`` counts records from 0 in issue
# order, so a word that does not belong to its slot is seen at once.
COMMIT_WRITING = 0  # the body is being written: nothing in it may be read
COMMIT_OPEN = 1  # issued; the completion fields are not set
COMMIT_CLOSING = 2  # the completion fields are being written: all others may be read
COMMIT_DONE = 3  # nothing more will change

# The vocabulary: each fact about an op has one name, in the ring, in tables (``Run.records``,
# Parquet, JSON lines), in a hook's ``status.record``, in descriptions' columns, as the label of a
# metric, in traces and in the documents. The table in docs/records.md is this one: a test compares
# them. Two interfaces that rankcall replaces have names of their own, and keep them:
# ``drop_in.py`` has these, and the facts behind them.
FACTS = {
    "rank": "The rank that made the record.",
    "attempt": "torchrun's restart count, from 0.",
    "host": "The rank's host.",
    "index": "The index of the record among this rank's records, from 0.",
    "group": (
        "torch's name for the process group; `0#2` after a second `init_process_group`. "
        "Hooks and dumps call it `pg_name`."
    ),
    "group_ranks": "The global ranks of the group: `0-3,8` in tables, a list in `status.record`.",
    "kind": "`collective` or `p2p`.",
    "seq": (
        "Counts from 1, in issue order. Collectives are counted per group, so the number is equal "
        "on all members. p2p ops are counted per (group, source, destination, tag), so the number "
        "is equal at both ends."
    ),
    "op": (
        "`all_reduce`, `all_gather`, `reduce_scatter`, `broadcast`, `reduce`, `all_to_all`, "
        "`gather`, `scatter`, `barrier`, `send`, `recv`. Descriptions and metrics also tell apart "
        "`all_to_all_single`, `monitored_barrier` and the functions that send pickles."
    ),
    "variant": (
        "The name of the c10d op: `allreduce_`, `_allgather_base_`, `recv_any_source_`, ..."
    ),
    "message_bytes": "The size of the message: see below.",
    "in_bytes": "Bytes of the tensors that the op reads on this rank.",
    "out_bytes": "Bytes of the tensors that the op writes on this rank; `in_bytes` if in place.",
    "dtype": "Of the first input tensor, or of the output if the op has no input.",
    "shape": "Of the same tensor.",
    "tensors": "The number of input tensors (of output tensors, if the op has no input).",
    "shape_hash": (
        "Distinguishes the shapes of several tensors, and split sizes; 0 for one tensor or none."
    ),
    "reduce_op": (
        "`sum`, `avg`, `product`, `min`, `max`, `band`, `bor`, `bxor`, `premul_sum`, or null."
    ),
    "root": "The global rank of the root, or null.",
    "peer": (
        "The global rank at the other end of a message, or null. A receive from any source gets "
        "its peer and its `seq` when it completes."
    ),
    "tag": "The tag of a send or receive.",
    "async_op": "The caller's argument; null if the op does not have one (sends and receives).",
    "device": "`cpu`, `cuda:0`, ...",
    "call_site": (
        "`file:line` of the nearest frame outside torch and rankcall; if DDP issues the op, the "
        "line of `backward()`."
    ),
    "user_line": (
        "`file:line` of the nearest frame of the user's own code, if `call_site` is in an "
        "installed package or in Python's standard library (Lightning, Accelerate, DeepSpeed); "
        "otherwise null."
    ),
    "function": "The function that contains `call_site`.",
    "api": (
        "The public function that this line called: `all_reduce`, `batch_isend_irecv`, `backward`."
    ),
    "correlation": (
        "One number for all ops of a call that issues several (`batch_isend_irecv`, the object "
        "collectives)."
    ),
    "thread": "The kernel's id of the issuing thread.",
    "step": (
        "The number of optimizer steps that finished before the op was issued (compiled optimizers "
        "are not counted)."
    ),
    "status": (
        "`enqueued` (on a device), `started` (on a device only if its back end tells starts), "
        "`completed`, `failed`."
    ),
    "error": "The error message of a failed op.",
    "abandoned": (
        "True if the end of the op cannot be known. Its Work was dropped without `wait()` and the "
        "back end reports the end in no other way; or the op was captured into a graph; or the "
        "device's back end keeps no status."
    ),
    "enqueued_ns": "When the op was issued, in ns of this host's monotonic clock.",
    "started_ns": (
        "When the op started, on the same clock. On CPU back ends an op starts when it is issued. "
        "On a device it is null, or, if the back end tells starts (`TORCH_NCCL_ENABLE_TIMING=1`), "
        "when rankcall noticed the start of an op that took longer than a second."
    ),
    "completed_ns": (
        "When the op ended, on the same clock; null while it is in flight. On a device, this is "
        "when rankcall noticed the end, up to two seconds late."
    ),
    "device_ms": (
        "How long the device worked on it, with `RANKCALL_DEVICE_TIMES=1` (experimental, see "
        "[devices](design/devices.md)); otherwise null."
    ),
}
# What descriptions and exports have beside the columns of a record.
DERIVED_FACTS = {
    "enqueued_at": "When the op was issued, in UTC, on the clock that all hosts share.",
    "enqueued_epoch_ns": "The same by this host's clock, in ns since the epoch.",
    "device_index": "The index of the device; -1 for the CPU.",
    "duration_ms": (
        "How long the op took on this rank, in ms. Null if that is not known: the op is in flight, "
        "failed, was never waited for, or runs on a device without device times."
    ),
    "end_unknown": (
        "True if the op was issued and its end is not known: it is in flight, or it is "
        "`abandoned`. Otherwise null, and left out of descriptions."
    ),
    "algbw_gbps": "S / t of nccl-tests, with this rank's own duration, in GB/s.",
    "busbw_gbps": "`algbw_gbps` times f.",
    "gpu_serial": "The serial number of the rank's device: the variable `GPU_SERIAL`.",
    "vm_id": "The name of the rank's machine: the variable `VM_ID`.",
}

MAX_DIMS = 6  # more are rare, and would make each record larger than three cache lines
NO_RANK = -1  # root or peer: does not apply, or not known (an any-source receive in flight)

KINDS = ("collective", "p2p")
STATUSES = ("enqueued", "started", "completed", "failed")
DTYPES = (
    *("unknown", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"),
    *("complex32", "complex64", "complex128", "bool", "qint8", "quint8", "qint32", "bfloat16"),
    *("float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "float8_e8m0fnu"),
    *("float4_e2m1fn_x2", "uint16", "uint32", "uint64"),
)
PICKLE_DTYPE = DTYPES.index("uint8")  # of the pickles that torch.distributed sends
# c10d::ReduceOp::RedOpType, shifted by one so that 0 means "does not apply".
REDUCE_OPS = ("none", "sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
# c10::DeviceType, in its own numbering.
DEVICE_TYPES = (
    *("cpu", "cuda", "mkldnn", "opengl", "opencl", "ideep", "hip", "fpga", "maia", "xla"),
    *("vulkan", "metal", "xpu", "mps", "meta", "hpu", "ve", "lazy", "ipu", "mtia"),
    "privateuseone",
)

# The op's end cannot be known: its Work was dropped without wait(), the op went into a graph, or
# the back end does not report ends. Of an op in flight on a device: it is not known now.
FLAG_ABANDONED = 1
FLAG_ANY_SOURCE = 2  # a receive from any source: peer and seq are known only after it has ended
# The op runs on a device, and the host only enqueues it. Without device_ms its start is not known,
# and completed_ns is the time when its end was noticed, up to two seconds late.
FLAG_DEVICE = 4
# Of an op in flight on a device: the back end has told that the device had not started it, about a
# second ago at most. Without this flag and without started_ns, nothing is known.
FLAG_NOT_STARTED = 8
# In place of the time at which a device started an op; 0: it has not started it.
START_UNKNOWN = -1
# Nor is it known whether the op is over: FLAG_ABANDONED, until another one follows.
END_UNKNOWN = -2

RECORD = np.dtype(
    [
        ("commit", "<u8"),
        ("seq", "<u8"),  # from 1: per group; p2p per (group, source, destination, tag)
        ("enqueued_ns", "<i8"),  # CLOCK_MONOTONIC, when the op was issued
        ("started_ns", "<i8"),  # 0: not known to have started
        ("completed_ns", "<i8"),  # 0: not finished
        ("message_bytes", "<u8"),
        ("in_bytes", "<u8"),
        ("out_bytes", "<u8"),
        ("correlation", "<u8"),  # one number for all the ops of one public call
        ("step", "<u8"),  # optimizer steps finished before it was issued
        ("device_ms", "<f8"),  # NaN without device times
        ("tag", "<i8"),
        ("shape", "<i8", (MAX_DIMS,)),  # of the first input tensor (of the output, without one)
        ("group", "<u4"),  # side-table id
        ("call_site", "<u4"),  # side-table id, 0: not known
        ("thread", "<u4"),  # kernel thread id
        ("root", "<i4"),  # rank within the group
        ("peer", "<i4"),  # rank within the group
        ("error", "<u4"),  # side-table id of the message, 0: none
        ("variant", "<u4"),  # side-table id of the c10d op's name
        ("shape_hash", "<u4"),  # of all shapes and split sizes, 0: one tensor and no splits
        ("tensors", "<u2"),
        ("device_index", "<i2"),
        ("kind", "u1"),
        ("op", "u1"),
        ("dtype", "u1"),
        ("reduce_op", "u1"),
        ("device_type", "u1"),
        ("async_op", "u1"),  # 0 no, 1 yes, 2 the op does not say
        ("status", "u1"),
        ("flags", "u1"),
        ("ndim", "u1"),
        ("pad", "u1", (3,)),
    ]
)
assert RECORD.itemsize == 192, "three cache lines"

# How ``ring.reader`` shows these fields.
CODED: dict[str, tuple[str | None, ...]] = {  # as the name of the code
    "kind": KINDS,
    "op": OPS,
    "dtype": DTYPES,
    "reduce_op": (None, *REDUCE_OPS[1:]),
    "status": STATUSES,
}
PLAIN = (  # as the number itself
    *("seq", "message_bytes", "in_bytes", "out_bytes", "tag"),
    *("thread", "step", "tensors", "shape_hash", "enqueued_ns"),
)
GROUP_RANKS = ("root", "peer")  # as the global rank, or null
LATE_TIMES = ("started_ns", "completed_ns")  # as the time, or null while it is not known (0)


def has_duration(flags: npt.NDArray[Any], device_ms: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return a mask of the records whose start and end times give the duration of the op."""
    timed: npt.NDArray[np.bool_] = (flags & FLAG_DEVICE == 0) | ~np.isnan(device_ms)
    return timed


def device_name(kind: int, index: int) -> str:
    """Return torch's name of a device of this c10::DeviceType: ``cpu``, ``cuda:0``."""
    name = DEVICE_TYPES[kind] if kind < len(DEVICE_TYPES) else f"device{kind}"
    return name if index < 0 else f"{name}:{index}"


Rows = npt.NDArray[Any]
_BYTES = np.dtype((np.void, RECORD.itemsize))
_fence = threading.Lock()


def read_barrier() -> None:
    """Order all reads before the call before all reads after it.

    A reader copies a record and then looks at its commit word again. ARM may do these reads in
    either order. Python offers no fence, but a lock that is released and taken again is one.
    """
    with _fence:
        pass
    with _fence:
        pass


def copy_rows(rows: Rows) -> Rows:
    """Return a copy of records."""
    copy: Rows = rows.view(_BYTES).copy().view(RECORD)
    return copy


def concat_rows(parts: Sequence[Rows]) -> Rows:
    """Return several arrays of records as one. A single array is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([part.view(_BYTES) for part in parts]).view(RECORD)


def take_rows(rows: Rows, which: npt.NDArray[Any]) -> Rows:
    """Return a copy of the records that a mask or an array of indexes selects."""
    taken: Rows = rows.view(_BYTES)[which].view(RECORD)
    return taken


def assign_rows(rows: Rows, which: npt.NDArray[Any], new: Rows) -> None:
    """Overwrite the records that a mask or an array of indexes selects."""
    rows.view(_BYTES)[which] = new.view(_BYTES)
