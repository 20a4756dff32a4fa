"""Short jobs in which all ranks do the same are healthy, also on a busy machine."""

from __future__ import annotations

from pathlib import Path

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
