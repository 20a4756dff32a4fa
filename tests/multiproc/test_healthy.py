"""Short jobs in which all ranks do the same are healthy, also on a busy machine."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks

from rankcall.analysis.verdicts import diagnose
from rankcall.run.load import load

pytestmark = pytest.mark.multiproc


def _trains(rank: int, world_size: int, steps: int, is_ddp: bool) -> None:
    """Take steps of a small model, by DDP or with an all_reduce of its own."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model: torch.nn.Module = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    if is_ddp:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(32, 64)).square().mean().backward()
        if is_ddp:
            optimizer.step()
        else:
            dist.all_reduce(torch.ones(4096))


@pytest.mark.slow
@pytest.mark.parametrize("is_ddp", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_short_job_is_healthy(tmp_path: Path, ranks: int, is_ddp: bool) -> None:
    """Of six jobs of 8 to 33 steps, none has a finding."""
    for steps in range(8, 38, 5):
        run = tmp_path / str(steps)
        run_ranks(_trains, ranks, steps, is_ddp, run_dir=run)
        diagnosis = diagnose(load(run))
        assert (diagnosis.kind, diagnosis.findings) == ("healthy", [])


def _computes() -> None:
    """Compute for some ms."""
    import torch

    x = torch.ones(128, 128)
    for _ in range(20):
        x = (x @ x) * 0.001


def _passes_on(rank: int, world_size: int, steps: int) -> None:
    """Be a stage of a balanced pipeline, in which a stage waits for the one before it."""
    import torch
    import torch.distributed as dist

    x = torch.ones(256)
    for _ in range(steps):
        if rank > 0:
            dist.recv(x, rank - 1)
        _computes()
        if rank < world_size - 1:
            dist.send(x, rank + 1)


def _exchanges(rank: int, world_size: int, steps: int) -> None:
    """Exchange with both neighbours at once."""
    import torch
    import torch.distributed as dist

    for _ in range(steps):
        _computes()
        ops = [
            dist.P2POp(dist.isend, torch.ones(64), (rank + 1) % world_size),
            dist.P2POp(dist.irecv, torch.ones(64), (rank - 1) % world_size),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()


def _collects(rank: int, world_size: int, steps: int) -> None:
    """Get parameters from rank 0 and give it gradients, which it alone waits for."""
    import torch
    import torch.distributed as dist

    for _ in range(steps):
        dist.broadcast(torch.ones(64), 0)
        _computes()
        dist.reduce(torch.ones(64), 0)


def _joins(rank: int, world_size: int, steps: int, policy: str) -> None:
    """Train on uneven inputs. With ``stop``, all end with the rank that has the fewest."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from rankcall.join import Join

    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model, optimizer], on_exhausted=policy) as join:
        for batch in join.batches([torch.ones(32, 64)] * (steps + 5 * rank)):
            optimizer.zero_grad()
            (model(batch).square().mean() * join.weight).backward()
            _computes()
            optimizer.step()


SHAPES: dict[str, tuple[Any, ...]] = {
    "pipeline": (_passes_on,),
    "exchange": (_exchanges,),
    "rooted": (_collects,),
    "join(stop)": (_joins, "stop"),
    "join(replay)": (_joins, "replay"),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_job_of_another_shape_is_healthy(tmp_path: Path, shape: str) -> None:
    """Of three jobs in which ranks wait for each other by design, none has a finding.

    No limit of the straggler rule was chosen on such jobs, and the sizes are others each time.
    """
    target, *options = SHAPES[shape]
    seed = time.time_ns()
    chance = random.Random(seed)
    for number in range(3):
        run, ranks, steps = tmp_path / str(number), chance.randint(2, 5), chance.randint(8, 60)
        run_ranks(target, ranks, steps, *options, run_dir=run)
        diagnosis = diagnose(load(run))
        about = f"seed {seed}, job {number}: {ranks} ranks, {steps} steps"
        assert (diagnosis.kind, diagnosis.findings) == ("healthy", []), about
