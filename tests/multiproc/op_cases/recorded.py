"""One run of every op case on four ranks, which several tests share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import witness
from once import once
from ranks import run_ranks
from world import World, plain, run_cases

from op_cases import functional, gather, p2p, reduce, rooted
from rankcall import load
from rankcall.problems import Problem

RANKS = 4
CAPTURES = ("native", "python")
CASES = [
    *rooted.CASES,
    *reduce.CASES,
    *gather.CASES,
    *p2p.CASES,
    *functional.CASES,
]


@dataclass
class Recorded:
    """The records that the ranks expected, those that were read back, and torch's own."""

    parts: list[list[dict[str, Any]]]
    rows: list[list[dict[str, Any]]]
    torch_saw: list[dict[str, list[witness.Seen]]]
    problems: list[Problem]
    dropped: dict[int, int]
    capture: str


@once
def recorded_run(capture: str, factory: pytest.TempPathFactory) -> Recorded:
    """Return the run of a capture."""
    folder = factory.mktemp(capture) / "run"
    env = {"RANKCALL_CAPTURE": capture, **witness.ARMED}
    accounts = run_ranks(_issue_everything, RANKS, str(folder), env=env, timeout=240)
    run = load(folder)
    rows = [plain(row) for row in run.records.to_dicts()]
    return Recorded(
        parts=[parts for parts, _ in accounts],
        rows=[[row for row in rows if row["rank"] == rank] for rank in range(RANKS)],
        torch_saw=[witness.by_group(entries) for _, entries in accounts],
        problems=run.problems,
        dropped=run.dropped,
        capture="+".join({head.header.capture for head in run.heads}),
    )


def _issue_everything(rank: int, world_size: int, run_dir: str) -> tuple[Any, Any]:
    """Run all cases while recording; return what this rank expects, and what torch saw."""
    import torch.distributed as dist

    import rankcall

    recording = rankcall.enable(run_dir)
    world = World.of(rank)
    parts = run_cases(world, CASES, lambda: recording.capture.counts()[0])
    entries = witness.torch_saw()
    dist.destroy_process_group()  # joins the back end's threads: every end is recorded
    rankcall.disable()
    return parts, entries
