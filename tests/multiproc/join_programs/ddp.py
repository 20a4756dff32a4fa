"""DistributedDataParallel under Join, step by step. Each program returns what its rank sees."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from join_programs.parallel import SyncNorm
from rankcall.join import Join


def line() -> DistributedDataParallel:
    """Return a model whose gradient is the mean of the ranks' inputs."""
    return DistributedDataParallel(nn.Linear(1, 1, bias=False))


def gradient(net: Any, value: float) -> float:
    """Train a step on one number; return the gradient."""
    net.zero_grad()
    net(torch.full((1, 1), value)).sum().backward()
    return float(net.module.weight.grad.item())


def gradients(rank: int, world_size: int) -> dict[str, list[float]]:
    """Take 3 steps on rank 0 and 5 on the other ranks, then one step together after the block."""
    results = {}
    for divide_by in ("world", "active"):
        for way in ("plain", "batches"):
            net, count = line(), 3 if rank == 0 else 5
            with Join([net], divide_by=divide_by) as join:  # type: ignore[arg-type]
                inputs = [float(rank + 1)] * count
                results[f"{divide_by} {way}"] = [
                    gradient(net, value)
                    for value in (inputs if way == "plain" else join.batches(inputs))
                ]
            results[f"{divide_by} {way} after"] = [gradient(net, float(rank + 1))]
    net = line()
    with Join([net], enable=False):
        results["disabled"] = [gradient(net, float(rank + 1)) for _ in range(5)]
    return results


class Meets(nn.Module):
    """A layer whose forward pass issues a collective."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 4, bias=False)

    def forward(self, data: Tensor) -> Tensor:
        out: Tensor = self.layer(data)
        dist.all_reduce(out.detach())
        return out


class Norm(nn.Module):
    """A layer that normalises the batches of all ranks together."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 4, bias=False), SyncNorm(4))

    def forward(self, data: Tensor) -> Tensor:
        out: Tensor = self.layers(data)
        return out


def thrown(rank: int, world_size: int) -> list[list[Any]]:
    """Run out on all ranks but 0, with models whose forward pass issues a collective."""
    results = []
    for kind in (Meets, Norm):
        torch.manual_seed(0)
        net, steps, text = DistributedDataParallel(kind()), 0, ""
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        try:
            with Join([net], throw_on_early_termination=True):
                for step in range(10 if rank == 0 else 5):
                    optimizer.zero_grad()
                    net(torch.randn(10, 2) + step).square().sum().backward()
                    optimizer.step()
                    steps += 1
        except RuntimeError as error:
            text = str(error)
        results.append([steps, text, [float(parameter.sum()) for parameter in net.parameters()]])
    return results


def own_buffers(rank: int, world_size: int) -> list[float]:
    """Give each rank another buffer, and forbid DDP to exchange buffers; return the buffer."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("shift", torch.full((2,), float(rank)))

        def forward(self, data: Tensor) -> Tensor:
            out: Tensor = self.layer(data) + self.shift
            return out

    net = DistributedDataParallel(Shifted(), forward_sync_buffers=False, init_sync=False)
    with Join([net]) as join:
        for _ in join.batches(range(1 + rank)):
            net(torch.ones(3, 2)).sum().backward()
    shift: list[float] = net.module.shift.tolist()
    return shift


def collectives(rank: int, world_size: int) -> dict[str, int]:
    """Count the group's collectives in even steps, without Join and with it."""
    group: Any = dist.group.WORLD
    counted = group._get_sequence_number_for_group
    net, steps = line(), 16
    for _ in range(3):  # in which DDP exchanges the order of its buckets
        gradient(net, 1.0)

    def plain() -> int:
        before: int = counted()
        for _ in range(steps):
            gradient(net, 1.0)
        after: int = counted()
        return after - before

    results = {"plain": plain()}
    for way, loader in (("known", [1.0] * steps), ("unknown", iter([1.0] * steps))):
        with Join([net]) as join:
            seen = []
            for value in join.batches(loader):
                seen.append(counted())
                gradient(net, value)
        results[way] = seen[-1] - seen[0]
    return results
