"""Replay where ranks meet in the forward pass: pipelines, and batch norms over all ranks.

Each is compared with one process that knows nothing of Join or of the parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from join_programs.models import batch
from rankcall.join import Join

WIDTH, BATCH = 6, 4
EXAMPLE = 99  # the step whose batch is the example


def inputs(share: int, step: int) -> Tensor:
    """Return what the ranks of one share have in a step."""
    return batch(share, step)[:BATCH]


def weight_of(pattern: list[int], divide_by: str, share: int, step: int) -> float:
    """Return what a share's loss counts in a step, of the mean over all."""
    active = sum(step < count for count in pattern)
    if step >= pattern[share]:
        return 0.0
    return 1 / (len(pattern) if divide_by == "world" else active)


def apart(here: nn.Module, alone: nn.Module) -> float:
    """Return the largest relative difference of parameters and buffers."""
    wanted = alone.state_dict()
    furthest = 0.0
    for name, tensor in here.state_dict().items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if whole.is_floating_point():
            distance = (whole - wanted[name]).abs().max() / wanted[name].abs().max()
            furthest = max(furthest, float(distance))
    return furthest


# Pipelines.


def two_stages() -> list[nn.Module]:
    """Return the same two stages everywhere."""
    torch.manual_seed(5)
    return [nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh()).double(), nn.Linear(8, WIDTH).double()]


def error_of(out: Tensor, target: Tensor) -> Tensor:
    """Return a loss that adds up over micro-batches."""
    return (out - target).square().sum()


def pipeline(rank: int, world_size: int, pattern: list[int], divide_by: str) -> dict[str, Any]:
    """Train two stages on two replicas, each with its own number of batches; 1F1B, FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    share, here = rank // 2, rank % 2
    model = fully_shard(two_stages()[here], mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stage = PipelineStage(model, here, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    with Join(
        group=mesh["dp"], same_data=mesh["pp"], on_exhausted="replay", divide_by=divide_by
    ) as join:  # type: ignore[call-overload, unused-ignore]
        schedule = Schedule1F1B(
            stage, 2, lambda out, target: error_of(out, target) * join.weight, scale_grads=False
        )
        mine = [inputs(share, step) for step in range(pattern[share])]
        for data in join.batches(mine, example=inputs(share, EXAMPLE)):
            optimizer.zero_grad()
            schedule.step(data) if here == 0 else schedule.step(target=data)
            optimizer.step()
    alone = _pipeline_alone(pattern, divide_by)
    return {
        "apart": apart(model, alone[here]),
        "replayed": [row.replayed for row in join.summary.ranks],  # type: ignore[union-attr]
    }


def _pipeline_alone(pattern: list[int], divide_by: str) -> nn.Sequential:
    model = nn.Sequential(*two_stages())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(max(pattern)):
        optimizer.zero_grad()
        for share in range(len(pattern)):
            weight = weight_of(pattern, divide_by, share, step)
            if weight:
                data = inputs(share, step)
                (error_of(model(data), data) * weight).backward()
        optimizer.step()
    return model


# Batch norms over all ranks.


class SyncNorm(nn.BatchNorm1d):
    """BatchNorm over the batches of all ranks, as SyncBatchNorm, which takes no CPU tensors."""

    def forward(self, data: Tensor) -> Tensor:
        from torch.distributed.nn.functional import all_reduce

        count = len(data) * dist.get_world_size()
        mean = all_reduce(data.sum(0)) / count
        variance = all_reduce((data - mean).square().sum(0)) / count
        with torch.no_grad():
            assert self.running_mean is not None
            assert self.running_var is not None
            self.running_mean.lerp_(mean, 0.1)
            self.running_var.lerp_(variance * count / (count - 1), 0.1)
        out: Tensor = (data - mean) / (variance + self.eps).sqrt() * self.weight + self.bias
        return out


def normed(norm: type[nn.Module]) -> nn.Sequential:
    """Return the same model everywhere but for its kind of norm."""
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(WIDTH, 8), norm(8), nn.Linear(8, 2)).double()


def synchronised(rank: int, world_size: int, pattern: list[int], divide_by: str) -> dict[str, Any]:
    """Train with DDP and a norm over all ranks, replays included."""
    torch.set_num_threads(1)
    model = DistributedDataParallel(normed(SyncNorm))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mine = [inputs(rank, step) for step in range(pattern[rank])]
    with Join([model], on_exhausted="replay", divide_by=divide_by) as join:  # type: ignore[arg-type]
        for data in join.batches(mine, example=inputs(rank, EXAMPLE)):
            optimizer.zero_grad()
            (model(data).square().mean() * join.weight).backward()
            optimizer.step()
    alone = _normed_alone(pattern, divide_by)
    return {
        "apart": apart(model.module, alone),
        "replayed": [row.replayed for row in join.summary.ranks],  # type: ignore[union-attr]
    }


def _normed_alone(pattern: list[int], divide_by: str) -> nn.Module:
    """One batch of all ranks' batches, those handed out again as well; they only have no weight."""
    model = normed(nn.BatchNorm1d)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(max(pattern)):
        last = [min(step, count - 1) if count else EXAMPLE for count in pattern]
        outs = model(torch.cat([inputs(rank, at) for rank, at in enumerate(last)])).split(BATCH)
        optimizer.zero_grad()
        torch.stack(
            [
                out.square().mean() * weight_of(pattern, divide_by, rank, step)
                for rank, out in enumerate(outs)
            ]
        ).sum().backward()
        optimizer.step()
    return model
