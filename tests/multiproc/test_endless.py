"""Verdicts on calls that never end come in seconds, whatever the threshold; sound jobs get none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scoreboard_calls import plain, run_calls
from scoreboard_case import Case
from scoreboard_table import SOUND
from world import wait_until

from rankcall.analysis.looks import diagnose_asking
from rankcall.run.load import load
from rankcall.run.paths import is_tail
from rankcall.testing import start_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]

WATCH = {"hang_after": 3600.0}  # no verdict of these tests waits for it
TIME_OUT_S = 240.0  # of the groups


def _verdicts(run_dir: Path) -> list[list[tuple[str, list[int]]]]:
    files = sorted(run_dir.glob("hangs/*/verdict.json"))
    return [
        [(found["kind"], found["ranks"]) for found in json.loads(file.read_text())["findings"]]
        for file in files
    ]


def _steps(rank: int, group: Any = None) -> None:
    import torch
    import torch.distributed as dist

    for _ in range(3):
        dist.all_reduce(torch.ones(8), group=group)


def _another_op(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    _steps(rank)
    if rank == 1:
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(8))


def _another_size(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    _steps(rank)
    dist.all_gather(
        [torch.ones(8 + 8 * (rank == 2)) for _ in range(world_size)],
        torch.ones(8 + 8 * (rank == 2)),
    )
    dist.barrier()


def _opposite_orders(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    groups = [dist.new_group(), dist.new_group()]
    for group in groups:
        _steps(rank, group)
    for group in groups if rank else groups[::-1]:
        dist.all_reduce(torch.ones(8), group=group)


def _closes_down(rank: int, world_size: int) -> None:
    """Rank 1 fails, and its process takes for ever to end."""
    import atexit
    import time

    import torch
    import torch.distributed as dist

    _steps(rank)
    if rank == 1:
        atexit.register(time.sleep, 3600)
        raise ValueError("no such file")
    dist.all_reduce(torch.ones(8))


@pytest.mark.parametrize(
    ("program", "kind", "ranks"),
    [
        (_another_op, "desync", [1]),
        pytest.param(_opposite_orders, "deadlock", [0, 1, 2], marks=pytest.mark.slow),
    ],
)
def test_the_verdict_does_not_wait(
    program: Callable[..., None], kind: str, ranks: list[int], tmp_path: Path
) -> None:
    """It comes once, is printed once, and the ranks go on waiting. A diagnosis has it at once."""
    run = tmp_path / "run"
    with start_ranks(program, 3, run_dir=run, watch=WATCH, timeout=TIME_OUT_S) as job:
        wait_until(lambda: _verdicts(run))
        # The newest records are kept when the verdict has been printed.
        wait_until(lambda: any(map(is_tail, run.glob("rings/*"))))
        assert all(Path(f"/proc/{pid}").exists() for pid in job.pids)
        found = diagnose_asking(load(run)).findings
        assert [(finding.kind, list(finding.ranks)) for finding in found] == [(kind, ranks)]
    assert _verdicts(run) == [[(kind, ranks)]]
    printed = [rank.stderr.count("kept with all stacks in") for rank in job.results]
    assert sum(printed) == 1


def _paused_calls(rank: int, world_size: int, seed: int, *about: Any) -> None:
    """Run a program of the scoreboard, with pauses before its calls that differ by rank."""
    import random
    import time

    import scoreboard_calls

    rng = random.Random(1000 * seed + rank)

    def paused(step: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            time.sleep(rng.choice((0.0, 0.0, 0.05, rng.uniform(0.0, 1.5))))
            step(*arguments)

        return run

    steps = scoreboard_calls._STEPS
    steps.update({name: paused(step) for name, step in steps.items()})
    run_calls(rank, world_size, *about)


@pytest.mark.slow
@pytest.mark.parametrize("case", SOUND, ids=lambda case: case.name.replace(" ", "-"))
def test_no_verdict_on_sound_programs(case: Case, tmp_path: Path) -> None:
    """Their ranks come late to one call after the other, and each call ends."""
    run = tmp_path / "run"
    programs = [[plain(call) for call in calls] for calls in case.program]
    groups = {name: list(ranks) for name, ranks in case.groups}
    about = (len(case.name), programs, groups, TIME_OUT_S)
    with start_ranks(
        _paused_calls, case.world_size, *about, init=False, run_dir=run, watch=WATCH
    ) as job:
        assert job.wait(TIME_OUT_S, TIME_OUT_S)
    assert [rank.error for rank in job.results] == [None] * case.world_size
    assert _verdicts(run) == []
