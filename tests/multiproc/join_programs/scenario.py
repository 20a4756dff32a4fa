"""Run scenarios with Join one after the other on the same ranks; and parts to build them from.

Every scenario gets a process group of its own, because many of them end with a dead one; the ranks
stay up. A rank's outcome text what it caught, when, and what it had done by then; how long plain
training takes on the machine as busy as it is; and what of the user's settings is not as before.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

Scenario = Callable[[int, "Log"], None]


class Log:
    """Notes of one rank: its steps, and when its failure began."""

    def __init__(self) -> None:
        self.steps = 0
        self.began = 0.0
        self.more: dict[str, Any] = {}
        self.nets: list[DistributedDataParallel] = []

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` and note when."""
        self.began = time.time()
        raise error

    def model(self) -> DistributedDataParallel:
        """Return a small DDP model."""
        torch.manual_seed(0)
        self.nets.append(DistributedDataParallel(nn.Linear(4, 4)))
        return self.nets[-1]

    def not_restored(self) -> list[str]:
        """Return what Join left behind on the models."""
        left = [net._join_config for net in self.nets if net._join_config.enable]
        left += [net for net in self.nets if net._forward_pre_hooks or net._forward_hooks]
        left += [net for net in self.nets if "_rankcall_joined" in vars(net)]
        return [str(leftover) for leftover in left]


def batches(count: int) -> list[torch.Tensor]:
    """Return some batches."""
    return [torch.ones(2, 4)] * count


def sharded() -> nn.Module:
    """Return a small model under FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return net


def train(net: nn.Module, log: Log, batch: torch.Tensor, weight: float = 1.0) -> None:
    """Do one step."""
    (net(batch).sum() * weight).backward()
    log.steps += 1


class Lying(list):  # type: ignore[type-arg]
    """A loader whose length is not what it has, or which fails at the end."""

    said = 0
    fails: Callable[[], None] | None = None

    def __len__(self) -> int:
        return self.said

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        if self.fails:
            self.fails()


def run_scenarios(
    rank: int, world_size: int, scenarios: list[Scenario]
) -> dict[str, dict[str, Any]]:
    """Run each scenario and return its outcome on this rank."""
    torch.set_num_threads(1)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    outcomes = {}
    for scenario in scenarios:
        name = scenario.__name__
        own = dist.PrefixStore(name, store)
        dist.init_process_group(
            "gloo", store=own, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
        )
        plain_s = plain_training()
        log, caught, filters = Log(), None, list(warnings.filters)
        try:
            scenario(rank, log)
        except BaseException as error:
            caught = error
        outcomes[name] = {
            "error": type(caught).__name__ if caught else None,
            "text": str(caught),
            "rank": getattr(caught, "rank", None),
            "steps": log.steps,
            "began": log.began,
            "ended": time.time(),
            "plain_s": plain_s,
            "changed": log.not_restored() + ["filters"] * (filters != warnings.filters),
            **log.more,
        }
        del caught
        dist.destroy_process_group()
    return outcomes


def plain_training() -> float:
    """Train a few steps without Join; return the seconds, which say how busy the machine is."""
    began = time.time()
    net = Log().model()
    for batch in batches(5):
        net(batch).sum().backward()
    return time.time() - began
