"""The record of one collective: its fields, their units, and the names of their codes.

This is the only definition. The native recorder is built against a header generated from it and
asserts every offset; the Python recorder and all readers use ``RECORD`` directly.

``copy_rows`` and the functions beside it treat records as plain bytes. NumPy copies, joins and
selects the rows of a structure field by field, and keeps the GIL meanwhile. On plain bytes of the
same length it is thirty times as fast.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rankcall.ops import OPS

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
    "PICKLE_DTYPE",
    "PLAIN",
    "RECORD",
    "REDUCE_OPS",
    "STATUSES",
    "device_name",
    "has_duration",
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
# the back end does not report ends.
FLAG_ABANDONED = 1
FLAG_ANY_SOURCE = 2  # a receive from any source: peer and seq are known only after it has ended
# The op runs on a device, and the host only enqueues it. Without device_ms its start is not known,
# and completed_ns is the time when its end was noticed, up to two seconds late.
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

# How ``ring.decode`` shows these fields.
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
