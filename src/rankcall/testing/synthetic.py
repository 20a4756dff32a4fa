"""Synthetic runs: real ring files of a world of any size, with known times.

The times come from the model of a job in lock step, in one true clock, and are written in the clock
of each host. So a test knows the result that the analysis must have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rankcall.record import DTYPES, FROM_ROOT, KINDS, OPS, RECORD, STATUSES, TO_ROOT
from rankcall.ring.spec import RingSpec, write_ring
from rankcall.ring.tables import CallSite, Group
from rankcall.run.exits import Exit, note_exit
from rankcall.run.paths import create_run, ring_name
from rankcall.testing.model import OPEN, Op, Pace, Planted, plant, simulate

Times = npt.NDArray[np.int64]

_VARIANTS = {
    "all_reduce": "allreduce_",
    "all_gather": "_allgather_base_",
    "reduce_scatter": "_reduce_scatter_base_",
    "all_to_all": "alltoall_base_",
}
EPOCH_NS = 1_790_000_000_000_000_000
BOOT_NS = 5_000_000_000_000

PROGRAM = (Op(message_bytes=25 << 20), Op(message_bytes=25 << 20, line=11), Op(message_bytes=8))


@dataclass
class Synthetic:
    """The run that was written, and its true times, in ns of the true clock."""

    path: Path
    hosts: list[str]  # the host of each rank
    clock_offsets_ns: dict[str, int]
    program: list[Op]  # the ops that were issued, in order
    arrivals: Times  # [op, rank]; -1: not a member
    ends: Times  # [op, rank]; -1: not a member
    families: dict[str, list[list[int]]] = field(default_factory=dict)
    planted: tuple[Planted, ...] = ()
    over_ns: int = 0  # when the job was last seen


def synthetic_run(
    path: Path,
    ranks: int,
    collectives: int,
    *,
    hosts: int | Sequence[str] = 1,
    straggler: int | Sequence[int] | None = None,
    straggler_ms: float = 20.0,
    clock_offsets_ns: Mapping[str, int] | Sequence[int] | None = None,
    clock_drift_ppm: Sequence[float] = (),
    epoch_errors_ns: Sequence[int] = (),
    groups: Mapping[str, Sequence[Sequence[int]]] | None = None,
    program: Sequence[Op] = PROGRAM,
    per_step: int = 10,
    pace: Pace | None = None,
    capacity: int | None = None,
    attempt: int = 0,
    without_ranks: Sequence[int] = (),
    planted: Planted | Sequence[Planted] = (),
    hung_s: float = 120.0,
    seed: int = 0,
) -> Synthetic:
    """Write the rings of a run that repeats ``program`` until it has issued ``collectives`` ops.

    Args:
        path: The run directory to write.
        ranks: The number of ranks.
        collectives: The number of ops.
        hosts: The number of hosts, or their names. Each host has a block of consecutive ranks.
        straggler: The rank or ranks that compute ``straggler_ms`` longer before each op.
        straggler_ms: See ``straggler``.
        clock_offsets_ns: Per host, how far both of its clocks are ahead of the true one.
        clock_drift_ppm: Per host, how fast its clock runs away from the true one.
        epoch_errors_ns: Per host, the error of its epoch clock alone.
        groups: Further families of disjoint groups.
        program: The ops of one repetition.
        per_step: The number of ops per optimizer step, or 0 for a job without an optimizer.
        pace: How long computing and transfers take.
        capacity: How many records a ring holds, if older ones are to be overwritten.
        attempt: The number of the elastic attempt.
        without_ranks: Ranks that leave no ring.
        planted: Faults that hang the job.
        hung_s: How long the job has hung when it is last seen.
        seed: The seed of the jitter.

    Returns:
        The run with its true times.
    """
    names = _host_names(hosts)
    host_of = [rank * len(names) // ranks for rank in range(ranks)]
    families = {"world": [list(range(ranks))]}
    families.update({key: [list(r) for r in value] for key, value in (groups or {}).items()})
    issued = [program[i % len(program)] for i in range(collectives)]
    slow = _straggling(ranks, straggler, straggler_ms)
    arrivals, ends = simulate(issued, families, slow, pace or Pace(), np.random.default_rng(seed))
    faults = (planted,) if isinstance(planted, Planted) else tuple(planted)
    over = plant(issued, families, arrivals, ends, faults) + int(hung_s * 1e9) if faults else 0
    offsets = _offsets(names, clock_offsets_ns)
    truth = Synthetic(
        Path(path),
        [names[host] for host in host_of],
        offsets,
        issued,
        arrivals,
        ends,
        families,
        faults,
        over,
    )
    create_run(truth.path, {"started": "synthetic", "script": "synthetic.py", "seed": seed})
    drifts = [*clock_drift_ppm, *[0.0] * len(names)]
    errors = [*epoch_errors_ns, *[0] * len(names)]
    for rank in sorted(set(range(ranks)) - set(without_ranks)):
        spec = _ring_spec(truth, rank, per_step, drifts[host_of[rank]], attempt)
        spec.anchor_epoch_ns += errors[host_of[rank]]
        _end(truth, spec, rank)
        name = ring_name(rank, spec.attempt, spec.host, spec.pid)
        write_ring(truth.path / "rings" / name, spec, capacity)
    return truth


def _end(truth: Synthetic, spec: RingSpec, rank: int) -> None:
    """Set the heartbeats and the exit of a rank in a job that hangs, as its fault demands."""
    if not truth.planted:
        return
    fault = next((planted for planted in truth.planted if rank in planted.ranks), None)
    spec.closed = False
    last = truth.over_ns
    if fault is not None and fault.kind in ("dead", "stopped", "exhausted"):
        # The rank ended or stopped on the way to the first op that it did not issue.
        last = int(max(truth.arrivals[:, rank].max(), truth.ends[:, rank].max(), 0)) + 1_000_000
    spec.native_beat_ns = spec.python_beat_ns = spec.anchor_mono_ns + last
    if fault is not None and fault.kind in ("dead", "exhausted"):
        code = -9 if fault.kind == "dead" else 0
        spec.closed = fault.kind == "exhausted"
        note_exit(
            truth.path,
            Exit(rank, spec.attempt, spec.host, spec.pid, code, spec.anchor_epoch_ns + last),
        )


def _host_names(hosts: int | Sequence[str]) -> list[str]:
    return [f"node-{i}" for i in range(hosts)] if isinstance(hosts, int) else list(hosts)


def _straggling(
    ranks: int, stragglers: int | Sequence[int] | None, ms: float
) -> npt.NDArray[np.float64]:
    """Return by how many ns each rank is slow."""
    slow = np.zeros(ranks)
    if stragglers is not None:
        slow[[stragglers] if isinstance(stragglers, int) else list(stragglers)] = ms * 1e6
    return slow


def _offsets(names: list[str], given: Mapping[str, int] | Sequence[int] | None) -> dict[str, int]:
    if given is None:
        return dict.fromkeys(names, 0)
    pairs = given if isinstance(given, Mapping) else dict(zip(names, given, strict=True))
    return {name: int(pairs.get(name, 0)) for name in names}


def _ring_spec(
    truth: Synthetic, rank: int, per_step: int, drift_ppm: float, attempt: int
) -> RingSpec:
    """Return one rank's records, in the clock of its host."""
    host = truth.hosts[rank]
    rows = np.flatnonzero(truth.arrivals[:, rank] >= 0)
    own_groups = {key: _group_of(rank, value) for key, value in truth.families.items()}
    spec = RingSpec(rank, len(truth.hosts), host, attempt, pid=1000 + rank + (attempt << 20))
    clock = BOOT_NS + truth.clock_offsets_ns[host]
    spec.anchor_mono_ns, spec.anchor_epoch_ns = clock, EPOCH_NS + truth.clock_offsets_ns[host]
    spec.records = _records(truth.program, rows, own_groups, rank, per_step, spec)
    repeat = [2 if truth.program[row].op == "exchange" else 1 for row in rows]
    for name, times in (("enqueued_ns", truth.arrivals), ("completed_ns", truth.ends)):
        true = np.repeat(times[rows, rank], repeat)
        on_host = true + clock + (true * (drift_ppm * 1e-6)).astype(np.int64)
        spec.records[name] = np.where(true == OPEN, 0, on_host)
    spec.records["status"][spec.records["completed_ns"] == 0] = STATUSES.index("started")
    spec.records["started_ns"] = spec.records["enqueued_ns"]
    for fault in truth.planted:
        if rank in fault.ranks and fault.at in rows:
            _change(spec.records[int(np.repeat(rows, repeat).searchsorted(fault.at))], fault, rank)
    return spec


def _change(record: Any, fault: Planted, rank: int) -> None:
    """Change a rank's record so that it differs from those of the other ranks."""
    if fault.kind == "desync":
        record["op"], record["message_bytes"] = OPS.index("barrier"), 1
    elif fault.kind == "mismatch":
        for name in ("message_bytes", "in_bytes", "out_bytes"):
            record[name] += 4
    elif fault.kind == "deadlock":
        at = fault.ranks.index(rank)
        record["op"], record["kind"], record["seq"] = OPS.index("recv"), KINDS.index("p2p"), 1
        record["peer"], record["root"] = fault.ranks[(at + 1) % len(fault.ranks)], -1


def _group_of(rank: int, groups: list[list[int]]) -> list[int]:
    return next((ranks for ranks in groups if rank in ranks), [])


def _records(
    program: list[Op],
    rows: npt.NDArray[np.intp],
    own_groups: dict[str, list[int]],
    rank: int,
    per_step: int,
    spec: RingSpec,
) -> npt.NDArray[Any]:
    """Return the records of one rank without their times."""
    kinds = list(dict.fromkeys(program[row] for row in rows))
    groups = {op.family: _group(op.family, own_groups[op.family]) for op in kinds}
    families = list(groups)
    lines = {
        op: _template(op, own_groups[op.family], rank, groups[op.family], spec) for op in kinds
    }
    which = np.array([kinds.index(program[row]) for row in rows], np.intp)
    counts = np.array([len(lines[op]) for op in kinds], np.intp)
    stacked = np.concatenate([lines[op] for op in kinds]) if kinds else np.zeros(0, RECORD)
    starts = np.concatenate([[0], np.cumsum(counts)])[:-1] if kinds else counts
    repeat = counts[which]
    within = np.arange(repeat.sum()) - np.repeat(np.cumsum(repeat) - repeat, repeat)
    records: npt.NDArray[Any] = stacked[np.repeat(starts[which], repeat) + within]
    family = np.array([families.index(op.family) for op in kinds], np.intp)[which]
    own = np.array([op.op == "exchange" for op in kinds], bool)[which]
    records["seq"] = np.repeat(_count_up(family * 2 + own), repeat)
    records["step"] = np.repeat(rows // per_step if per_step else rows * 0, repeat)
    records["correlation"] = np.repeat(rows + 1, repeat)
    return records


def _count_up(keys: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
    """Number equal keys from 1."""
    seq = np.zeros(len(keys), np.int64)
    for key in np.unique(keys):
        rows = keys == key
        seq[rows] = np.arange(1, rows.sum() + 1)
    return seq


def _group(family: str, ranks: list[int]) -> Group:
    name = "0" if family == "world" else f"{family}:{ranks[0]}"
    return Group(name, 0, "gloo", "default_pg" if family == "world" else family, tuple(ranks))


def _template(op: Op, members: list[int], rank: int, group: Group, spec: RingSpec) -> Any:
    """Return the record(s) that a rank writes for an op; an exchange is a send and a receive."""
    own, size = members.index(rank), len(members)
    names = ("send", "recv") if op.op == "exchange" else (op.op,)
    records = np.zeros(len(names), RECORD)
    into, out = _in_out(op, size, own)
    site = CallSite("train.py", op.line, op.function, op.op)
    if op.code:
        spec.line(site, op.code)
    for record, name in zip(records, names, strict=True):
        record["op"], record["kind"] = OPS.index(name), len(names) - 1
        record["message_bytes"] = 1 if name == "barrier" else op.message_bytes
        record["in_bytes"], record["out_bytes"] = into, out
        record["group"], record["call_site"] = spec.group(group), spec.site(site)
        record["variant"] = spec.string(f"c10d::{_VARIANTS.get(name, name)}")
        rooted = name in FROM_ROOT + TO_ROOT
        record["root"] = op.root if rooted else -1
        record["peer"] = {"send": (own + 1) % size, "recv": (own - 1) % size}.get(name, -1)
        record["dtype"], record["tensors"] = DTYPES.index("float32"), 1
        record["device_index"], record["device_ms"] = -1, np.nan
        record["status"] = STATUSES.index("completed")
        record["ndim"], record["shape"][0] = 1, op.message_bytes // 4
    return records


def _in_out(op: Op, size: int, own: int) -> tuple[int, int]:
    """Return the sizes of the inputs and outputs, as the capture records them."""
    data, root = op.message_bytes, own == op.root
    return {
        "all_gather": (data // size, data),
        "reduce_scatter": (data * size, data),
        "gather": (data, data * size if root else 0),
        "scatter": (data * size if root else 0, data),
        "barrier": (0, 0),
    }.get(op.op, (data, data))
