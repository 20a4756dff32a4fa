"""Small training programs; each runs on four ranks under recording.

A program returns what its test needs beside the records, as JSON. All programs run in one set of
processes, each in a recording of its own.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from world import here, wait_until

Program = Callable[[int], Any]
PROGRAMS: dict[str, Program] = {}
STEPS = 2


def program(function: Program) -> Program:
    """List a program."""
    PROGRAMS[function.__name__] = function
    return function


def _model(layers: int = 3) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))


def _digest(tensors: Any) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _batch(rank: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))


def _train(model: nn.Module, rank: int, optimizer: Any = None) -> dict[str, Any]:
    """Take some steps; return the lines of forward and backward()."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    lines = {}
    for _ in range(STEPS):
        lines["forward"] = here()
        loss = model(_batch(rank)).square().mean()
        lines["backward"] = here()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return lines


@program
def ddp(rank: int) -> Any:
    """Small buckets, so that the reducer issues several from C++."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(_model(), bucket_cap_mb=0.002)
    lines = _train(model, rank)
    return {**lines, "digest": _digest(model.parameters())}


@program
def fsdp2(rank: int) -> Any:
    """Each layer a unit of its own, and the root."""
    from torch.distributed.fsdp import fully_shard

    model = _model()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    lines = _train(model, rank)
    local = [parameter.to_local() for parameter in model.parameters()]
    return {**lines, "digest": _digest(local)}


@program
def hsdp(rank: int) -> Any:
    """Sharded in pairs, replicated across them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(_model(1), mesh=mesh)
    return _train(model, rank)


@program
def tensor_parallel(rank: int) -> Any:
    """A column-wise and a row-wise layer: one all_reduce forward, one backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = parallelize_module(
        _model(2), init_device_mesh("cpu", (4,)), {"0": ColwiseParallel(), "1": RowwiseParallel()}
    )
    batch = _batch(0).requires_grad_()
    forward = here()
    loss = model(batch).square().mean()
    loss.backward()
    return {"forward": forward, "backward": forward + 1}


@program
def dtensor(rank: int) -> Any:
    """The three redistributions that move data."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (4,))
    whole = torch.arange(64.0).reshape(8, 8)
    sharded = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    line = here()
    same = sharded.redistribute(mesh, [Replicate()]).to_local()
    columns = sharded.redistribute(mesh, [Shard(1)]).to_local()
    total = DTensor.from_local(whole, mesh, [Partial()]).redistribute(mesh, [Replicate()])
    assert torch.equal(same, whole)
    assert torch.equal(columns, whole[:, 2 * rank : 2 * rank + 2])
    assert torch.equal(total.to_local(), 4 * whole)
    return {"line": line}


@program
def pipeline(rank: int) -> Any:
    """Four stages, four microbatches: activations forward, gradients back."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    device = torch.device("cpu")
    stage = PipelineStage(_model(1), rank, 4, device)
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
    if rank == 0:
        schedule.step(torch.ones(8, 16))
    elif rank == 3:
        schedule.step(target=torch.zeros(8, 16))
    else:
        schedule.step()
    return None


@program
def compiled(rank: int) -> Any:
    """A graph with a collective in it: traced once, recorded when it runs."""
    import torch.distributed._functional_collectives as funcol

    def double_sum(tensor: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(tensor * 2, "sum", dist.group.WORLD) + 1

    run = torch.compile(double_sum, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        result = run(torch.ones(5))
        assert torch.equal(result, torch.full((5,), 9.0))
    return {"line": double_sum.__code__.co_firstlineno}


@program
def zero(rank: int) -> Any:
    """Each rank owns a part of the optimizer and broadcasts what it updated."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    return _train(model, rank, optimizer)


@program
def threads(rank: int) -> Any:
    """Two threads issue at the same time, each on a group of its own."""
    groups = [dist.new_group(list(range(4)), group_desc=name) for name in ("left", "right")]
    lines = [0, 0]

    def work(which: int) -> None:
        for number in range(100):
            tensor = torch.full((which + 1,), float(number))
            lines[which] = here()
            dist.all_reduce(tensor, group=groups[which])
            assert tensor[0] == 4 * number

    workers = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
    return {"line": lines[0], "groups": [group.group_name for group in groups]}


@program
def groups(rank: int) -> Any:
    """Every way to make groups; one op on each."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    made = {
        "pair": dist.new_subgroups(2)[0],
        "by list": dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])[0],
        "dp": mesh.get_group("dp"),
        "tp": mesh.get_group("tp"),
        "local": dist.new_group([2, 0], use_local_synchronization=True) if rank in (0, 2) else None,
    }
    for group in made.values():
        if group is not None:
            dist.all_reduce(torch.ones(1), group=group)
    return {
        name: {"label": group.group_name, "ranks": dist.get_process_group_ranks(group)}
        for name, group in made.items()
        if group is not None
    }


@program
def not_run(rank: int) -> Any:
    """Meta and fake tensors go nowhere; only the real all_reduce is recorded."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.ones(3)
        try:
            dist.all_reduce(fake)
        except (RuntimeError, NotImplementedError):
            pass  # torch may have no fake implementation: then nothing ran either
    try:
        dist.all_reduce(torch.ones(3, device="meta"))
    except (RuntimeError, NotImplementedError, ValueError):
        pass
    line = here()
    dist.all_reduce(torch.ones(3))
    return {"line": line}


@program
def fork(rank: int) -> Any:
    """A forked child issues ops on a group that needs no threads, and takes its exit handlers."""
    made = dist.new_group([rank], backend="fake", use_local_synchronization=True)
    dist.all_reduce(torch.ones(2))
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            import rankcall
            from rankcall.capture import session

            for _ in range(3):
                dist.all_reduce(torch.ones(2), group=made)
            rankcall.disable()
            status = 0 if session.current() is None else 2
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    dist.all_reduce(torch.ones(2))
    return None


@program
def data_loader(rank: int) -> Any:
    """Worker processes load while the parent trains."""
    from torch.utils.data import DataLoader

    # A rank of these tests is a daemon of multiprocessing, which may have no children.
    multiprocessing.current_process()._config["daemon"] = False
    loader = DataLoader(list(range(8)), batch_size=2, num_workers=1, multiprocessing_context="fork")
    total = torch.tensor(0)
    for batch in loader:
        part = batch.sum()
        dist.all_reduce(part)
        total += part
    assert total == 4 * 28
    return None


def run_programs(rank: int, world_size: int, run_dir: str, names: list[str], record: bool) -> Any:
    """Run programs one after the other; return for each what it told, and what torch saw of it."""
    import warnings

    import witness

    import rankcall

    outcomes, seen = {}, 0
    for name in names:
        recording = rankcall.enable(f"{run_dir}/{name}") if record else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = PROGRAMS[name](rank)
        dist.barrier()
        if recording is not None:
            _settled(recording)
            rankcall.disable()
        entries = witness.torch_saw()
        outcomes[name] = {"value": value, "torch_saw": entries[seen:]}
        seen = len(entries)
    return json.loads(json.dumps(outcomes))


def _settled(recording: Any) -> None:
    """Wait for the ends that the back end's threads still have to write."""
    wait_until(lambda: recording.capture.counts()[0] == recording.capture.counts()[1])
