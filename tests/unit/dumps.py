"""Jobs on NCCL that hang, as their Flight Recorder dumps show them.

``simulate`` runs a program on many ranks. Each host issues ops in order, ahead of its device. The
device runs them in order, and a collective ends on all members at once, when all of them have begun
the same op with the same size. A planted fault changes what one host issues. So the ranks that a
verdict must name are known, and nothing in here looks at what the reader makes of the dumps.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

T0 = 1_780_000_000_000_000_000
MS = 1_000_000
FRAMES = [
    {"name": "all_reduce", "filename": "/venv/torch/distributed/distributed_c10d.py", "line": 3245},
    {"name": "wrapper", "filename": "/venv/torch/distributed/c10d_logger.py", "line": 83},
    {"name": "step", "filename": "/job/train.py", "line": 0},
]


@dataclass(frozen=True)
class Step:
    """One op of the program: in each rank's group of a family, or a message to the next stage."""

    family: str
    op: str
    numel: int = 1024
    line: int = 1


@dataclass(frozen=True)
class Fault:
    """What one rank's host does wrong at one op of the program.

    ``missing``: it issues nothing from there on. ``desync``: it issues a barrier instead.
    ``mismatch``: it issues another size. ``lagging``: its device never ends the op, although the
    others' do.
    """

    kind: str
    rank: int
    at: int


@dataclass
class Issued:
    """One op that a host has issued."""

    at: int
    group: str
    op: str
    numel: int
    seq: int
    peer: int = -1
    line: int = 1
    done: bool = False


@dataclass
class Job:
    """The groups of a job by rank, and what each rank has issued."""

    ranks: int
    groups: dict[str, dict[int, tuple[int, ...]]]  # by family and rank
    issued: dict[int, list[Issued]] = field(default_factory=dict)


def megatron(ranks: int, tp: int = 4, pp: int = 2) -> dict[str, dict[int, tuple[int, ...]]]:
    """Return tensor, pipeline, data and expert groups; ranks are ordered tp, dp, pp."""
    dp = ranks // (tp * pp)
    families: dict[str, dict[int, tuple[int, ...]]] = {
        "world": dict.fromkeys(range(ranks), tuple(range(ranks)))
    }
    for rank in range(ranks):
        t, d, p = rank % tp, rank // tp % dp, rank // (tp * dp)
        families.setdefault("tp", {})[rank] = tuple(x + tp * (d + dp * p) for x in range(tp))
        families.setdefault("pp", {})[rank] = tuple(t + tp * (d + dp * x) for x in range(pp))
        families.setdefault("dp", {})[rank] = tuple(t + tp * (x + dp * p) for x in range(dp))
        half = [x for x in range(dp) if x // 2 == d // 2]
        families.setdefault("ep", {})[rank] = tuple(t + tp * (x + dp * p) for x in half)
    return families


PROGRAM = (
    Step("tp", "all_reduce", 4096, 10),
    Step("tp", "_all_gather_base", 2048, 11),
    Step("ep", "all_to_all", 512, 12),
    Step("pp", "exchange", 256, 13),
    Step("tp", "all_reduce", 1024, 14),
    Step("dp", "_reduce_scatter_base", 8192, 15),
    Step("world", "all_reduce", 1, 16),
)


def simulate(
    ranks: int,
    ops: int,
    faults: Sequence[Fault] = (),
    *,
    ahead: int = 500,
    program: Sequence[Step] = PROGRAM,
    groups: dict[str, dict[int, tuple[int, ...]]] | None = None,
) -> Job:
    """Run ``ops`` ops of the program; a host is at most ``ahead`` ops ahead of its device."""
    job = Job(ranks, groups or megatron(ranks))
    steps = [program[at % len(program)] for at in range(ops)]
    for rank in range(ranks):
        job.issued[rank] = list(_issue(job, steps, rank, [f for f in faults if f.rank == rank]))
    lagging = {(fault.rank, fault.at) for fault in faults if fault.kind == "lagging"}
    _run(job, lagging)
    for rank, issued in job.issued.items():
        first = next((n for n, call in enumerate(issued) if not call.done), len(issued))
        job.issued[rank] = issued[: first + ahead]
    return job


def _issue(job: Job, steps: Sequence[Step], rank: int, faults: Sequence[Fault]) -> list[Issued]:
    issued: list[Issued] = []
    seqs: dict[str, int] = {}
    for at, step in enumerate(steps):
        fault = next((planted for planted in faults if planted.at == at), None)
        if fault is not None and fault.kind == "missing":
            break
        members = job.groups[step.family][rank]
        if step.op == "exchange":
            own = members.index(rank)
            for op, peer in (("send", own ^ 1), ("recv", own ^ 1)):
                issued.append(Issued(at, step.family, op, step.numel, at, peer, step.line))
            continue
        seq = seqs[step.family] = seqs.get(step.family, 0) + 1
        call = Issued(at, step.family, step.op, step.numel, seq, line=step.line)
        if fault is not None and fault.kind == "desync":
            call = replace(call, op="barrier", numel=1)
        if fault is not None and fault.kind == "mismatch":
            call = replace(call, numel=step.numel + 8)
        issued.append(call)
    return issued


def _run(job: Job, lagging: set[tuple[int, int]]) -> None:
    """Let the devices run until none can go on."""
    at = dict.fromkeys(range(job.ranks), 0)
    todo = set(at)
    while todo:
        rank = todo.pop()
        issued = job.issued[rank]
        if at[rank] >= len(issued):
            continue
        call = issued[at[rank]]
        members = job.groups[call.group][rank]
        if call.peer >= 0:
            members = (rank, members[call.peer])
        arrived = []
        for member in members:
            theirs = job.issued[member][at[member] : at[member] + 1]
            if not theirs or _what(theirs[0]) != _what(call):
                break
            arrived.append((member, theirs[0]))
        if len(arrived) < len(members):
            continue
        for member, member_call in arrived:
            if (member, member_call.at) in lagging:
                continue
            # Both ends of an exchange end together.
            count = 2 if member_call.peer >= 0 else 1
            for ended_call in job.issued[member][at[member] : at[member] + count]:
                ended_call.done = True
            at[member] += count
            todo.add(member)


def _what(call: Issued) -> tuple[Any, ...]:
    return call.group, call.op, call.numel, call.seq


# The entry of a whole batch of messages, or of a block of coalesced collectives.
_COALESCED: dict[str, Any] = {
    "profiling_name": "nccl:coalesced",
    "input_sizes": [],
    "output_sizes": [],
    "input_dtypes": [],
    "output_dtypes": [],
}


def dump_of(
    job: Job,
    rank: int,
    *,
    version: str = "2.9",
    kept: int = 2000,
    frames: bool = True,
    batch_is_p2p: bool = False,
) -> dict[str, Any]:
    """Return the dump that NCCL's process group would write for a rank."""
    names = {family: str(number) for number, family in enumerate(job.groups)}
    pairs = {family: (name, _desc(family)) for family, name in names.items()}
    entries: list[dict[str, Any]] = []
    p2p: dict[str, int] = {}
    last: dict[str, int] = {}
    for call in job.issued[rank]:
        last[call.group] = max(last.get(call.group, 0), call.seq if call.peer < 0 else 0)
        common = {
            "pg_id": int(names[call.group]),
            "process_group": pairs[call.group],
            "collective_seq_id": last[call.group],
            "p2p_seq_id": p2p.get(call.group, 0),
            "op_id": len(entries) + 1,
            "time_created_ns": T0 + call.at * MS + rank,
            "timeout_ms": 600_000,
            "is_p2p": call.peer >= 0,
        }
        if frames:
            common["frames"] = [*FRAMES[:2], _frame(call.line)]
        if call.peer < 0:
            entries.append({**common, **_tensors(job, call, rank), **_state(call, call.done)})
            continue
        if call.op == "send":
            p2p[call.group] = common["p2p_seq_id"] = p2p.get(call.group, 0) + 1
        entries.append({**common, **_message(job, call, rank), **_state(call, done=False)})
        if call.op == "recv":  # the end of the batch, which alone knows the state
            # torch 2.13 to 2.15 does not mark it as p2p; seen in their dumps.
            batch = {**_COALESCED, "is_p2p": batch_is_p2p}
            entries.append({**common, **batch, **_state(call, call.done)})
    for number, entry in enumerate(entries):
        entry["record_id"] = number
    config = {
        names[family]: {
            "name": names[family],
            "desc": _desc(family),
            "ranks": str(list(members[rank])),
        }
        for family, members in job.groups.items()
    }
    return {
        "version": version,
        "nccl_version": "2.26.2",
        "pg_config": config,
        "pg_status": {},
        "entries": entries[-kept:],
    }


@functools.lru_cache
def _frame(line: int) -> dict[str, Any]:
    return {**FRAMES[2], "line": line}


def _desc(family: str) -> str:
    return "default_pg" if family == "world" else f"{family.upper()}_GROUP"


def _tensors(job: Job, call: Issued, rank: int) -> dict[str, Any]:
    if call.op == "coalesced":
        return _COALESCED
    size = len(job.groups[call.group][rank])
    into, out = {
        "_all_gather_base": (call.numel, call.numel * size),
        "_reduce_scatter_base": (call.numel * size, call.numel),
    }.get(call.op, (call.numel, call.numel))
    name = "all_reduce_barrier" if call.op == "barrier" else call.op
    return {
        "profiling_name": sys.intern(f"nccl:{name}"),
        "input_sizes": [[into]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[out]],
        "output_dtypes": ["BFloat16"],
    }


def _message(job: Job, call: Issued, rank: int) -> dict[str, Any]:
    own = job.groups[call.group][rank].index(rank)
    arrow = "->" if call.op == "send" else "<-"
    sent, received = ([[call.numel]], []) if call.op == "send" else ([], [[call.numel]])
    return {
        "profiling_name": sys.intern(f"nccl:{call.op} {own}{arrow}{call.peer}"),
        "input_sizes": sent,
        "input_dtypes": ["BFloat16"] * len(sent),
        "output_sizes": received,
        "output_dtypes": ["BFloat16"] * len(received),
    }


def _state(call: Issued, done: bool) -> dict[str, Any]:
    end = T0 + call.at * MS + MS // 2 if done else None
    return {
        "state": "completed" if done else "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": end,
        "retired": done,
    }


def write_dumps(
    folder: Path,
    job: Job,
    name: str = "nccl_trace_rank_{}",
    *,
    as_json: bool = False,
    without: Sequence[int] = (),
    written_ns: int | None = None,
    **options: Any,
) -> Path:
    """Write the dumps of a job's ranks, as of ``written_ns``, or with files of the time now."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(job.ranks):
        if rank not in without:
            path = folder / name.format(rank)
            content = dump_of(job, rank, **options)
            path.write_bytes(json.dumps(content).encode() if as_json else pickle.dumps(content))
            if written_ns is not None:
                os.utime(path, ns=(written_ns, written_ns))
    return folder
