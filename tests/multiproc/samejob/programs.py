"""The programs of the same-job test: what training code does with torch.distributed.

Each is a function of a ``Job``. It tells its results with ``job.saw``, names with ``job.watch``
what must not outlive it, and calls ``job.middle`` where recording is switched on late or off early.
``bare`` programs make and destroy their process groups, and start the recording, by themselves.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from samejob.job import TIMEOUT, Job

STEPS = 2
# Under the names that the installed torch does not warn of.
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
all_gather_into_tensor = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass(frozen=True)
class Program:
    """A program and how it is run.

    ``bare`` programs make their groups and start the recording by themselves. ``quiet`` ones do not
    report how much was recorded. Of ``heavy`` ones only two modes are in the short tests, and
    of ``slow`` ones none.
    """

    function: Callable[[Job], None]
    world_size: int = 2
    bare: bool = False
    quiet: bool = False
    heavy: bool = False
    slow: bool = False
    deadline: float = 90.0


PROGRAMS: dict[str, Program] = {}


def program(**options: Any) -> Callable[[Callable[[Job], None]], Callable[[Job], None]]:
    """List a program under its function's name."""

    def list_it(function: Callable[[Job], None]) -> Callable[[Job], None]:
        PROGRAMS[function.__name__] = Program(function, **options)
        return function

    return list_it


def warm_up() -> None:
    """Import what the programs and the recordings import, so that forked ranks have it."""
    import torch._dynamo
    import torch.distributed._functional_collectives
    import torch.distributed.device_mesh
    import torch.distributed.elastic.agent.server.local_elastic_agent
    import torch.distributed.fsdp
    import torch.distributed.launcher.api
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel
    import torch.nn.parallel
    import torch.utils.data  # noqa: F401

    import rankcall.capture.native
    import rankcall.capture.python
    import rankcall.capture.session  # noqa: F401


def _random(rank: int, *size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(1000 * seed + rank))


def _model(layers: int = 3) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))


# --- plain collectives ---


Op = Callable[[Job, bool], tuple[Any, list[torch.Tensor]]]
_OPS: list[Op] = []


def _op(function: Op) -> Op:
    _OPS.append(function)
    return function


@_op
def _broadcast(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    tensor = _random(job.rank, 5)
    return dist.broadcast(tensor, src=1, async_op=async_op), [tensor]


@_op
def _all_reduce(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    tensor = _random(job.rank, 3, 4)
    return dist.all_reduce(tensor, async_op=async_op), [tensor]


@_op
def _all_reduce_max(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    tensor = _random(job.rank, 7).bfloat16()
    return dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=async_op), [tensor]


@_op
def _all_reduce_bits(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    tensor = torch.arange(6) + 10 * job.rank
    return dist.all_reduce(tensor, dist.ReduceOp.BXOR, async_op=async_op), [tensor]


@_op
def _all_reduce_empty(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    tensor = torch.empty(0, 3)
    return dist.all_reduce(tensor, async_op=async_op), [tensor]


@_op
def _all_reduce_sparse(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    tensor = torch.eye(3).mul(job.rank + 1).to_sparse()
    work = dist.all_reduce(tensor, async_op=async_op)
    if work is not None:
        work.wait()
    return work, [tensor.to_dense()]


@_op
def _all_reduce_coalesced(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    from torch.distributed.distributed_c10d import all_reduce_coalesced

    tensors = [_random(job.rank, 3), _random(job.rank, 5, seed=1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return all_reduce_coalesced(tensors, async_op=async_op), tensors


@_op
def _reduce(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    tensor = _random(job.rank, 6)
    work = dist.reduce(tensor, dst=0, async_op=async_op)
    return work, [tensor] if job.rank == 0 else []


@_op
def _all_gather(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    into = [torch.empty(4) for _ in range(job.world_size)]
    return dist.all_gather(into, _random(job.rank, 4), async_op=async_op), into


@_op
def _all_gather_into_tensor(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    into = torch.empty(4 * job.world_size)
    work = all_gather_into_tensor(into, _random(job.rank, 4), async_op=async_op)
    return work, [into]


@_op
def _all_gather_coalesced(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    from torch.distributed.distributed_c10d import all_gather_coalesced

    ins = [_random(job.rank, 2), _random(job.rank, 3, seed=1)]
    outs = [[torch.empty_like(each) for each in ins] for _ in range(job.world_size)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        work = all_gather_coalesced(outs, ins, async_op=async_op)
    return work, [tensor for row in outs for tensor in row]


@_op
def _gather(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    into = [torch.empty(4) for _ in range(job.world_size)] if job.rank == 1 else None
    work = dist.gather(_random(job.rank, 4), into, dst=1, async_op=async_op)
    return work, into or []


@_op
def _scatter(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    into = torch.empty(4)
    parts = [_random(number, 4) for number in range(job.world_size)] if job.rank == 0 else None
    return dist.scatter(into, parts, src=0, async_op=async_op), [into]


@_op
def _reduce_scatter(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    into = torch.empty(4)
    parts = [_random(job.rank, 4, seed=number) for number in range(job.world_size)]
    return dist.reduce_scatter(into, parts, async_op=async_op), [into]


@_op
def _reduce_scatter_tensor(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    into = torch.empty(4)
    whole = _random(job.rank, 4 * job.world_size)
    return reduce_scatter_tensor(into, whole, async_op=async_op), [into]


@_op
def _all_to_all(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    into = [torch.empty(3) for _ in range(job.world_size)]
    parts = [_random(job.rank, 3, seed=number) for number in range(job.world_size)]
    return dist.all_to_all(into, parts, async_op=async_op), into


@_op
def _all_to_all_single(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    gives, takes = [1, 2], [job.rank + 1] * 2
    into = torch.empty(sum(takes), 3)
    whole = _random(job.rank, sum(gives), 3)
    return dist.all_to_all_single(into, whole, takes, gives, async_op=async_op), [into]


@_op
def _barrier(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    return dist.barrier(async_op=async_op), []


@_op
def _send_recv(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    tensor = _random(job.rank, 5)
    if job.rank == 0:
        return (dist.isend if async_op else dist.send)(tensor, 1), []
    return (dist.irecv if async_op else dist.recv)(tensor, 0), [tensor]


@_op
def _recv_any_source(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    tensor = _random(job.rank, 5)
    if job.rank == 1:
        return (dist.isend if async_op else dist.send)(tensor, 0, tag=4), []
    return (dist.irecv if async_op else dist.recv)(tensor, tag=4), [tensor]


@program()
def every_op(job: Job) -> None:
    """Each op, both synchronous and not: its result, and everything that its Work answers."""
    for half in ("first", "second"):
        for op in _OPS:
            for async_op in (False, True):
                name = f"{half} {op.__name__} {'async' if async_op else 'sync'}"
                returned, tensors = op(job, async_op)
                if isinstance(returned, dist.Work):
                    _saw_work(job, name, returned)
                    job.watch(f"Work of {name}", returned)
                elif isinstance(returned, torch._C.Future):
                    job.saw(f"{name}: value of the future", returned.wait())
                else:
                    job.saw(f"{name} returned", returned)
                job.saw(name, tensors)
                for number, tensor in enumerate(tensors):
                    job.watch(f"tensor {number} of {name}", tensor)
        if half == "first":
            job.middle()
    dist.monitored_barrier(timeout=TIMEOUT)


def _saw_work(job: Job, name: str, work: dist.Work) -> None:
    """Tell what a Work says of itself once it has been waited for."""
    job.saw(f"{name}: wait", work.wait())
    if "send" not in name and "recv" not in name:  # those wait for a second message
        job.saw(f"{name}: second wait", work.wait(timeout=timedelta(seconds=5)))
    job.saw(f"{name}: is_completed", work.is_completed())
    job.attempt(f"{name}: is_success", work.is_success)
    job.attempt(f"{name}: exception", work.exception)
    job.attempt(f"{name}: source", work._source_rank)
    job.attempt(f"{name}: synchronize", work.synchronize)
    job.attempt(f"{name}: result", work.result)
    job.attempt(f"{name}: duration", work._get_duration)
    job.attempt(f"{name}: future", lambda: work.get_future().value())


@program()
def functional(job: Job) -> None:
    """Functional collectives, whose Works live in a registry until their tensors are waited for."""
    import torch.distributed._functional_collectives as funcol

    for half in range(2):
        world = dist.group.WORLD
        made = {
            "sum": funcol.all_reduce(_random(job.rank, 4), "sum", world),
            "all": funcol.all_gather_tensor(_random(job.rank, 4), 0, world),
            "part": funcol.reduce_scatter_tensor(_random(job.rank, 4), "sum", 0, world),
            "swap": funcol.all_to_all_single(_random(job.rank, 4), None, None, world),
        }
        for name, tensor in made.items():
            job.saw(f"{name} {half}", funcol.wait_tensor(tensor))
        never = funcol.reduce_scatter_tensor(_random(job.rank, 4), "sum", 0, world)
        del never, made, tensor
        if half == 0:
            job.middle()


@program()
def batches(job: Job) -> None:
    """Batches of sends and receives, and coalesced collectives."""
    from torch.distributed.distributed_c10d import _coalescing_manager

    peer = 1 - job.rank
    for half in range(2):
        sent, got = _random(job.rank, 6), torch.empty(6)
        ops = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, got, peer)]
        for number, work in enumerate(dist.batch_isend_irecv(ops)):
            job.watch(f"Work {number} of batch {half}", work)
            work.wait()
        job.saw(f"received {half}", got)
        tensors = [_random(job.rank, 3, seed=seed) for seed in range(3)]
        with _coalescing_manager() as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        del manager
        job.saw(f"coalesced {half}", tensors)
        if half == 0:
            job.middle()


@program()
def objects(job: Job) -> None:
    """The calls that send pickles."""
    for half in range(2):
        mine = {"rank": job.rank, "text": "x" * (1 + 50 * job.rank)}
        gathered: list[Any] = [None] * job.world_size
        dist.all_gather_object(gathered, mine)
        job.saw(f"all_gather_object {half}", gathered)
        told = [mine, half] if job.rank == 0 else [None, None]
        dist.broadcast_object_list(told, src=0)
        job.saw(f"broadcast_object_list {half}", told)
        into = [None] * job.world_size if job.rank == 0 else None
        dist.gather_object(mine, into, dst=0)
        job.saw(f"gather_object {half}", into)
        part: list[Any] = [None]
        dist.scatter_object_list(part, [1, 2] if job.rank == 0 else None, src=0)
        job.saw(f"scatter_object_list {half}", part)
        swapped: list[Any] = [mine] if job.rank == 0 else [None]
        if job.rank == 0:
            dist.send_object_list(swapped, dst=1)
        else:
            dist.recv_object_list(swapped, src=0)
        job.saw(f"object list {half}", swapped)
        if half == 0:
            job.middle()


@program()
def unwaited(job: Job) -> None:
    """Asynchronous ops whose Works nobody waits for and whose tensors are dropped at once."""
    for number in range(160):
        total, whole, part = torch.ones(1 << 15), torch.ones(1 << 16), torch.empty(1 << 15)
        works = [
            dist.all_reduce(total, async_op=True),
            reduce_scatter_tensor(part, whole, async_op=True),
        ]
        if number % 40 == 0:
            for name, thing in (("total", total), ("whole", whole), ("part", part)):
                job.watch(f"{name} {number}", thing)
            for work in works:
                job.watch(f"a Work of {number}", work)
        del total, whole, part, works
        if number % 8 == 7:
            dist.barrier()
        if number == 79:
            job.middle()


# --- parallel training ---


def _train(job: Job, model: nn.Module, clip: bool = False, seed: int = 0) -> None:
    """Take some steps; tell losses and norms, and the parameters at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        loss = model(_random(job.rank, 4, 16, seed=seed + step)).square().mean()
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
    _train(job, nn.parallel.DistributedDataParallel(_model(), bucket_cap_mb=0.002))


@program()
def fsdp2(job: Job) -> None:
    """Each layer a unit of its own and the root, with the norm of the gradients clipped."""
    from torch.distributed.fsdp import fully_shard

    model = _model()
    for layer in model:
        fully_shard(layer)
    _train(job, fully_shard(model), clip=True)


@program(world_size=4, heavy=True)
def hsdp(job: Job) -> None:
    """Sharded in pairs, replicated across them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    _train(job, fully_shard(_model(2), mesh=mesh), clip=True)


@program()
def tensor_parallel(job: Job) -> None:
    """A column-wise and a row-wise layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2,))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    _train(job, parallelize_module(_model(2), mesh, plan))


@program()
def pipeline(job: Job) -> None:
    """Two stages, four microbatches: activations forward, gradients back."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    module = _model(1)
    stage = PipelineStage(module, job.rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
    for step in range(STEPS):
        if job.rank == 0:
            schedule.step(_random(0, 8, 16, seed=step))
        else:
            losses: list[torch.Tensor] = []
            schedule.step(target=torch.zeros(8, 16), losses=losses)
            job.saw(f"losses {step}", losses)
        if step == 0:
            job.middle()
    job.saw("gradients", [parameter.grad for parameter in module.parameters()])


@program(heavy=True)
def compiled(job: Job) -> None:
    """A graph with collectives in it, traced once and run several times."""
    import torch.distributed._functional_collectives as funcol

    def scaled_sum(tensor: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(tensor * 2, "sum", dist.group.WORLD) + 1

    run = torch.compile(scaled_sum, backend="aot_eager", fullgraph=True)
    for number in range(4):
        job.saw(f"output {number}", run(_random(job.rank, 5, seed=number)))
        if number == 1:
            job.middle()
    torch._dynamo.reset()


# --- process groups ---


@program()
def subgroups(job: Job) -> None:
    """Groups that are made, used and destroyed in a loop."""
    for number in range(8):
        group = dist.new_group([0, 1], group_desc=f"number {number}")
        tensor = _random(job.rank, 3, seed=number)
        dist.all_reduce(tensor, group=group)
        job.saw(f"sum {number}", tensor)
        work = reduce_scatter_tensor(torch.empty(2), torch.ones(4), group=group, async_op=True)
        if number % 2:
            work.wait()
        job.watch(f"group {number}", group)
        job.watch(f"Work {number}", work)
        dist.barrier(group=group)
        dist.destroy_process_group(group)
        del group, work
        if number == 3:
            job.middle()


@program(bare=True, deadline=120.0)
def reinit(job: Job) -> None:
    """Five jobs in one process, one after the other, on one port."""
    job.mode.start()
    for number in range(5):
        dist.init_process_group("gloo", timeout=timedelta(seconds=20))
        job.watch(f"group {number}", dist.group.WORLD)
        tensor = _random(job.rank, 3, seed=number)
        dist.all_reduce(tensor)
        job.saw(f"sum {number}", tensor)
        dist.barrier()
        dist.destroy_process_group()
        # Rank 0 has the store's server. Without this, rank 1 may still connect to the last one.
        if job.rank == 0:
            job.announce(f"store {number} is closed")
        job.await_event(f"store {number} is closed")
        if number == 2:
            job.middle()


@program()
def threads(job: Job) -> None:
    """Three threads issue on three groups while recording is switched off and on."""
    groups = [dist.new_group([0, 1], group_desc=f"of thread {number}") for number in range(3)]
    under_way = [threading.Event() for _ in groups]
    results: dict[str, Any] = {}

    def work(number: int) -> None:
        tensor = _random(job.rank, number + 1)
        try:
            for turn in range(400):
                dist.all_reduce(tensor, dist.ReduceOp.MAX, group=groups[number])
                reduce_scatter_tensor(
                    torch.empty(1), torch.ones(2), group=groups[number], async_op=True
                ).wait()
                if turn == 20:
                    under_way[number].set()
            results[f"tensor of thread {number}"] = tensor
        except Exception as error:
            results[f"tensor of thread {number}"] = error
        finally:
            under_way[number].set()

    workers = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for worker in workers:
        worker.start()
    for event in under_way:
        event.wait(60)
    job.middle(times=5)
    for worker in workers:
        worker.join(60)
    for name, value in results.items():
        job.saw(name, value)


@program(world_size=1, deadline=120.0)
def toggles(job: Job) -> None:
    """Threads issue without pause while recording is switched off and on many times."""
    group = dist.new_group([0], backend="fake")
    options = dist.AllreduceOptions()
    toggled, problems = threading.Event(), set()
    under_way = [threading.Event() for _ in range(3)]

    def work(number: int) -> None:
        tensor, turns = torch.ones(1), 0
        while turns < 2000 or not toggled.is_set():
            try:
                group.allreduce([tensor], options).wait()
            except RuntimeError as error:
                problems.add(str(error).splitlines()[0][:200])
            turns += 1
            if turns == 100:
                under_way[number].set()

    workers = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for worker in workers:
        worker.start()
    for event in under_way:
        event.wait(60)
    try:
        job.middle(times=30)
    finally:
        toggled.set()
    for worker in workers:
        worker.join(60)
    job.saw("errors", sorted(problems))


# --- child processes ---


def _of_worker(item: int) -> int:
    return 3 * item


class _Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Twelve tensors, each of which tells which dataset of the worker's it is from."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(_of_worker(index)))


def _load(job: Job, start_method: str) -> None:
    from torch.utils.data import DataLoader

    loader = DataLoader(
        _Numbers(), batch_size=2, num_workers=2 if start_method == "fork" else 1,
        multiprocessing_context=start_method,
    )  # fmt: skip
    for number, batch in enumerate(loader):
        total = batch.sum()
        dist.all_reduce(total)
        job.saw(f"sum {number}", total)
        if number == 2:
            job.middle()


@program()
def fork_loader(job: Job) -> None:
    """Forked processes load what is trained on."""
    _load(job, "fork")


@program(slow=True)
def spawn_loader(job: Job) -> None:
    """Spawned processes load what is trained on."""
    _load(job, "spawn")


@program()
def forked_child(job: Job) -> None:
    """A forked child drops what it inherits, and ends through the interpreter's exit handlers."""
    work = reduce_scatter_tensor(torch.empty(2), torch.ones(4), async_op=True)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            del work
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    job.saw("status of the child", os.waitpid(pid, 0)[1])
    job.saw("wait", work.wait())
    job.middle()
    dist.barrier()


def _elastic_rank(folder: str, shape: list[Any]) -> list[str]:
    """Be a rank of an elastic job: in the first attempt rank 1 fails between two collectives."""
    from samejob.job import plain
    from samejob.modes import mode_named

    mode_name, size = shape
    mode = mode_named(mode_name, Path(folder) / "elastic")
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    mode.start()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    results = []
    for turn in range(4):
        tensor = _random(rank, size, seed=10 * attempt + turn)
        dist.all_reduce(tensor)
        results.append(plain(tensor)["sha256"])
        if turn == 1:
            mode.toggle(1)
        if turn == 2 and attempt == 0:
            dist.barrier()
            if rank == 1:
                raise ValueError("rank 1 fails in the first attempt")
            threading.Event().wait(60)  # until the agent ends this rank
    dist.barrier()
    dist.destroy_process_group()
    assert mode.recorded() != 0, f"rank {rank} recorded nothing"
    return results


@program(world_size=1, bare=True, quiet=True, heavy=True)
def elastic(job: Job) -> None:
    """An elastic agent restarts its two ranks once."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    # A store for each attempt: the addresses of the first attempt's groups are stale in the second.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=1, monitor_interval=0.05,
        rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", run_id="same", start_method="fork",
        local_addr="127.0.0.1",
    )  # fmt: skip
    launched = elastic_launch(config, _elastic_rank)(str(job.folder), [job.mode_name, 5])
    job.saw("results", launched)


# --- errors ---


@program()
def errors(job: Job) -> None:
    """Wrong arguments, then a collective that works."""
    two = torch.ones(2)
    for half in ("first", "second"):
        for async_op in (False, True):
            name = f"{half} {'async' if async_op else 'sync'}"
            wrong: dict[str, tuple[Any, ...]] = {
                "average": (dist.all_reduce, two, dist.ReduceOp.AVG),
                "sizes of all_gather": (dist.all_gather, [torch.empty(3)] * 2, two),
                "dtype of all_gather": (dist.all_gather, [two, two], two.int()),
                "empty list": (dist.all_gather, [], two),
                "output of all_gather_into_tensor": (all_gather_into_tensor, torch.empty(3), two),
                "output of reduce_scatter": (reduce_scatter_tensor, torch.empty(3), two),
                "splits": (dist.all_to_all_single, torch.empty(2), two, [5, 5], [1, 1]),
                "root": (dist.broadcast, two, 7),
                "type": (dist.all_reduce, "no tensor"),
                "bool sum": (dist.all_reduce, two.bool(), dist.ReduceOp.PREMUL_SUM),
            }
            for what, (call, *arguments) in wrong.items():
                job.attempt(f"{name} {what}", call, *arguments, async_op=async_op)
        tensor = _random(job.rank, 3)
        dist.all_reduce(tensor)
        job.saw(f"{half} sum", tensor)
        if half == "first":
            job.middle()


@program(heavy=True)
def timeouts(job: Job) -> None:
    """Ops that a peer does not join, each on a group of its own: from the call and from wait()."""

    def impatient_group() -> Any:
        group = dist.new_group([0, 1])
        # Only now: the time-out of new_group() is also the one of connecting, which takes longer.
        c10d._set_pg_timeout(timedelta(milliseconds=50), group)
        return group

    for half in ("first", "second"):
        groups = [impatient_group() for _ in range(5)]
        message = impatient_group()
        tensor = _random(job.rank, 2)
        work = (dist.irecv, dist.isend)[job.rank](tensor, 1 - job.rank, message)
        job.saw(f"{half} wait for a message", work.wait())
        job.attempt(f"{half} second wait for a message", work.wait, _MOMENT)
        if job.rank == 0:
            _time_out(job, half, groups)
        del work
        dist.barrier()
        for group in [*groups, message]:
            dist.destroy_process_group(group)
        del group, groups, message
        if half == "first":
            job.middle()


_MOMENT = timedelta(milliseconds=50)


def _time_out(job: Job, half: str, groups: list[Any]) -> None:
    job.attempt(f"{half} all_reduce", dist.all_reduce, torch.ones(2), group=groups[0])
    work = dist.all_reduce(torch.ones(2), group=groups[1], async_op=True)
    job.attempt(f"{half} wait", work.wait)
    job.attempt(f"{half} is_success", work.is_success)
    _saw_error(job, f"{half} exception", work)
    work = reduce_scatter_tensor(torch.empty(1), torch.ones(2), group=groups[2], async_op=True)
    job.attempt(f"{half} wait for reduce_scatter", work.wait)
    job.attempt(f"{half} second wait for reduce_scatter", work.wait)
    _saw_error(job, f"{half} exception of reduce_scatter", work)
    work = dist.irecv(torch.ones(2), src=1, group=groups[3])
    job.attempt(f"{half} recv", work.wait, _MOMENT)
    job.attempt(f"{half} monitored_barrier", dist.monitored_barrier, groups[4], _MOMENT)


def _saw_error(job: Job, name: str, work: dist.Work) -> None:
    error = work.exception()
    job.saw(name, str(error))


@program()
def peer_leaves(job: Job) -> None:
    """Rank 1 ends without a word; rank 0 gets an error from its next collectives."""
    tensor = _random(job.rank, 3)
    dist.all_reduce(tensor)
    job.saw("sum", tensor)
    job.middle()
    if job.rank == 1:
        os._exit(3)
    job.attempt("all_reduce", dist.all_reduce, tensor)
    work = dist.all_reduce(tensor, async_op=True)
    job.attempt("wait", work.wait)
    job.attempt("send", dist.send, tensor, 1)
    job.attempt("reduce_scatter", reduce_scatter_tensor, torch.empty(1), torch.ones(2))
    sys.exit(4)


@program()
def exits(job: Job) -> None:
    """Rank 0 leaves by sys.exit, rank 1 by an exception; neither destroys its groups."""
    tensor = _random(job.rank, 3)
    dist.all_reduce(tensor)
    job.saw("sum", tensor)
    job.middle()
    work = dist.all_reduce(tensor, async_op=True)
    dist.barrier()
    if job.rank == 0:
        print("leaving with work in hand", work.is_completed() in (True, False))
        sys.exit(7)
    dist.all_gather([torch.empty(3), torch.empty(4)], tensor)


@program(quiet=True)
def killed(job: Job) -> None:
    """Rank 0 ends itself by a signal, rank 1 by os._exit."""
    dist.all_reduce(_random(job.rank, 3))
    job.middle()
    dist.barrier()
    if job.rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    os._exit(5)


# --- back ends in Python ---


class _OwnWork(dist.Work):
    """A Work of a user's back end, with an attribute and a method of its own."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.tensors = tensors
        self.note = "the caller's"

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def progress(self) -> float:
        """Return a number that no Work of torch's has."""
        return 0.5


class _OwnGroup(dist.ProcessGroup):
    """A process group in Python: torch calls its methods without any c10d op."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.made: list[_OwnWork] = []
        self._label = ""

    def setGroupName(self, name: str) -> None:  # torch's name
        """Keep the name that torch gives the group."""
        self._label = name

    def getGroupName(self) -> str:  # torch's name
        """Return the name that torch gave the group."""
        return self._label

    def getBackendName(self) -> str:  # torch's name
        """Return the name that this back end is registered by."""
        return "same_job_own"

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        """Double the tensors."""
        for tensor in tensors:
            tensor *= 2
        self.made.append(_OwnWork(tensors))
        return self.made[-1]


@program()
def python_group(job: Job) -> None:
    """A subclass of ProcessGroup: its caller gets the very Work that it made."""
    dist.Backend.register_backend(
        "same_job_own",
        lambda store, rank, size, timeout: _OwnGroup(store, rank, size, timeout),
        devices=["cpu"],
    )
    group = dist.new_group([0, 1], backend="same_job_own")
    for half in range(2):
        tensor = _random(job.rank, 3)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        job.saw(f"the same Work {half}", work is group.made[-1])
        _saw_own_work(job, str(half), work)
        job.saw(f"tensor {half}", tensor)
        job.watch(f"Work {half}", work)
        group.made.clear()
        dist.all_reduce(torch.ones(1))
        if half == 0:
            job.middle()
    del work
    dist.destroy_process_group(group)


def _saw_own_work(job: Job, name: str, work: Any) -> None:
    job.saw(f"type {name}", type(work).__qualname__)
    job.attempt(f"note {name}", lambda: work.note)
    job.attempt(f"progress {name}", lambda: work.progress())
    job.saw(f"wait {name}", work.wait())


@program()
def python_kernel(job: Job) -> None:
    """A back end that is a Python kernel of a c10d op: its caller gets the very Work it made."""
    made: list[_OwnWork] = []

    def double(keys: Any, tensors: list[torch.Tensor], *rest: Any) -> Any:
        for tensor in tensors:
            tensor *= 2
        made.append(_OwnWork(tensors))
        return tensors, made[-1].boxed()

    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("allreduce_", double, "CPU", with_keyset=True, allow_override=True)
    for half in range(2):
        tensor = _random(job.rank, 3)
        work = dist.all_reduce(tensor, async_op=True)
        job.saw(f"the same Work {half}", work is made[-1])
        _saw_own_work(job, str(half), work)
        job.saw(f"tensor {half}", tensor)
        job.watch(f"Work {half}", work)
        made.clear()
        if half == 0:
            job.middle()
    del work
    library._destroy()


# --- for the comparison's own tests ---


@program(deadline=8.0)
def probe(job: Job) -> None:
    """A little of everything that fake recordings break."""
    tensor = job.watch("tensor", _random(job.rank, 3))
    dist.all_reduce(tensor)
    job.saw("sum", tensor)
    job.middle()
    work = job.watch("Work", dist.all_reduce(tensor, async_op=True))
    job.saw("wait", work.wait())
    job.saw("type of the Work", type(work).__qualname__)
    job.attempt("root", dist.broadcast, tensor, src=7)
    print("probed")
