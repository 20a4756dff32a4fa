"""Plain collectives: every op, alone, batched, functional and never waited for."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from samejob.job import TIMEOUT, Job
from samejob.registry import all_gather_into_tensor, program, random_tensor, reduce_scatter_tensor

Op = Callable[[Job, bool], tuple[Any, list[torch.Tensor]]]
_OPS: list[Op] = []


def _op(function: Op) -> Op:
    _OPS.append(function)
    return function


@_op
def _broadcast(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    tensor = random_tensor(job.rank, 5)
    return dist.broadcast(tensor, src=1, async_op=async_op), [tensor]


@_op
def _all_reduce(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    tensor = random_tensor(job.rank, 3, 4)
    return dist.all_reduce(tensor, async_op=async_op), [tensor]


@_op
def _all_reduce_max(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    tensor = random_tensor(job.rank, 7).bfloat16()
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

    tensors = [random_tensor(job.rank, 3), random_tensor(job.rank, 5, seed=1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return all_reduce_coalesced(tensors, async_op=async_op), tensors


@_op
def _reduce(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    tensor = random_tensor(job.rank, 6)
    work = dist.reduce(tensor, dst=0, async_op=async_op)
    return work, [tensor] if job.rank == 0 else []


@_op
def _all_gather(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    into = [torch.empty(4) for _ in range(job.world_size)]
    return dist.all_gather(into, random_tensor(job.rank, 4), async_op=async_op), into


@_op
def _all_gather_into_tensor(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    into = torch.empty(4 * job.world_size)
    work = all_gather_into_tensor(into, random_tensor(job.rank, 4), async_op=async_op)
    return work, [into]


@_op
def _all_gather_coalesced(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    from torch.distributed.distributed_c10d import all_gather_coalesced

    ins = [random_tensor(job.rank, 2), random_tensor(job.rank, 3, seed=1)]
    outs = [[torch.empty_like(tensor) for tensor in ins] for _ in range(job.world_size)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        work = all_gather_coalesced(outs, ins, async_op=async_op)
    return work, [tensor for row in outs for tensor in row]


@_op
def _gather(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    into = [torch.empty(4) for _ in range(job.world_size)] if job.rank == 1 else None
    work = dist.gather(random_tensor(job.rank, 4), into, dst=1, async_op=async_op)
    return work, into or []


@_op
def _scatter(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    into = torch.empty(4)
    parts = (
        [random_tensor(number, 4) for number in range(job.world_size)] if job.rank == 0 else None
    )
    return dist.scatter(into, parts, src=0, async_op=async_op), [into]


@_op
def _reduce_scatter(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    into = torch.empty(4)
    parts = [random_tensor(job.rank, 4, seed=number) for number in range(job.world_size)]
    return dist.reduce_scatter(into, parts, async_op=async_op), [into]


@_op
def _reduce_scatter_tensor(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    into = torch.empty(4)
    whole = random_tensor(job.rank, 4 * job.world_size)
    return reduce_scatter_tensor(into, whole, async_op=async_op), [into]


@_op
def _all_to_all(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    into = [torch.empty(3) for _ in range(job.world_size)]
    parts = [random_tensor(job.rank, 3, seed=number) for number in range(job.world_size)]
    return dist.all_to_all(into, parts, async_op=async_op), into


@_op
def _all_to_all_single(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    gives, takes = [1, 2], [job.rank + 1] * 2
    into = torch.empty(sum(takes), 3)
    whole = random_tensor(job.rank, sum(gives), 3)
    return dist.all_to_all_single(into, whole, takes, gives, async_op=async_op), [into]


@_op
def _barrier(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    return dist.barrier(async_op=async_op), []


@_op
def _send_recv(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    tensor = random_tensor(job.rank, 5)
    if job.rank == 0:
        return (dist.isend if async_op else dist.send)(tensor, 1), []
    return (dist.irecv if async_op else dist.recv)(tensor, 0), [tensor]


@_op
def _recv_any_source(job: Job, async_op: bool) -> tuple[Any, list[torch.Tensor]]:
    tensor = random_tensor(job.rank, 5)
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
        outputs = {
            "sum": funcol.all_reduce(random_tensor(job.rank, 4), "sum", world),
            "all": funcol.all_gather_tensor(random_tensor(job.rank, 4), 0, world),
            "part": funcol.reduce_scatter_tensor(random_tensor(job.rank, 4), "sum", 0, world),
            "swap": funcol.all_to_all_single(random_tensor(job.rank, 4), None, None, world),
        }
        for name, tensor in outputs.items():
            job.saw(f"{name} {half}", funcol.wait_tensor(tensor))
        never = funcol.reduce_scatter_tensor(random_tensor(job.rank, 4), "sum", 0, world)
        del never, outputs, tensor
        if half == 0:
            job.middle()


@program()
def batches(job: Job) -> None:
    """Batches of sends and receives, and coalesced collectives."""
    from torch.distributed.distributed_c10d import _coalescing_manager

    peer = 1 - job.rank
    for half in range(2):
        sent, got = random_tensor(job.rank, 6), torch.empty(6)
        ops = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, got, peer)]
        for number, work in enumerate(dist.batch_isend_irecv(ops)):
            job.watch(f"Work {number} of batch {half}", work)
            work.wait()
        job.saw(f"received {half}", got)
        tensors = [random_tensor(job.rank, 3, seed=seed) for seed in range(3)]
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
        shared = [mine, half] if job.rank == 0 else [None, None]
        dist.broadcast_object_list(shared, src=0)
        job.saw(f"broadcast_object_list {half}", shared)
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
    """Asynchronous ops that are never waited for, and whose tensors are dropped at once."""
    for number in range(160):
        total, whole, part = torch.ones(1 << 15), torch.ones(1 << 16), torch.empty(1 << 15)
        works = [
            dist.all_reduce(total, async_op=True),
            reduce_scatter_tensor(part, whole, async_op=True),
        ]
        if number % 40 == 0:
            for name, tensor in (("total", total), ("whole", whole), ("part", part)):
                job.watch(f"{name} {number}", tensor)
            for work in works:
                job.watch(f"a Work of {number}", work)
        del total, whole, part, works
        if number % 8 == 7:
            dist.barrier()
        if number == 79:
            job.middle()
