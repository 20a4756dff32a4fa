"""One dump for each rank, as PyTorch's Flight Recorder writes them.

torch's ``torchfrtrace`` reads them, and so does rankcall: the verdict is that of the run. A dump
has no place for roots, reduce ops, splits and tags, nor for how a process ended. Sizes are those of
the first tensor, or the number of all elements if the op has several.

Source of the format: torch's ``FlightRecorderDetail.hpp``, and dumps that torch wrote.
"""

from __future__ import annotations

import json
import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rankcall.analysis.clocks import RunClocks, align
from rankcall.files import make_output_folder, new_file
from rankcall.imports.dumps.records import TORCH_DTYPES
from rankcall.record import (
    DTYPES,
    FLAG_ABANDONED,
    FLAG_DEVICE,
    KINDS,
    OPS,
    STATUSES,
    has_duration,
)
from rankcall.ring.reader import Ring
from rankcall.ring.tables import UNKNOWN_GROUP, CallSite, Group
from rankcall.run.load import Progress, Run

Object = dict[str, Any]

_VERSION = "2.10"
_PREFIX = "nccl_trace_rank_"  # if all names begin with it, torchfrtrace needs no option
_P2P = KINDS.index("p2p")
_STARTED, _COMPLETED = STATUSES.index("started"), STATUSES.index("completed")
_BACKENDS = ("nccl", "gloo", "xccl", "rccl", "hccl")  # that torchfrtrace knows
_NAMES = {  # ours -> torch's, if they differ
    "barrier": "all_reduce_barrier",
    "unknown": "coalesced",
}
_FLAT = {"all_gather": "_all_gather_base", "reduce_scatter": "_reduce_scatter_base"}
_API_FILE = "torch/distributed/distributed_c10d.py"


def write_dumps(
    run: Run, folder: Path, progress: Progress | None = None, *, as_json: bool = False
) -> None:
    """Write a dump for each rank into a folder, of the rank's last attempt.

    A file gets the time at which its rank was last seen: readers take it as that of the dump.

    Args:
        run: The run.
        folder: Where to write; it is made if it is missing.
        progress: Called with (rings written, all rings) after each ring.
        as_json: Write JSON instead of pickles.
    """
    make_output_folder(folder)
    clocks = align(run)
    last: dict[int, int] = {}
    for head in run.heads:
        last[head.header.rank] = max(last.get(head.header.rank, 0), head.header.attempt)
    for ring in run.iter_rings(progress):
        header = ring.header
        if header.attempt != last[header.rank]:
            continue
        dump = dump_of(ring, clocks)
        path = folder / f"{_PREFIX}{header.rank}{'.json' if as_json else ''}"
        # Protocol 2 is that of torch's own pickler, which writes the dumps that readers expect.
        raw = json.dumps(dump).encode() if as_json else pickle.dumps(dump, protocol=2)
        with new_file(path) as out:
            out.write(raw)
        seen = max(header.last_sign_epoch_ns, 0)
        os.utime(path, ns=(seen, seen))


def dump_of(ring: Ring, clocks: RunClocks) -> Object:
    """Return what Flight Recorder would have written for a ring."""
    names = _names(ring)
    entries = _entries(ring, clocks, names)
    config: dict[str, Object] = {}
    for number, group in ring.tables.groups.items():
        name = names[number]
        ranks = "[" + ", ".join(map(str, group.ranks)) + "]"
        config[name] = {"name": name, "desc": _description(group), "ranks": ranks}
    return {
        "version": _VERSION,
        "comm_lib_version": "",
        "host_name": ring.header.host,
        "pg_config": config,
        "pg_status": _status(ring),
        "entries": entries,
    }


def _names(ring: Ring) -> dict[int, str]:
    """Return a name for each group; a later group of the same name gets its epoch as well."""
    used = Counter(group.name for group in ring.tables.groups.values())
    return {
        number: group.name if used[group.name] == 1 else group.label
        for number, group in ring.tables.groups.items()
    }


def _description(group: Group) -> str:
    if not group.description and group.name == "0":
        return "default_pg"
    return group.description or "undefined"


def _status(ring: Ring) -> dict[str, dict[str, int]]:
    """Return the last collective of each group that was issued, that began and that ended."""
    records, by_group = ring.records, {}
    collectives = records["kind"] != _P2P
    for number in np.unique(records["group"][collectives]).tolist():
        rows = records[collectives & (records["group"] == number)]
        seq, status = rows["seq"].astype(np.int64), rows["status"]
        by_group[str(number)] = {
            "last_enqueued_collective": int(seq.max(initial=-1)),
            "last_started_collective": int(seq[status >= _STARTED].max(initial=-1)),
            "last_completed_collective": int(seq[status == _COMPLETED].max(initial=-1)),
        }
    return by_group


def _entries(ring: Ring, clocks: RunClocks, names: dict[int, str]) -> list[Object]:
    records, groups = ring.records, ring.tables.groups
    created, started, completed = _times(ring, clocks)
    frames = {number: _frames(site) for number, site in ring.tables.sites.items()}
    messages: Counter[int] = Counter()
    ops: Counter[int] = Counter()
    entries = []
    for place, record in enumerate(records):
        number = int(record["group"])
        group = groups.get(number, UNKNOWN_GROUP)
        is_p2p = bool(record["kind"] == _P2P)
        messages[number] += is_p2p
        ops[number] += 1
        state = _state(record)
        entry: Object = {
            "record_id": ring.dropped + place,
            "pg_id": number,
            "process_group": (names.get(number, group.name), _description(group)),
            "thread_name": "",
            "thread_id": str(int(record["thread"])),
            "collective_seq_id": 0 if is_p2p else int(record["seq"]),
            "p2p_seq_id": messages[number],
            "op_id": ops[number],
            "profiling_name": _profiling_name(record, group, ring.header.rank),
            "time_created_ns": int(created[place]),
            **_sizes(record),
            "state": state,
            "time_discovered_started_ns": int(started[place]) or None,
            "time_discovered_completed_ns": int(completed[place]) or None,
            "retired": state == "completed",
            "timeout_ms": 0,
            "is_p2p": is_p2p,
            "frames": frames.get(int(record["call_site"]), []),
        }
        if not np.isnan(record["device_ms"]):
            entry["duration_ms"] = float(record["device_ms"])
        entries.append(entry)
    return entries


def _times(ring: Ring, clocks: RunClocks) -> tuple[npt.NDArray[np.int64], ...]:
    """Return when each op was issued, began and ended, in epoch ns; 0: not known."""
    records = ring.records
    created, started, completed = (
        clocks.epoch_ns(ring.header, np.ascontiguousarray(records[name]))
        for name in ("enqueued_ns", "started_ns", "completed_ns")
    )
    timed = has_duration(records["flags"], records["device_ms"])
    on_device = records["flags"] & FLAG_DEVICE != 0
    started = np.where(on_device & ~timed, 0, started)
    completed = np.where(records["status"] == _COMPLETED, completed, 0)
    return created, started, completed


def _state(record: Any) -> str:
    """Return Flight Recorder's state: a call that failed was never completed."""
    if record["status"] == _COMPLETED or record["flags"] & FLAG_ABANDONED:
        return "completed"
    return "started" if record["status"] == _STARTED else "scheduled"


def _profiling_name(record: Any, group: Group, rank: int) -> str:
    known = group.backend.lower() if group.backend.lower() in _BACKENDS else ""
    backend = known or ("nccl" if record["flags"] & FLAG_DEVICE else "gloo")
    op = OPS[int(record["op"])]
    if op in ("send", "recv"):
        own = group.ranks.index(rank) if rank in group.ranks else 0
        arrow = "->" if op == "send" else "<-"
        return f"{backend}:{op} {own}{arrow}{max(int(record['peer']), 0)}"
    if int(record["tensors"]) <= 1:
        op = _FLAT.get(op, op)
    return f"{backend}:{_NAMES.get(op, op)}"


def _sizes(record: Any) -> Object:
    """Return the sizes and dtypes of the tensors that an op reads and writes."""
    name, width = TORCH_DTYPES.get(DTYPES[int(record["dtype"])], ("Byte", 1))
    shape = [int(size) for size in record["shape"][: int(record["ndim"])]]
    inputs = _size(shape, int(record["in_bytes"]) // width)
    outputs = _size(shape, int(record["out_bytes"]) // width)
    return {
        "input_sizes": inputs,
        "input_dtypes": [name] * len(inputs),
        "output_sizes": outputs,
        "output_dtypes": [name] * len(outputs),
    }


def _size(shape: list[int], elements: int) -> list[list[int]]:
    if not elements:
        return []
    return [shape] if shape and int(np.prod(shape, dtype=object)) == elements else [[elements]]


def _frames(site: CallSite) -> list[Object]:
    own = {"name": site.function, "filename": site.file, "line": site.line}
    api = {"name": site.api, "filename": _API_FILE, "line": 0}
    frames = [api, own] if site.api else [own]
    if site.user is not None:
        frames.append(
            {"name": site.user.function, "filename": site.user.file, "line": site.user.line}
        )
    return frames
