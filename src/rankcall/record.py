"""What one collective is: the record's fields, their units, and the names behind their codes.

This is the one definition. The native recorder is built against a header generated from it and
asserts every offset; the Python recorder and all readers use ``RECORD`` directly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "CODED",
    "COMMIT_CLOSING",
    "COMMIT_DONE",
    "COMMIT_OPEN",
    "COMMIT_WRITING",
    "DEVICE_TYPES",
    "DTYPES",
    "FLAG_ABANDONED",
    "FLAG_ANY_SOURCE",
    "FLAG_DEVICE",
    "GROUP_RANKS",
    "KINDS",
    "LATE_TIMES",
    "MAX_DIMS",
    "NO_RANK",
    "OPS",
    "PLAIN",
    "RECORD",
    "REDUCE_OPS",
    "STATUSES",
    "SYNCHRONISING",
    "device_name",
    "has_duration",
    "op_of_variant",
]

# A record's commit word is ``(index + 1) << 2 | state``. ``index`` counts records from 0 in issue
# order, so a word that does not belong to its slot is seen at once.
COMMIT_WRITING = 0  # the body is being written: nothing in it may be read
COMMIT_OPEN = 1  # issued; the completion fields are not set
COMMIT_CLOSING = 2  # the completion fields are being written: all others may be read
COMMIT_DONE = 3  # nothing more will change

MAX_DIMS = 6
NO_RANK = -1  # root or peer: does not apply, or not known (an any-source receive in flight)

KINDS = ("collective", "p2p")
STATUSES = ("enqueued", "started", "completed", "failed")
OPS = (
    "unknown",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "gather",
    "scatter",
    "barrier",
    "send",
    "recv",
)
# Ops that no member can leave before the last has come: their ends align clocks, and what a
# member spends in them beyond the shortest duration is waiting.
SYNCHRONISING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")

DTYPES = (
    "unknown", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
    "complex32", "complex64", "complex128", "bool", "qint8", "quint8", "qint32", "bfloat16",
    "float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "float8_e8m0fnu",
    "float4_e2m1fn_x2", "uint16", "uint32", "uint64",
)  # fmt: skip
# c10d::ReduceOp::RedOpType, shifted by one so that 0 means "does not apply".
REDUCE_OPS = (
    "none", "sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum",
)  # fmt: skip
# c10::DeviceType, in its own numbering.
DEVICE_TYPES = (
    "cpu", "cuda", "mkldnn", "opengl", "opencl", "ideep", "hip", "fpga", "maia", "xla", "vulkan",
    "metal", "xpu", "mps", "meta", "hpu", "ve", "lazy", "ipu", "mtia", "privateuseone",
)  # fmt: skip

# Its end cannot be known: its Work was dropped without wait(), it went into a graph, or its back
# end tells nothing.
FLAG_ABANDONED = 1
FLAG_ANY_SOURCE = 2  # a receive from any source: peer and seq are known at completion only
# It runs on a device, and the host only enqueues it. Without device_ms its start is not known, and
# completed_ns is when its end was noticed, up to a second or two late.
FLAG_DEVICE = 4

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

# What a table of records, and one record by names, have in these fields.
CODED: dict[str, tuple[str | None, ...]] = {  # the name behind the code
    "kind": KINDS,
    "op": OPS,
    "dtype": DTYPES,
    "reduce_op": (None, *REDUCE_OPS[1:]),
    "status": STATUSES,
}
PLAIN = (  # the number itself
    "seq", "message_bytes", "in_bytes", "out_bytes", "tag", "thread", "step", "tensors",
    "shape_hash", "enqueued_ns",
)  # fmt: skip
GROUP_RANKS = ("root", "peer")  # the global rank, or null
LATE_TIMES = ("started_ns", "completed_ns")  # 0 until they are known; the time, or null

_OP_OF_PREFIX = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "alltoall": "all_to_all",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "monitored_barrier": "barrier",
    "send": "send",
    "recv": "recv",
}


def op_of_variant(variant: str) -> str:
    """Name the op that a c10d op (``_allgather_base_``, ``recv_any_source_``) is a form of.

    The longest known beginning decides, so that forms torch adds later are named too;
    ``unknown`` where none fits.
    """
    bare = variant.strip("_")
    fits = [prefix for prefix in _OP_OF_PREFIX if bare.startswith(prefix)]
    return _OP_OF_PREFIX[max(fits, key=len)] if fits else "unknown"


def has_duration(flags: npt.NDArray[Any], device_ms: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Tell of which records the time between start and end says how long the op took."""
    timed: npt.NDArray[np.bool_] = (flags & FLAG_DEVICE == 0) | ~np.isnan(device_ms)
    return timed


def device_name(kind: int, index: int) -> str:
    """Return what torch calls a device of this c10::DeviceType: ``cpu``, ``cuda:0``."""
    name = DEVICE_TYPES[kind] if kind < len(DEVICE_TYPES) else f"device{kind}"
    return name if index < 0 else f"{name}:{index}"
