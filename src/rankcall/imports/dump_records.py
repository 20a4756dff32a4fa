"""From the entries of one Flight Recorder dump to records.

An entry has the names of its backend and op, the sizes and dtypes of its tensors, its state and the
Python stack that issued it. It does not have the root, the reduce op, tags or splits. Times are of
the wall clock. Whether an op has ended is known from its state on NCCL. Gloo's entries stay
``scheduled`` and are only marked as retired when the op has ended, well or not; and if torch is
late, some are not even marked.
"""

from __future__ import annotations

import marshal
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from rankcall.ops import op_of_variant
from rankcall.record import (
    DEVICE_TYPES,
    DTYPES,
    FLAG_DEVICE,
    KINDS,
    MAX_DIMS,
    OPS,
    RECORD,
    STATUSES,
)
from rankcall.ring.tables import CallSite

Records = npt.NDArray[Any]
GroupKey = tuple[str, str, str]  # name, description, backend

_LARGEST = 1 << 62
_MOST_SIZES_BYTES, _MOST_KEY_BYTES = 1 << 26, 1 << 16  # of the sizes of all entries; of one
_MOST_FRAMES = 256  # of a stack; the user's line is near its beginning
_MOST_TEXT = 400  # characters of a name or a path
_COLLECTIVE, _P2P = KINDS.index("collective"), KINDS.index("p2p")
_ENQUEUED, _STARTED, _COMPLETED = (STATUSES.index(n) for n in ("enqueued", "started", "completed"))
_STATES = {"scheduled": _ENQUEUED, "started": _STARTED, "completed": _COMPLETED}
# Torch's names of scalar types, with ours and the bytes of an element.
_DTYPES = {
    "Byte": ("uint8", 1),
    "Char": ("int8", 1),
    "Short": ("int16", 2),
    "Int": ("int32", 4),
    "Long": ("int64", 8),
    "Half": ("float16", 2),
    "Float": ("float32", 4),
    "Double": ("float64", 8),
    "ComplexHalf": ("complex32", 4),
    "ComplexFloat": ("complex64", 8),
    "ComplexDouble": ("complex128", 16),
    "Bool": ("bool", 1),
    "BFloat16": ("bfloat16", 2),
    "Float8_e5m2": ("float8_e5m2", 1),
    "Float8_e4m3fn": ("float8_e4m3fn", 1),
    "Float8_e5m2fnuz": ("float8_e5m2fnuz", 1),
    "Float8_e4m3fnuz": ("float8_e4m3fnuz", 1),
    "Float8_e8m0fnu": ("float8_e8m0fnu", 1),
    "UInt16": ("uint16", 2),
    "UInt32": ("uint32", 4),
    "UInt64": ("uint64", 8),
}
_SHAPE = ("input_sizes", "output_sizes", "input_dtypes", "output_dtypes")
_ON_CPU = ("gloo", "mpi", "ucc", "fake")
_MESSAGE = re.compile(r"(send|recv) (\d{1,7})(->|<-)(\d{1,7})")
# Frames of libraries that stand between the user's line and the op.
_LIBRARY = re.compile(
    r"(?:^|/)(?:torch|rankcall)/|(?:^|/)(?:typing_extensions|contextlib|functools)\.py$|^<|\.cpp$"
)
_WRAPPERS = ("wrapper", "inner", "_fn", "decorate_context")


@dataclass
class DumpRecords:
    """The records of one dump, in issue order.

    ``records["group"]`` and ``["call_site"]`` are indexes into ``groups`` and ``sites``. ``ended``
    marks the records whose end is known only from the retired flag: they may have failed.
    """

    records: Records
    groups: list[GroupKey]
    sites: list[CallSite]
    ended: npt.NDArray[np.bool_]
    lost: int  # entries that were overwritten before the dump
    last_ns: int  # the newest time in it; 0: none
    on_cpu: npt.NDArray[np.bool_]
    timeout_ns: int  # the longest timeout of its entries


@dataclass
class _Shapes:
    """One record for each different (op, sizes, dtypes), without times and state."""

    known: dict[bytes, int] = field(default_factory=dict)
    rows: list[Records] = field(default_factory=list)
    bytes_left: int = _MOST_SIZES_BYTES

    def index(self, shape: tuple[Any, ...]) -> int:
        """Return the index of (name, input sizes, output sizes, input dtypes, output dtypes)."""
        try:
            # Equal bytes stand for equal values, and make a fast key.
            key = marshal.dumps(shape) if self.bytes_left > 0 else b""
        except ValueError:
            key = b""  # nested too deeply
        # A small file can refer to one large list from many entries.
        self.bytes_left -= len(key)
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = len(self.rows)
            sound = key and len(key) < _MOST_KEY_BYTES and _are_tensors(*shape[1:])
            self.rows.append(_shape(*shape) if sound else _shape(shape[0], (), (), (), ()))
        return found


def _are_tensors(inputs: Any, outputs: Any, in_dtypes: Any, out_dtypes: Any) -> bool:
    """Tell whether sizes and dtypes have the form that Flight Recorder gives them."""
    return all(isinstance(each, (list, tuple)) for each in (in_dtypes, out_dtypes)) and all(
        isinstance(sizes, (list, tuple)) and all(isinstance(each, (list, tuple)) for each in sizes)
        for sizes in (inputs, outputs)
    )


def _shape(name: Any, inputs: Any, outputs: Any, in_dtypes: Any, out_dtypes: Any) -> Records:
    row = np.zeros(1, RECORD)
    record = row[0]
    backend, op, peer = op_of_entry(name)
    record["op"], record["peer"], record["root"] = OPS.index(op), peer, -1
    record["kind"] = _P2P if op in ("send", "recv") else _COLLECTIVE
    in_bytes, out_bytes = _bytes(inputs, in_dtypes), _bytes(outputs, out_dtypes)
    record["in_bytes"], record["out_bytes"] = in_bytes, out_bytes
    record["message_bytes"] = {
        "all_gather": out_bytes,
        "recv": out_bytes,
        "scatter": out_bytes,
        "barrier": 1,
    }.get(op, in_bytes)
    dtype = next((each for each in (*in_dtypes, *out_dtypes) if isinstance(each, str)), "")
    record["dtype"] = DTYPES.index(_DTYPES.get(dtype, ("unknown", 0))[0])
    first = next(iter(inputs or outputs), ())
    record["ndim"] = min(len(first), MAX_DIMS)
    record["shape"][: record["ndim"]] = [_int(each) for each in first[:MAX_DIMS]]
    record["tensors"] = min(len(inputs), 65535)
    if op == "all_to_all":  # a dump does not tell whether it has splits
        record["shape_hash"] = zlib.crc32(repr((inputs, outputs)).encode()) or 1
    record["device_type"] = DEVICE_TYPES.index("cpu" if backend in _ON_CPU else "cuda")
    record["device_index"], record["device_ms"], record["async_op"] = -1, np.nan, 2
    # A device's times are those at which the host noticed them. A CPU's are not in a dump at all.
    record["flags"] = 0 if backend in _ON_CPU else FLAG_DEVICE
    return row


def op_of_entry(name: Any) -> tuple[str, str, int]:
    """Return the backend, our name of the op, and the peer's rank in the group (-1: none).

    For example ``("nccl", "send", 1)`` for ``nccl:send 0->1``.
    """
    backend, _, rest = _text(name).rpartition(":")
    message = _MESSAGE.fullmatch(rest)
    if message:
        # A send names its own rank first, and so does a receive.
        return backend, message[1], int(message[4])
    bare = rest.strip("_").lower()
    if bare.endswith("barrier"):
        return backend, "barrier", -1
    for ours in ("all_reduce", "all_gather", "all_to_all"):
        bare = bare.replace(ours, ours.replace("_", ""))
    return backend, op_of_variant(bare), -1


def _bytes(sizes: Sequence[Sequence[Any]], dtypes: Sequence[Any]) -> int:
    """Return the bytes of all tensors; 0 if they are not known."""
    total = 0
    for number, size in enumerate(sizes):
        dtype = dtypes[min(number, len(dtypes) - 1)] if dtypes else ""
        width = _DTYPES.get(dtype, ("", 0))[1] if isinstance(dtype, str) else 0
        total += math.prod(min(_int(each), _LARGEST) for each in size[:16]) * width
    return min(max(total, 0), _LARGEST)


def records_of(entries: Sequence[Mapping[str, Any]]) -> DumpRecords:
    """Return the records of a dump's entries."""
    shapes, sites, groups = _Shapes(), _Sites(), _Groups()
    names = [*map(_text, _values(entries, "profiling_name"))]
    columns = [[v or () for v in _values(entries, name)] for name in _SHAPE]
    which = np.array([*map(shapes.index, zip(names, *columns, strict=True))], np.intp)
    table = np.concatenate(shapes.rows) if shapes.rows else np.zeros(0, RECORD)
    records: Records = table[which]
    records["group"] = [groups.index(e, n) for e, n in zip(entries, names, strict=True)]
    records["call_site"] = [*map(sites.index, _values(entries, "frames"))]
    is_p2p = np.array([value is True for value in _values(entries, "is_p2p")], bool)
    records["kind"][is_p2p] = _P2P
    collective = _column(entries, "collective_seq_id")
    if not collective.any():
        collective = _column(entries, "seq_id")  # the name in the oldest dumps
    messages = _column(entries, "p2p_seq_id")
    records["seq"] = np.where(records["kind"] == _P2P, messages, collective)
    records["tag"] = 0
    created = _column(entries, "time_created_ns")
    records["enqueued_ns"] = created
    records["started_ns"] = _column(entries, "time_discovered_started_ns")
    completed = _column(entries, "time_discovered_completed_ns")
    records["completed_ns"] = completed
    records["device_ms"] = [*map(_duration, _values(entries, "duration_ms"))]
    status = np.array([*map(_state, _values(entries, "state"))], np.uint8)
    status[completed > 0] = _COMPLETED
    retired = np.array([value is True for value in _values(entries, "retired")], bool)
    on_cpu = records["device_type"] == DEVICE_TYPES.index("cpu")
    ended = retired & on_cpu & (status == _ENQUEUED)
    status[ended] = _COMPLETED
    records["status"] = status
    records["completed_ns"][on_cpu] = 0
    numbers = _column(entries, "record_id")
    lost = int(numbers[0]) if len(numbers) else 0
    merged, kept = _without_batches(records, names)
    times = [int(each.max()) for each in (created, completed) if len(each)]
    return DumpRecords(
        merged[kept],
        groups.keys,
        sites.sites,
        ended[kept],
        min(lost, _LARGEST >> 4),
        max(times, default=0),
        on_cpu[kept],
        int(_column(entries, "timeout_ms").clip(0, 10**9).max(initial=0)) * 1_000_000,
    )


def _without_batches(
    records: Records, names: Sequence[str]
) -> tuple[Records, npt.NDArray[np.bool_]]:
    """Give the ops of a batch the state of their batch, and tell which records to keep.

    NCCL issues the ops of a batch together. Only the last entry, which stands for the whole batch,
    has the events that tell the state. All entries of a batch have one sequence number.
    """
    kept = np.ones(len(records), bool)
    keys = np.stack([records["group"], records["kind"], records["seq"].astype(np.int64)])
    changes = np.any(keys[:, 1:] != keys[:, :-1], axis=0)
    cuts = (np.flatnonzero(changes) + 1).tolist() if len(records) else []
    for begin, end in zip([0, *cuts], [*cuts, len(records)], strict=True):
        if end == begin:
            continue
        if end - begin < 2:
            kept[begin] = not names[begin].endswith("coalesced") or records["op"][begin] > 0
            continue
        last = end - 1
        if names[last].endswith("coalesced"):
            for name in ("status", "started_ns", "completed_ns"):
                records[name][begin:last] = records[name][last]
            kept[last] = False
        if records["kind"][begin] == _COLLECTIVE:
            last = end - 1 if kept[end - 1] else end - 2
            for name in ("in_bytes", "out_bytes", "message_bytes"):
                records[name][begin] = min(int(records[name][begin : last + 1].sum()), _LARGEST)
            kept[begin + 1 : end] = False
    return records, kept


@dataclass
class _Groups:
    keys: list[GroupKey] = field(default_factory=list)
    _known: dict[GroupKey, int] = field(default_factory=dict)
    _raw: dict[tuple[Any, str], int] = field(default_factory=dict)  # as the entries have them

    def index(self, entry: Mapping[str, Any], name: str) -> int:
        """Return the index of an entry's group."""
        group = entry.get("process_group")
        raw = (group, name) if type(group) is tuple else None
        try:
            if raw is not None and raw in self._raw:
                return self._raw[raw]
        except TypeError:
            raw = None  # the names are not texts
        both = group if isinstance(group, (tuple, list)) and len(group) == 2 else None
        named = both or (group if isinstance(group, str) else entry.get("pg_id", ""), "")
        key = _text(named[0]), _text(named[1]), name.partition(":")[0]
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = len(self.keys)
            self.keys.append(key)
        if raw is not None:
            self._raw[raw] = number
        return number


@dataclass
class _Sites:
    """Call sites; index 0 stands for one that is not known."""

    sites: list[CallSite] = field(default_factory=lambda: [CallSite("", 0, "", "")])
    _known: dict[tuple[int, ...], int] = field(default_factory=dict)
    _numbers: dict[CallSite, int] = field(default_factory=dict)

    def index(self, frames: Any) -> int:
        """Return the index of the nearest frame outside torch."""
        if not isinstance(frames, (list, tuple)) or not frames:
            return 0
        # Stacks of one line share their frames, which live as long as the entries do.
        key = tuple(map(id, frames[:_MOST_FRAMES]))
        number = self._known.get(key)
        if number is None:
            site = _site(frames)
            number = 0
            if site is not None:
                number = self._numbers.setdefault(site, len(self.sites))
                if number == len(self.sites):
                    self.sites.append(site)
            self._known[key] = number
        return number


def _site(frames: Sequence[Any]) -> CallSite | None:
    api = ""
    for frame in frames[:_MOST_FRAMES]:
        if not isinstance(frame, dict):
            return None
        file, name = _text(frame.get("filename")), _text(frame.get("name"))
        if not _LIBRARY.search(file):
            return CallSite(file, min(_int(frame.get("line")), (1 << 31) - 1), name, api)
        if name not in _WRAPPERS:
            api = name
    return None


def _values(entries: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """Return the values of a field; None where it is absent."""
    try:
        return list(map(itemgetter(name), entries))
    except KeyError:
        return [entry.get(name) for entry in entries]


def _column(entries: Sequence[Mapping[str, Any]], name: str) -> npt.NDArray[np.int64]:
    """Return the values of a field; 0 if a value is absent or no sound number."""
    values = _values(entries, name)
    types = set(map(type, values))
    if types <= {type(None)}:
        return np.zeros(len(values), np.int64)
    try:
        if types == {int}:
            return np.array(values, np.int64).clip(0, _LARGEST)
    except OverflowError:
        pass
    return np.array([0 if value is None else _int(value) for value in values], np.int64)


def _int(value: Any) -> int:
    """Return a whole number that is not negative; 0 for everything else. JSON has some as texts."""
    if type(value) is int:
        return min(max(value, 0), _LARGEST)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
        return int(value)
    return 0


def _state(value: Any) -> int:
    return _STATES.get(value, _ENQUEUED) if type(value) is str else _ENQUEUED


def _duration(value: Any) -> float:
    if value is None:
        return math.nan
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 1e12 else math.nan


def _text(value: Any) -> str:
    """Return a name; a number as digits, and anything else as nothing."""
    if isinstance(value, str):
        short = value[:_MOST_TEXT]
        return short if short.isascii() else short.encode("utf-8", "replace").decode()
    return str(value) if type(value) is int and abs(value) < _LARGEST else ""
