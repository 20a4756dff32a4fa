"""Small runs made of calls that a test lists, written as real rings."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rankcall.record import DTYPES, FLAG_DEVICE, OPS, RECORD, REDUCE_OPS, STATUSES
from rankcall.ring.layout import offset_of
from rankcall.ring.spec import RingSpec, write_ring
from rankcall.ring.tables import CallSite, Group, UserLine
from rankcall.run.paths import ring_name

MS = 1_000_000
START = 1_000 * MS


PAIR = Group("0", 0, "gloo", "default_pg", (0, 1))


@dataclass(frozen=True)
class Call:
    """One record. Times are in ns after START; an unfinished call has no ``end``."""

    rank: int
    seq: int
    at: int
    end: int | None
    op: str = "all_reduce"
    bytes: int = 4096
    in_bytes: int | None = None
    out_bytes: int | None = None
    group: Group = PAIR
    root: int = -1
    peer: int = -1
    tag: int = 0
    step: int = 0
    line: int = 1
    file: str = "train.py"
    user_line: int = 0  # of main.py, if ``line`` is a framework's
    code: str = ""  # the source line of the call site
    started: int | None = None
    status: str = "completed"
    error: str = ""
    flags: int = 0
    device_ms: float = math.nan
    attempt: int = 0
    life: int = 0
    dtype: str = "float32"
    reduce_op: str = "none"
    shape_hash: int = 0  # of an all_to_all: not 0 if it has split sizes
    api: str = ""
    thread: int = 0
    async_op: int = 0


def write_world(
    folder: Path,
    calls: Iterable[Call],
    *,
    world_size: int | None = None,
    hosts: dict[int, str] | None = None,
    offsets: dict[str, int] | None = None,
    ranks: Iterable[int] | None = None,
    closed: Callable[[int], bool] = lambda rank: True,
    left: Collection[int] = (),
    aborted: Collection[int] = (),
    failures: dict[int, str] | None = None,
    beats: dict[int, tuple[int, int]] | None = None,
    capacities: dict[int, int] | None = None,
    devices_known: dict[int, int] | None = None,
    closed_at: dict[int, int] | None = None,
) -> Path:
    """Write one ring for each (rank, attempt, life) that has calls, and for each of ``ranks``.

    The ranks in ``left`` have come to the end of their program, and the watchers of those in
    ``aborted`` have ended them. ``failures`` has the exceptions that ended ranks, ``beats`` the
    native and the Python heartbeat in ns after START, ``capacities`` the number of records
    that a rank's ring holds, if it is to overwrite some, and ``devices_known`` the time in ns after
    START until which the ends on its devices are known. Without ``closed``, all are closed, each
    with its last record, but for those of ``closed_at``: ns after START.
    """
    (folder / "rings").mkdir(parents=True)
    by_ring: dict[tuple[int, int, int], list[Call]] = {(r, 0, 0): [] for r in ranks or ()}
    for call in calls:
        by_ring.setdefault((call.rank, call.attempt, call.life), []).append(call)
    size = world_size or 1 + max((rank for rank, _, _ in by_ring), default=0)
    for (rank, attempt, life), mine in by_ring.items():
        host = (hosts or {}).get(rank, "node-a")
        spec = RingSpec(rank, size, host, attempt, pid=1000 + rank + (attempt << 20))
        shift = (offsets or {}).get(host, 0)
        spec.anchor_mono_ns = START + shift
        spec.anchor_epoch_ns = 10**18 + life * 10**12 + shift
        spec.records = np.array([_record(call, spec, shift)[0] for call in mine], RECORD)
        spec.closed, spec.left, spec.aborted = closed(rank), rank in left, rank in aborted
        if beats and rank in beats:
            spec.native_beat_ns, spec.python_beat_ns = (START + shift + at for at in beats[rank])
        name = ring_name(spec.rank, spec.attempt, spec.host, spec.pid)
        path = write_ring(folder / "rings" / name, spec, (capacities or {}).get(rank))
        if rank in (devices_known or {}):
            known_ns = START + shift + (devices_known or {})[rank]
            _write_into(path, "devices_known_ns", known_ns.to_bytes(8, "little"))
        if rank in (closed_at or {}):
            closed_ns = START + shift + (closed_at or {})[rank]
            _write_into(path, "closed_ns", closed_ns.to_bytes(8, "little"))
        if rank in (failures or {}):
            _write_into(path, "failure", (failures or {})[rank].encode())
        path.rename(path.with_suffix(f".{life}.ring"))
    return folder


def _write_into(path: Path, field: str, value: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset_of(field))
        file.write(value)


def _record(call: Call, spec: RingSpec, shift: int) -> np.ndarray:
    row = np.zeros(1, RECORD)
    p2p = call.op in ("send", "recv")
    values = {
        "seq": call.seq,
        "enqueued_ns": START + shift + call.at,
        "started_ns": _started(call, shift),
        "completed_ns": 0 if call.end is None else START + shift + call.end,
        "message_bytes": call.bytes,
        "in_bytes": call.bytes if call.in_bytes is None else call.in_bytes,
        "out_bytes": call.bytes if call.out_bytes is None else call.out_bytes,
        "op": OPS.index(call.op),
        "kind": int(p2p),
        "group": spec.group(call.group),
        "call_site": _site(call, spec),
        "variant": spec.string(f"c10d::{call.op}"),
        "root": call.root,
        "peer": call.peer,
        "tag": call.tag,
        "step": call.step,
        "status": STATUSES.index("started" if call.end is None else call.status),
        "error": spec.string(call.error) if call.error else 0,
        "flags": call.flags,
        "device_ms": call.device_ms,
        "dtype": DTYPES.index(call.dtype),
        "reduce_op": REDUCE_OPS.index(call.reduce_op),
        "shape_hash": call.shape_hash,
        "thread": call.thread,
        "async_op": call.async_op,
    }
    for name, value in values.items():
        row[name] = value
    return row


def _started(call: Call, shift: int) -> int:
    """Return when an op started: on a device, that is not known unless the test says so."""
    if call.started is None and call.flags & FLAG_DEVICE:
        return 0
    return START + shift + (call.at if call.started is None else call.started)


def _site(call: Call, spec: RingSpec) -> int:
    user = UserLine("/u/main.py", call.user_line, "main") if call.user_line else None
    site = CallSite(call.file, call.line, "step", call.api or call.op, user)
    if call.code:
        spec.line(site, call.code)
    return spec.site(site)


def together(seq: int, arrivals: list[int], end: int, group: Group, **fields: object) -> list[Call]:
    """Return one collective that all members leave at ``end``."""
    return [
        replace(Call(rank, seq, at, end, group=group), **fields)  # type: ignore[arg-type]
        for rank, at in zip(group.ranks, arrivals, strict=True)
    ]


def group_of(size: int, name: str = "0") -> Group:
    """Return a group of the first ``size`` ranks."""
    return Group(name, 0, "gloo", "default_pg", tuple(range(size)))
