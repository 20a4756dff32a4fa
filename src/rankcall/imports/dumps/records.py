"""From the entries of one Flight Recorder dump to records.

An entry has the names of its backend and op, the sizes and dtypes of its tensors, its state and the
Python stack that issued it. It does not have the root, the reduce op, tags or splits. Times are of
the wall clock. Whether an op has ended is known from its state on NCCL. Gloo's entries stay
``scheduled`` and are only marked as retired when the op has ended, well or not; and if torch is
late, some are not even marked. For back ends that do not record themselves, torch does: it notes
the start of an op only together with its end, and retires an op at once, when it is issued, if the
back end does not tell of ends.
"""

from __future__ import annotations

import contextlib
import marshal
import math
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from rankcall.record import (
    DEVICE_TYPES,
    DTYPES,
    FLAG_DEVICE,
    FLAG_NOT_STARTED,
    KINDS,
    MAX_DIMS,
    OPS,
    RECORD,
    STATUSES,
    op_of_variant,
    take_rows,
)
from rankcall.ring.tables import CallSite, UserLine
from rankcall.whole_numbers import whole_number

Records = npt.NDArray[Any]
GroupKey = tuple[str, str, str]  # name, description, backend
Entry = tuple[Any, Any, Any, Any, Any]  # name, input sizes, output sizes, input and output dtypes
T = TypeVar("T")

_LARGEST = 1 << 62
_AT_ISSUE_NS = 100_000  # an end that is noted so soon after the issue was not seen on a device
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
# Our names, with torch's and the bytes of an element.
TORCH_DTYPES = {ours: (torchs, width) for torchs, (ours, width) in _DTYPES.items()}
_SHAPE = ("input_sizes", "output_sizes", "input_dtypes", "output_dtypes")
_FIELDS = (
    *("profiling_name", *_SHAPE, "process_group", "pg_id", "frames", "is_p2p", "state", "retired"),
    *("collective_seq_id", "seq_id", "p2p_seq_id", "record_id", "timeout_ms", "duration_ms"),
    *("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns"),
)
_ON_CPU = ("gloo", "mpi", "ucc", "fake")
_MESSAGE = re.compile(r"(send|recv) (\d{1,7})(->|<-)(\d{1,7})")
# Frames of libraries that stand between the user's line and the op.
_LIBRARY = re.compile(
    r"(?:^|/)(?:torch|rankcall)/|(?:^|/)(?:typing_extensions|contextlib|functools)\.py$|^<|\.cpp$"
)
_INSTALLED = re.compile(r"(?:site|dist)-packages/|(?:^|/)lib/python3[.\d]*/")
_WRAPPERS = ("wrapper", "inner", "_fn", "decorate_context")


@dataclass
class DumpRecords:
    """The records of one dump, in issue order.

    ``records["group"]`` and ``["call_site"]`` are indexes into ``groups`` and ``sites``. ``ended``
    marks the records whose end is known only from the retired flag: they may have failed.
    ``endless`` marks those of back ends that do not tell of ends at all.
    """

    records: Records
    groups: list[GroupKey]
    sites: list[CallSite]
    ended: npt.NDArray[np.bool_]
    endless: npt.NDArray[np.bool_]
    lost: int  # entries that were overwritten before the dump
    last_ns: int  # the newest time in it; 0: none
    on_cpu: npt.NDArray[np.bool_]
    timeout_ns: int  # the longest timeout of its entries


def _shapes(entries: Sequence[Entry]) -> tuple[Records, npt.NDArray[np.intp]]:
    """Return a record for each different (op, sizes, dtypes), and which of them each entry has.

    The records are without times and states.

    Args:
        entries: For each entry: the name, the input and output sizes, the input and output dtypes.
    """
    keys: list[bytes] = []
    bytes_left = _MOST_SIZES_BYTES
    written = map(marshal.dumps, entries)  # equal bytes stand for equal values, and make fast keys
    while len(keys) < len(entries):
        try:
            for key in written:
                keys.append(key)
                bytes_left -= len(key)
                if bytes_left < 0:
                    # A small file can refer to one large list from many entries.
                    keys += [b""] * (len(entries) - len(keys))
                    break
        except ValueError:
            keys.append(b"")  # nested too deeply
    first = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
    rows = [
        _shape(*entries[at]) if _is_sound(key, entries[at]) else _unknown_shape(entries[at][0])
        for key, at in first.items()
    ]
    numbers = {key: number for number, key in enumerate(first)}
    row_of_entry = np.fromiter(map(numbers.__getitem__, keys), np.intp, len(keys))
    return np.concatenate([np.zeros(0, RECORD), *rows]), row_of_entry


def _is_sound(key: bytes, entry: Entry) -> bool:
    return 0 < len(key) < _MOST_KEY_BYTES and _are_tensors(*entry[1:])


def _unknown_shape(name: Any) -> Records:
    return _shape(name, (), (), (), ())


def _are_tensors(inputs: Any, outputs: Any, in_dtypes: Any, out_dtypes: Any) -> bool:
    """Tell whether sizes and dtypes have the form that Flight Recorder gives them."""
    return all(isinstance(dtypes, (list, tuple)) for dtypes in (in_dtypes, out_dtypes)) and all(
        isinstance(sizes, (list, tuple)) and all(isinstance(size, (list, tuple)) for size in sizes)
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
    dtype = next((text for text in (*in_dtypes, *out_dtypes) if isinstance(text, str)), "")
    record["dtype"] = DTYPES.index(_DTYPES.get(dtype, ("unknown", 0))[0])
    first = next(iter(inputs or outputs), ())
    record["ndim"] = min(len(first), MAX_DIMS)
    record["shape"][: record["ndim"]] = [_int(length) for length in first[:MAX_DIMS]]
    record["tensors"] = min(len(inputs), 65535)
    if op == "all_to_all":  # a dump does not tell whether it has splits
        sizes = [
            [[_int(length) for length in size] for size in sizes] for sizes in (inputs, outputs)
        ]
        record["shape_hash"] = zlib.crc32(repr(sizes).encode()) or 1
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
        total += math.prod(min(_int(length), _LARGEST) for length in size[:16]) * width
    return min(max(total, 0), _LARGEST)


def records_of(entries: Sequence[dict[str, Any]]) -> DumpRecords:
    """Return the records of a dump's entries."""
    columns = _columns(entries)
    sites, groups = _Sites(), _Groups()
    names = _each(_text, columns["profiling_name"])
    named = _Named(names)
    sizes = [[value or () for value in columns[name]] for name in _SHAPE]
    table, row_of_entry = _shapes(list(zip(names, *sizes, strict=True)))
    records = take_rows(table, row_of_entry)
    records["group"] = groups.indexes(columns["process_group"], columns["pg_id"], names)
    records["call_site"] = sites.indexes(columns["frames"])
    is_p2p = np.array(_each(_is_true, columns["is_p2p"]), bool)
    records["kind"][is_p2p] = _P2P
    collective = _numbers(columns["collective_seq_id"])
    if not collective.any():
        # The name in the oldest dumps.
        collective = _numbers(columns["seq_id"])
    messages = _numbers(columns["p2p_seq_id"])
    numbers = _numbers(columns["record_id"])
    lost = int(numbers[0]) if len(numbers) else 0
    ends_batch = named.are(lambda name: name.endswith("coalesced"))
    records["kind"][_ends_of_batches(records, ends_batch, collective, messages, lost > 0)] = _P2P
    records["seq"] = np.where(records["kind"] == _P2P, messages, collective)
    records["tag"] = 0
    created = _numbers(columns["time_created_ns"])
    records["enqueued_ns"] = created
    records["started_ns"] = _numbers(columns["time_discovered_started_ns"])
    completed = _numbers(columns["time_discovered_completed_ns"])
    records["completed_ns"] = completed
    records["device_ms"] = _each(_duration, columns["duration_ms"])
    status = np.array(_each(_state, columns["state"]), np.uint8)
    status[completed > 0] = _COMPLETED
    retired = np.array(_each(_is_true, columns["retired"]), bool)
    on_cpu = records["device_type"] == DEVICE_TYPES.index("cpu")
    endless = _without_ends(retired, status, named)
    by_nccl2 = named.are(lambda name: name.startswith("nccl2:"))
    unseen = by_nccl2 & _ends_at_issue(records, created, completed)
    status[unseen], records["completed_ns"][unseen] = _ENQUEUED, 0
    endless |= unseen
    ended = retired & on_cpu & (status == _ENQUEUED) & ~endless
    status[ended] = _COMPLETED
    records["status"] = status
    records["completed_ns"][on_cpu] = 0
    # With TORCH_NCCL_ENABLE_TIMING=1, entries have the times of their starts. The messages of a
    # batch get that of their batch. A start that is always noted with the end tells nothing: an op
    # without it may have started.
    if not ((records["started_ns"] > 0) & (records["started_ns"] != completed)).any():
        records["started_ns"] = 0
    if records["started_ns"].any():
        waits = (status == _ENQUEUED) & (records["started_ns"] == 0) & ~on_cpu
        records["flags"][waits] |= FLAG_NOT_STARTED
    merged, kept = _without_batches(records, ends_batch)
    times = [int(column.max()) for column in (created, completed) if len(column)]
    return DumpRecords(
        take_rows(merged, kept),
        groups.keys,
        sites.sites,
        ended[kept],
        endless[kept],
        min(lost, _LARGEST >> 4),
        max(times, default=0),
        on_cpu[kept],
        int(_numbers(columns["timeout_ms"]).clip(0, 10**9).max(initial=0)) * 1_000_000,
    )


class _Named:
    """The entries by their names, of which a dump has few."""

    def __init__(self, names: Sequence[str]) -> None:
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        self._different = list(numbers)
        self._number = np.fromiter(map(numbers.__getitem__, names), np.intp, len(names))

    def are(self, predicate: Callable[[str], bool]) -> npt.NDArray[np.bool_]:
        """Return of which entries something is true that their names tell."""
        return np.array([*map(predicate, self._different)], bool)[self._number]

    def backends(self) -> tuple[list[str], npt.NDArray[np.intp]]:
        """Return the names of the back ends, and of each entry the number of its own."""
        mine = list(map(_backend, self._different))
        numbers = {name: number for number, name in enumerate(dict.fromkeys(mine))}
        return list(numbers), np.array([numbers[name] for name in mine], np.intp)[self._number]


def _backend(name: str) -> str:
    return name.partition(":")[0]


def _ends_at_issue(
    records: Records, created: npt.NDArray[np.int64], completed: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Tell which sends and receives were noted as complete when they were issued.

    ProcessGroupNCCL2 of torch 2.15 does so with those of a batch. It looks at its devices once a
    second, so an end that it has seen is hardly ever noted so soon.
    """
    messages: npt.NDArray[np.bool_] = records["kind"] == _P2P
    return messages & (completed > 0) & (completed - created < _AT_ISSUE_NS)


def _without_ends(
    retired: npt.NDArray[np.bool_], status: npt.NDArray[np.uint8], named: _Named
) -> npt.NDArray[np.bool_]:
    """Tell which entries are of a back end whose ops are retired as soon as they are issued.

    Not one op of such a back end is noted as started or completed. Gloo's are not, either, but Gloo
    retires an op when it has ended.
    """
    backends, number = named.backends()
    has_noted = np.bincount(number, status != _ENQUEUED, len(backends)) > 0
    is_gloo = np.array([backend == "gloo" for backend in backends], bool)
    is_endless: npt.NDArray[np.bool_] = retired & ~(has_noted | is_gloo)[number]
    return is_endless


def _ends_of_batches(
    records: Records,
    ends_batch: npt.NDArray[np.bool_],
    collective: npt.NDArray[np.int64],
    messages: npt.NDArray[np.int64],
    lost: bool,
) -> npt.NDArray[np.bool_]:
    """Tell which entries stand for a whole batch of sends and receives.

    Such an entry is named ``nccl:coalesced``, as the one of coalesced collectives is, and torch
    2.13 to 2.15 does not mark it as p2p. But it repeats both numbers of the message before it,
    where a collective has a number of its own. ``lost``: entries are missing before the first one,
    so that the messages of a group's first entry may be among them.
    """
    is_batch = np.zeros(len(records), bool)
    whole = np.flatnonzero(ends_batch & (records["op"] == 0))
    if not len(whole):
        return is_batch
    order = np.argsort(records["group"], kind="stable")
    before = np.full(len(records), -1)
    of_one_group = records["group"][order[1:]] == records["group"][order[:-1]]
    before[order[1:][of_one_group]] = order[:-1][of_one_group]
    before = before[whole]
    repeats = (records["kind"][before] == _P2P) & (messages[before] == messages[whole])
    repeats &= collective[before] == collective[whole]
    is_batch[whole] = np.where(before >= 0, repeats, lost | (collective[whole] == 0))
    return is_batch


def _without_batches(
    records: Records, ends_batch: npt.NDArray[np.bool_]
) -> tuple[Records, npt.NDArray[np.bool_]]:
    """Give the ops of a batch the state of their batch, and tell which records to keep.

    NCCL issues the ops of a batch together. Only the last entry, which stands for the whole batch,
    has the events that tell the state. All entries of a batch have one sequence number; those of
    other groups may lie between them, because several threads issue ops. An entry of coalesced
    collectives may be alone: then it is the collective, and its op is not known.
    """
    kept = np.ones(len(records), bool)
    order = np.argsort(records["group"], kind="stable")
    keys = np.stack([records["group"], records["kind"], records["seq"].astype(np.int64)])[:, order]
    changes = np.flatnonzero(np.any(keys[:, 1:] != keys[:, :-1], axis=0)) + 1
    begins, ends = np.append(0, changes), np.append(changes, len(records))
    # Most ops are alone, and stay as they are.
    looked_at = (ends - begins > 1) | ends_batch[order[ends - 1]] if len(records) else ()
    for begin, end in zip(begins[looked_at], ends[looked_at], strict=True) if len(records) else ():
        rows = order[begin:end]
        first, last = rows[0], rows[-1]
        whole = records["op"][last] == 0 and ends_batch[last]
        is_collective = records["kind"][first] == _COLLECTIVE
        if len(rows) < 2:
            kept[first] = not whole or is_collective
            continue
        if whole:
            for name in ("status", "started_ns", "completed_ns", "flags"):
                records[name][rows[:-1]] = records[name][last]
            kept[last] = False
        if is_collective:
            for name in ("in_bytes", "out_bytes", "message_bytes"):
                records[name][first] = min(int(records[name][rows[kept[rows]]].sum()), _LARGEST)
            kept[rows[1:]] = False
    return records, kept


@dataclass
class _Groups:
    keys: list[GroupKey] = field(default_factory=list)
    _known: dict[GroupKey, int] = field(default_factory=dict)

    def indexes(self, groups: Sequence[Any], ids: Sequence[Any], names: Sequence[str]) -> list[int]:
        """Return the index of each entry's group."""
        if set(map(type, groups)) <= {tuple}:
            pairs = list(zip(groups, names, strict=True))
            try:
                index_of = {
                    pair: self._index(pair[0], "", pair[1]) for pair in dict.fromkeys(pairs)
                }
                return [*map(index_of.__getitem__, pairs)]
            except TypeError:
                pass  # the names are not texts
        return [*map(self._index, groups, ids, names)]

    def _index(self, group: Any, number: Any, name: str) -> int:
        both = group if isinstance(group, (tuple, list)) and len(group) == 2 else None
        named = both or (group if isinstance(group, str) else number, "")
        key = _text(named[0]), _text(named[1]), name.partition(":")[0]
        index = self._known.setdefault(key, len(self.keys))
        if index == len(self.keys):
            self.keys.append(key)
        return index


@dataclass
class _Sites:
    """Call sites; index 0 stands for one that is not known."""

    sites: list[CallSite] = field(default_factory=lambda: [CallSite("", 0, "", "")])
    _known: dict[tuple[int, ...], int] = field(default_factory=dict)
    _numbers: dict[CallSite, int] = field(default_factory=dict)

    def indexes(self, stacks: Sequence[Any]) -> list[int]:
        """Return the index of the nearest frame outside torch in each stack."""
        # Stacks of one line are one list, or share their frames. All live as long as the entries.
        lists = [*map(id, stacks)]
        different = dict(zip(lists, stacks, strict=True))
        index_of = {number: self._index(frames) for number, frames in different.items()}
        return [*map(index_of.__getitem__, lists)]

    def _index(self, frames: Any) -> int:
        if not isinstance(frames, (list, tuple)) or not frames:
            return 0
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
    for number, frame in enumerate(frames[:_MOST_FRAMES]):
        if not isinstance(frame, dict):
            return None
        line = _line(frame)
        if not _LIBRARY.search(line.file):
            behind = frames[number + 1 : _MOST_FRAMES] if _INSTALLED.search(line.file) else ()
            return CallSite(line.file, line.line, line.function, api, _user_line(behind))
        if line.function not in _WRAPPERS:
            api = line.function
    return None


def _user_line(frames: Sequence[Any]) -> UserLine | None:
    """Return the user's own line among the frames that led to a framework's."""
    for frame in frames:
        if not isinstance(frame, dict):
            return None
        line = _line(frame)
        if not _LIBRARY.search(line.file) and not _INSTALLED.search(line.file):
            return line
    return None


def _line(frame: dict[str, Any]) -> UserLine:
    file, name = _text(frame.get("filename")), _text(frame.get("name"))
    return UserLine(file, min(_int(frame.get("line")), (1 << 31) - 1), name)


def _columns(entries: Sequence[dict[str, Any]]) -> dict[str, Sequence[Any]]:
    """Return the values of each of ``_FIELDS``; None for an absent field."""
    first: dict[str, Any] = entries[0] if entries else {}
    fields = [name for name in _FIELDS if name in first]
    if len(fields) > 1 and set(map(len, entries)) == {len(first)}:
        # Usually all entries have the same fields: one look-up for all of an entry.
        with contextlib.suppress(KeyError):
            values = zip(*map(itemgetter(*fields), entries), strict=True)
            columns: dict[str, Sequence[Any]] = dict(zip(fields, values, strict=True))
            missing = (None,) * len(entries)
            return {name: columns.get(name, missing) for name in _FIELDS}
    return {name: [entry.get(name) for entry in entries] for name in _FIELDS}


def _each(function: Callable[[Any], T], values: Sequence[Any]) -> list[T]:
    """Apply a function to all values, once to those that are equal."""
    try:
        result_of = {value: function(value) for value in set(values)}
    except TypeError:
        return [*map(function, values)]  # one of them is a list, or a dict
    return [*map(result_of.__getitem__, values)]


def _numbers(values: Sequence[Any]) -> npt.NDArray[np.int64]:
    """Return the values of a field; 0 if a value is absent or no sound number."""
    types = set(map(type, values))
    try:
        if types <= {int}:
            return np.fromiter(values, np.int64, len(values)).clip(0, _LARGEST)
        if types <= {int, type(None)}:
            known = [value or 0 for value in values]
            return np.fromiter(known, np.int64, len(known)).clip(0, _LARGEST)
    except OverflowError:
        pass
    return np.array([_int(value) for value in values], np.int64)


def _int(value: Any) -> int:
    """Return a whole number that is not negative; 0 for everything else. JSON has some as texts."""
    if type(value) is int:
        return min(max(value, 0), _LARGEST)
    return (whole_number(value, most=_LARGEST) or 0) if isinstance(value, str) else 0


def _is_true(value: Any) -> bool:
    return value is True


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
