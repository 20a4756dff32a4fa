"""Training programs that the scenarios run, sound as they are: the faults come from a plan.

Each takes a few dozen short steps and steps an optimizer, so that the first step is soon over.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import rankcall
from rankcall.testing import FaultPlan

STEPS = 16
# Where the programs run. A caller that changes them sets torch's default device as well.
BACKEND, DEVICE = "gloo", "cpu"
HANG_AFTER_S = 2.0  # the scenarios' threshold; far above what a busy machine holds a rank up for


class Stepper:
    """An optimizer over one number: programs without a model count their steps by it."""

    def __init__(self) -> None:
        self._weight = nn.Parameter(torch.zeros(1))
        self._weight.grad = torch.zeros(1)
        self.step = torch.optim.SGD([self._weight], lr=0.1).step


def _model(layers: int = 3) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))


def _train(model: nn.Module, rank: int, plan: FaultPlan) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in plan.batches(range(STEPS), rank):
        optimizer.zero_grad()
        model(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()


def plain(rank: int, world_size: int, plan: FaultPlan) -> None:
    """An all_reduce, a broadcast and an all_gather in each step, on all ranks."""
    stepper = Stepper()
    for step in plan.batches(range(STEPS), rank):
        dist.all_reduce(torch.ones(64))
        dist.broadcast(torch.full((8,), step), 0)
        dist.all_gather([torch.zeros(4) for _ in range(world_size)], torch.ones(4))
        stepper.step()


def uniform(rank: int, world_size: int, plan: FaultPlan) -> None:
    """The same all_reduce over and over, and at last something else."""
    stepper = Stepper()
    for _ in plan.batches(range(STEPS), rank):
        dist.all_reduce(torch.ones(64))
        stepper.step()
    dist.broadcast(torch.ones(3), 0)
    dist.barrier()


def ddp(rank: int, world_size: int, plan: FaultPlan) -> None:
    """Small buckets: the reducer issues several all_reduces in each backward."""
    from torch.nn.parallel import DistributedDataParallel

    _train(DistributedDataParallel(_model(), bucket_cap_mb=0.002), rank, plan)


def fsdp2(rank: int, world_size: int, plan: FaultPlan) -> None:
    """Each layer a unit of its own: all_gathers and reduce_scatters."""
    from torch.distributed.fsdp import fully_shard

    model = _model()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    _train(model, rank, plan)


def tensor_parallel(rank: int, world_size: int, plan: FaultPlan) -> None:
    """A column-wise and a row-wise layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(DEVICE, (world_size,))
    _train(
        parallelize_module(_model(2), mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()}),
        rank,
        plan,
    )


def pipeline(rank: int, world_size: int, plan: FaultPlan) -> None:
    """A stage on each rank, four microbatches."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    module = _model(1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    stage = PipelineStage(module, rank, world_size, torch.device(DEVICE))
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
    for _ in plan.batches(range(STEPS), rank):
        if rank == 0:
            schedule.step(torch.ones(8, 16))
        elif rank == world_size - 1:
            schedule.step(target=torch.zeros(8, 16))
        else:
            schedule.step()
        optimizer.step()


def mesh(rank: int, world_size: int, plan: FaultPlan) -> None:
    """Rows and columns of two: an all_reduce along each."""
    from torch.distributed.device_mesh import init_device_mesh

    device_mesh = init_device_mesh(DEVICE, (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    stepper = Stepper()
    for _ in plan.batches(range(STEPS), rank):
        dist.all_reduce(torch.ones(16), group=device_mesh.get_group("tp"))
        dist.all_reduce(torch.ones(32), group=device_mesh.get_group("dp"))
        stepper.step()


def chain(rank: int, world_size: int, plan: FaultPlan) -> None:
    """Communicate in pairs of neighbours, one after the other, so that waits form a chain."""
    pairs = [dist.new_group([at, at + 1], group_desc=f"pair{at}") for at in range(world_size - 1)]
    stepper = Stepper()
    for _ in plan.batches(range(STEPS), rank):
        for at, pair in enumerate(pairs):
            if rank in (at, at + 1):
                dist.all_reduce(torch.ones(8), group=pair)
        stepper.step()


def halves(rank: int, world_size: int, plan: FaultPlan) -> None:
    """Each half for itself; every fourth step all together."""
    half = world_size // 2
    groups = [
        dist.new_group(list(range(half)), group_desc="left"),
        dist.new_group(list(range(half, world_size)), group_desc="right"),
    ]
    stepper = Stepper()
    for step in plan.batches(range(STEPS), rank):
        dist.all_reduce(torch.ones(8), group=groups[rank >= half])
        if step % 4 == 3:
            dist.all_reduce(torch.ones(4))
        stepper.step()


def twins(rank: int, world_size: int, plan: FaultPlan) -> None:
    """Two groups of all ranks, always in the same order."""
    every = list(range(world_size))
    left, right = (dist.new_group(every, group_desc=name) for name in ("left", "right"))
    stepper = Stepper()
    for _ in plan.batches(range(STEPS), rank):
        dist.all_reduce(torch.ones(8), group=left)
        dist.all_reduce(torch.ones(9), group=right)
        stepper.step()


def ring(rank: int, world_size: int, plan: FaultPlan) -> None:
    """Send to the next rank and receive from the previous one, on every rank."""
    stepper = Stepper()
    for _ in plan.batches(range(STEPS), rank):
        received = torch.zeros(8)
        work = dist.isend(torch.ones(8), (rank + 1) % world_size)
        dist.recv(received, (rank - 1) % world_size)
        assert work is not None
        work.wait()
        stepper.step()


def lines(rank: int, world_size: int, plan: FaultPlan) -> None:
    """Down a line of ranks and back, blocking at each end."""
    stepper = Stepper()
    for _ in plan.batches(range(STEPS), rank):
        box = torch.ones(8)
        if rank:
            dist.recv(box, rank - 1, tag=3)
        if rank < world_size - 1:
            dist.send(box, rank + 1, tag=3)
            dist.recv(box, rank + 1, tag=4)
        if rank:
            dist.send(box, rank - 1, tag=4)
        stepper.step()


def both_receive(rank: int, world_size: int, plan: FaultPlan) -> None:
    """In step 5 ranks 0 and 1 both receive before they send."""
    stepper = Stepper()
    for step in plan.batches(range(STEPS), rank):
        dist.all_reduce(torch.ones(8))
        if rank < 2 and step == 5:
            box = torch.ones(8)
            dist.recv(box, 1 - rank)
            dist.send(box, 1 - rank)
        stepper.step()


def unwaited(rank: int, world_size: int, plan: FaultPlan) -> None:
    """Send messages without waiting for their Works; all are received."""
    stepper, works = Stepper(), []
    for _ in plan.batches(range(STEPS), rank):
        if rank == 0:
            works.append(dist.isend(torch.ones(4), 1))
        elif rank == 1:
            dist.recv(torch.zeros(4), 0)
        stepper.step()
        time.sleep(0.1)
        dist.all_reduce(torch.ones(2))


def checkpoint(rank: int, world_size: int, plan: FaultPlan) -> None:
    """Rank 0 writes a checkpoint for as long as it says."""
    stepper = Stepper()
    for step in plan.batches(range(STEPS), rank):
        dist.all_reduce(torch.ones(8))
        if rank == 0 and step == 5:
            with rankcall.expect(60, "checkpoint 5"):
                time.sleep(1.5 * HANG_AFTER_S)
        stepper.step()


def compiles(rank: int, world_size: int, plan: FaultPlan) -> None:
    """All ranks compile in turn, each having said so."""
    stepper = Stepper()
    for step in plan.batches(range(STEPS), rank):
        if step == 4:
            with rankcall.expect(60, "torch.compile"):
                time.sleep(0.7 * HANG_AFTER_S * rank)
        dist.all_reduce(torch.ones(8))
        stepper.step()


def overdue_checkpoint(rank: int, world_size: int, plan: FaultPlan) -> None:
    """Rank 0 says half a second, and takes for ever."""
    stepper = Stepper()
    for step in plan.batches(range(STEPS), rank):
        dist.all_reduce(torch.ones(8))
        if rank == 0 and step == 5:
            with rankcall.expect(0.5, "checkpoint 5"):
                time.sleep(3600)
        stepper.step()


def slow_start(rank: int, world_size: int, plan: FaultPlan) -> None:
    """The first step takes one rank long."""
    stepper = Stepper()
    for step in plan.batches(range(STEPS), rank):
        if rank == 1 and step == 0:
            time.sleep(1.5 * HANG_AFTER_S)
        dist.all_reduce(torch.ones(8))
        stepper.step()


def long_compute(rank: int, world_size: int, plan: FaultPlan) -> None:
    """Steps of a fifth of the threshold, and one of them longer than the threshold."""
    stepper = Stepper()
    for step in plan.batches(range(STEPS // 2), rank):
        time.sleep(HANG_AFTER_S * (1.4 if rank == 2 and step == 6 else 0.2))
        dist.all_reduce(torch.ones(8))
        stepper.step()


def lopsided(rank: int, world_size: int, plan: FaultPlan) -> None:
    """Rank 0 evaluates after each epoch, while the others wait for less than the threshold."""
    stepper = Stepper()
    for step in plan.batches(range(STEPS), rank):
        dist.all_reduce(torch.ones(8))
        stepper.step()
        if rank == 0 and step % 4 == 3:
            time.sleep(0.4)
        if step % 4 == 3:
            dist.barrier()


def late_joiner(rank: int, world_size: int, plan: FaultPlan) -> None:
    """One rank comes to the rendezvous late (the program makes the group itself)."""
    if rank == world_size - 1:
        time.sleep(1.5 * HANG_AFTER_S)
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=120))
    plain(rank, world_size, plan)


def evaluates(rank: int, world_size: int, plan: FaultPlan) -> None:
    """Train, then count the correct answers; a rank with less data arrives there first."""
    stepper = Stepper()
    for _ in plan.batches(range(STEPS), rank):
        dist.all_reduce(torch.ones(64))
        stepper.step()
    dist.all_reduce(torch.ones(2, dtype=torch.int64))


def fails_in_turn(rank: int, world_size: int, plan: FaultPlan) -> None:
    """Survivors of a death fail one after the other, each a moment later than the one before."""
    try:
        plain(rank, world_size, plan)
    except RuntimeError:
        time.sleep(0.3 * rank)
        raise


def stays(rank: int, world_size: int, plan: FaultPlan) -> None:
    """Let a rank that has run out of data go on alone, with a long report."""
    plain(rank, world_size, plan)
    time.sleep(3600 if any(fault.kind == "exhaust" for fault in plan.faults) else 0)


def own_store(rank: int, world_size: int, plan: FaultPlan, meeting: str, name: str) -> Any:
    """Run a program with a store that rank 0 hosts, as without torchrun."""
    place = Path(meeting)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, True, wait_for_workers=False)
        scratch = place.with_suffix(".part")
        scratch.write_text(str(store.port))
        scratch.rename(place)
    else:
        while not place.exists():
            time.sleep(0.01)
        port = int(place.read_text())
        store = dist.TCPStore("127.0.0.1", port, world_size, False, wait_for_workers=False)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return globals()[name](rank, world_size, plan)
