"""Logs of made-up jobs: a fault is planted, and the lines follow from it.

The expectation comes from the plan alone. A log is what several ranks write at once, so the lines
of each rank keep their order and are mixed at random with those of the others, with progress of the
training, and with what a collector puts before each line.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from nccl_logs import WORDINGS, Call, log_of

FAULTS = ("missing", "desync", "device", "exception", "killed")


@dataclass(frozen=True)
class Plan:
    """The fault, and what the log therefore shows. ``shown``: the first line that tells of it.

    ``seq``: The number of the collective that the others wait in. ``what``: Words of the fault.
    """

    fault: str
    culprit: int
    others: tuple[int, ...]
    seq: int
    what: str
    kind: str
    lines: list[str]
    shown: int


def made(seed: int, collect: Callable[[int, str], str]) -> Plan:
    """Return a log of four to sixteen ranks, one of which is at fault."""
    chance = random.Random(seed)
    world = chance.randint(4, 16)
    culprit = chance.randrange(world)
    fault = chance.choice(FAULTS)
    others = [rank for rank in range(world) if rank != culprit]
    wording = chance.choice(WORDINGS)
    seq = chance.randint(2, 90_000)
    by_rank = {
        rank: [f"[rank{rank}]: step {step} loss 0.{rank}" for step in range(6)]
        for rank in range(world)
    }
    tail: list[str] = []
    kind, what = "dead", f"#{seq} of"
    if fault == "missing":
        kind = "missing"
        written = log_of(
            wording, {rank: Call(seq) for rank in others}, {culprit: (seq - 1, seq - 1)}
        )
    elif fault == "desync":
        kind = "desync"
        calls = {rank: Call(seq, "REDUCE") for rank in others}
        written = log_of(wording, {**calls, culprit: Call(seq, "BROADCAST")})
    else:
        written = log_of(wording, {rank: Call(seq) for rank in others})
        what, tail = _own_failure(fault, culprit, chance)
    for line in written:
        by_rank[int(line[5 : line.index("]")])].append(line)
    if fault in ("device", "exception"):
        by_rank[culprit] += tail
        tail = []
    lines = [*_mixed(by_rank, chance), *tail]
    failing = ("Watchdog", "watchdog", "Traceback", "Failures:", "dump signal")
    shown = next(index for index, line in enumerate(lines) if any(word in line for word in failing))
    collected = [collect(index, line) for index, line in enumerate(lines)]
    return Plan(fault, culprit, tuple(others), seq, what, kind, collected, shown)


def _own_failure(fault: str, rank: int, chance: random.Random) -> tuple[str, list[str]]:
    """Return words that the verdict must have, and the lines that a rank's own failure leaves."""
    if fault == "device":
        what = chance.choice(
            [
                "an illegal memory access was encountered",
                "unspecified launch failure",
                "uncorrectable ECC error encountered",
            ]
        )
        return what, [
            f"[rank{rank}]:[E101 09:00:00.000000000 ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID 0 "
            f"Rank {rank}] Process group watchdog thread terminated with exception: CUDA error: "
            f"{what}"
        ]
    if fault == "exception":
        kind, message = chance.choice(
            [
                ("KeyError", "'loss'"),
                ("ValueError", "bad sample"),
                ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB"),
            ]
        )
        return f"{kind.rpartition('.')[2]}: {message}", [
            f"[rank{rank}]: Traceback (most recent call last):",
            f'[rank{rank}]:   File "/job/train.py", line 88, in <module>',
            f"[rank{rank}]:     main()",
            f'[rank{rank}]:   File "/job/data.py", line 12, in load',
            f"[rank{rank}]:     return batch[key]",
            f"[rank{rank}]: {kind}: {message}",
        ]
    return "SIGKILL", [
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
        "=" * 60,
        "train.py FAILED",
        "-" * 60,
        "Failures:",
        "  <NO_OTHER_FAILURES>",
        "-" * 60,
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2026-05-21_15:43:03",
        f"  host      : node-{rank // 8}",
        f"  rank      : {rank} (local_rank: {rank % 8})",
        "  exitcode  : -9 (pid: 14750)",
        "  error_file: <N/A>",
        "  traceback : Signal 9 (SIGKILL) received by PID 14750",
        "=" * 60,
    ]


def _mixed(by_rank: dict[int, list[str]], chance: random.Random) -> list[str]:
    """Mix the lines of all ranks; those of each rank keep their order."""
    queues = [list(lines) for lines in by_rank.values() if lines]
    mixed = []
    while queues:
        queue = chance.choice(queues)
        mixed.append(queue.pop(0))
        if not queue:
            queues.remove(queue)
    return mixed
