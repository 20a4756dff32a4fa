"""Training in parallel, in the ways that torch brings along."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from samejob.job import Job
from samejob.registry import program, random_tensor, small_model

STEPS = 2


def _train(job: Job, model: nn.Module, clip: bool = False, seed: int = 0) -> None:
    """Take some steps; tell losses and norms, and the parameters at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        loss = model(random_tensor(job.rank, 4, 16, seed=seed + step)).square().mean()
        loss.backward()
        job.saw(f"loss {step}", loss)
        if clip:
            job.saw(f"norm {step}", nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            job.middle()
    job.saw("parameters", list(model.parameters()))
    for number, parameter in enumerate(model.parameters()):
        job.watch(f"parameter {number}", getattr(parameter, "_local_tensor", parameter))


@program()
def ddp(job: Job) -> None:
    """Buckets small enough that the reducer issues several from C++."""
    _train(job, nn.parallel.DistributedDataParallel(small_model(), bucket_cap_mb=0.002))


@program()
def fsdp2(job: Job) -> None:
    """Each layer a unit of its own and the root, with the norm of the gradients clipped."""
    from torch.distributed.fsdp import fully_shard

    model = small_model()
    for layer in model:
        fully_shard(layer)
    _train(job, fully_shard(model), clip=True)


@program(world_size=4)
def hsdp(job: Job) -> None:
    """Sharded in pairs, replicated across them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = torch.get_default_device().type
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard"))
    _train(job, fully_shard(small_model(2), mesh=mesh), clip=True)


@program()
def tensor_parallel(job: Job) -> None:
    """A column-wise and a row-wise layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(torch.get_default_device().type, (2,))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    _train(job, parallelize_module(small_model(2), mesh, plan))


@program()
def pipeline(job: Job) -> None:
    """Two stages, four microbatches: activations forward, gradients back."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    module = small_model(1)
    stage = PipelineStage(module, job.rank, 2, torch.get_default_device())
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
    for step in range(STEPS):
        if job.rank == 0:
            schedule.step(random_tensor(0, 8, 16, seed=step))
        else:
            losses: list[torch.Tensor] = []
            schedule.step(target=torch.zeros(8, 16), losses=losses)
            job.saw(f"losses {step}", losses)
        if step == 0:
            job.middle()
    job.saw("gradients", [parameter.grad for parameter in module.parameters()])


@program()
def compiled(job: Job) -> None:
    """A graph with collectives in it, traced once and run several times."""
    import torch.distributed._functional_collectives as funcol

    def scaled_sum(tensor: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(tensor * 2, "sum", dist.group.WORLD) + 1

    run = torch.compile(scaled_sum, backend="aot_eager", fullgraph=True)
    for number in range(4):
        job.saw(f"output {number}", run(random_tensor(job.rank, 5, seed=number)))
        if number == 1:
            job.middle()
    torch._dynamo.reset()
