"""One trace for each rank, in the format of torch.profiler, for the tools that read it.

Each op is a ``record_param_comms`` event at the time of its issue. If its duration is known, it is
also a kernel with a name like NCCL's, on a stream of its own for each group, because tools such as
HolisticTraceAnalysis and TraceLens look at kernels. For a rank on Gloo this kernel is the time from
the start to the end of the op on the CPU. An op on a device without device times, and an op that
has not ended, has no kernel. Times of all ranks are on one clock.

Source of the names: ``torch/csrc/profiler/util.h``, and traces that torch.profiler wrote.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rankcall.analysis.clocks import RunClocks, align
from rankcall.export.perfetto_tracks import track_numbers
from rankcall.files import make_output_folder, new_file
from rankcall.imports.dumps.records import TORCH_DTYPES
from rankcall.record import (
    DTYPES,
    OPS,
    REDUCE_OPS,
    STATUSES,
    has_duration,
)
from rankcall.ring.reader import Ring
from rankcall.ring.tables import UNKNOWN_GROUP, Group
from rankcall.run.load import Progress, Run

Object = dict[str, Any]

Ints = npt.NDArray[np.int64]

_COMPLETED = STATUSES.index("completed")
_FIRST_STREAM = 7  # torch's first stream from its pool; 0 is the default stream
# Our op -> the name of NCCL's kernel.
_KERNELS = {
    "all_reduce": "AllReduce",
    "barrier": "AllReduce",
    "all_gather": "AllGather",
    "gather": "SendRecv",
    "scatter": "SendRecv",
    "all_to_all": "SendRecv",
    "send": "SendRecv",
    "recv": "SendRecv",
    "reduce_scatter": "ReduceScatter",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
}


def write_kineto(run: Run, folder: Path, progress: Progress | None = None) -> None:
    """Write a compressed trace for each rank into a folder.

    Args:
        run: The run. A restart of the job is a file of its own.
        folder: Where to write; it is made if it is missing.
        progress: Called with (rings written, all rings) after each ring.
    """
    make_output_folder(folder)
    clocks = align(run)
    base = min((head.header.anchor_epoch_ns for head in run.heads), default=0)
    several = len({head.header.attempt for head in run.heads}) > 1
    for ring in run.iter_rings(progress):
        header = ring.header
        attempt = f"_attempt_{header.attempt}" if several else ""
        path = folder / f"rank_{header.rank}{attempt}.pt.trace.json.gz"
        with new_file(path) as out, gzip.open(out, "wb", compresslevel=3) as packed:
            _write(ring, clocks, base, packed)


def _write(ring: Ring, clocks: RunClocks, base: int, out: Any) -> None:
    """Write one trace, event by event."""
    head = {
        "schemaVersion": 1,
        "deviceProperties": [],
        "distributedInfo": _job(ring),
        "baseTimeNanoseconds": base,
        "displayTimeUnit": "ms",
        "traceName": f"rank {ring.header.rank}",
    }
    text = json.dumps(head)
    out.write(text[:-1].encode() + b', "traceEvents": [\n')
    between = b""
    for event in _events(ring, clocks, base):
        out.write(between + json.dumps(event).encode())
        between = b",\n"
    out.write(b"\n]}\n")


def _job(ring: Ring) -> Object:
    groups = [
        {
            "pg_name": group.name,
            "pg_desc": group.description or "undefined",
            "backend_config": group.backend,
            "pg_size": len(group.ranks),
            "ranks": list(group.ranks),
        }
        for group in ring.tables.groups.values()
    ]
    return {
        "backend": groups[0]["backend_config"] if groups else "",
        "rank": ring.header.rank,
        "world_size": ring.header.world_size,
        "pg_count": len(groups),
        "pg_config": groups,
    }


def _events(ring: Ring, clocks: RunClocks, base: int) -> Iterator[Object]:
    records, header = ring.records, ring.header
    issued = _epoch(ring, clocks, "enqueued_ns")
    began, ended = _epoch(ring, clocks, "started_ns"), _epoch(ring, clocks, "completed_ns")
    began = np.where(began == 0, issued, began)
    timed = has_duration(records["flags"], records["device_ms"])
    timed = timed & (ended > 0) & (records["status"] == _COMPLETED)
    ended = np.maximum(ended, began)
    streams = _streams(ring, began, ended, timed)
    yield _name(header.pid, f"python (rank {header.rank}, {header.host})")
    for place, record in enumerate(records):
        group = ring.tables.groups.get(int(record["group"]), UNKNOWN_GROUP)
        about = _arguments(ring, record, group)
        number = place + 1
        ids = {"External id": number, "Record function id": 0}
        yield {
            "ph": "X",
            "cat": "cpu_op",
            "name": "record_param_comms",
            "pid": header.pid,
            "tid": int(record["thread"]),
            "ts": (int(issued[place]) - base) / 1e3,
            "dur": 0,
            "args": {**ids, **about},
        }
        if not timed[place]:
            continue
        stream = int(streams[place])
        yield {
            "ph": "X",
            "cat": "kernel",
            "name": _kernel(record),
            "pid": 0,
            "tid": stream,
            "ts": (int(began[place]) - base) / 1e3,
            "dur": int(ended[place] - began[place]) / 1e3,
            "args": {
                "External id": number,
                "correlation": number,
                "device": 0,
                "stream": stream,
                **about,
            },
        }


def _epoch(ring: Ring, clocks: RunClocks, name: str) -> Ints:
    return clocks.epoch_ns(ring.header, np.ascontiguousarray(ring.records[name]))


def _streams(ring: Ring, began: Ints, ended: Ints, timed: npt.NDArray[np.bool_]) -> Ints:
    """Return a stream for each op: one for each group, and more if its ops overlap."""
    streams = np.zeros(len(ring.records), np.int64)
    first = _FIRST_STREAM
    for number in np.unique(ring.records["group"][timed]):
        rows = np.flatnonzero(timed & (ring.records["group"] == number))
        rows = rows[np.argsort(began[rows], kind="stable")]
        streams[rows] = track_numbers(began[rows], ended[rows]) + first
        first = int(streams[rows].max()) + 1
    return streams


def _name(pid: int, name: str) -> Object:
    return {
        "ph": "M",
        "name": "process_name",
        "pid": pid,
        "tid": 0,
        "ts": 0,
        "args": {"name": name},
    }


def _kernel(record: Any) -> str:
    op = OPS[int(record["op"])]
    reduce_op = REDUCE_OPS[int(record["reduce_op"])]
    reduced = f"_{reduce_op.title()}" if record["reduce_op"] else ""
    return f"ncclDevKernel_{_KERNELS.get(op, op)}{reduced}"


def _arguments(ring: Ring, record: Any, group: Group) -> Object:
    """Return what torch.profiler tells of an op."""
    name, width = TORCH_DTYPES.get(DTYPES[int(record["dtype"])], ("Byte", 1))
    rank = ring.header.rank
    variant = ring.tables.strings.get(int(record["variant"]), "").removeprefix("c10d::")
    about: Object = {
        "Collective name": variant.strip("_") or OPS[int(record["op"])].replace("_", ""),
        "dtype": name,
        "In msg nelems": int(record["in_bytes"]) // width,
        "Out msg nelems": int(record["out_bytes"]) // width,
        "Group size": len(group.ranks),
        "Process Group Name": group.name,
        "Process Group Description": group.description or "undefined",
        "Process Group Ranks": "[" + ", ".join(map(str, group.ranks)) + "]",
        "Rank": group.ranks.index(rank) if rank in group.ranks else -1,
        "Seq": int(record["seq"]),
        "Is asynchronized op": int(record["async_op"]) == 1,
    }
    peer = int(record["peer"])
    if 0 <= peer < len(group.ranks):
        ends = (rank, group.ranks[peer])
        source, target = ends if OPS[int(record["op"])] == "send" else ends[::-1]
        about["Src Rank"], about["Dst Rank"] = source, target
    site = ring.tables.sites.get(int(record["call_site"]))
    if site is not None and site.line:
        about["Call site"] = str(site)
        if site.user is not None:
            about["User line"] = site.user_line
    return about
