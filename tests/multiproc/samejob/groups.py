"""Process groups that come and go, and threads that issue on several."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from samejob.job import Job
from samejob.registry import program, random_tensor, reduce_scatter_tensor


@program()
def subgroups(job: Job) -> None:
    """Groups that are made, used and destroyed in a loop."""
    for number in range(8):
        group = dist.new_group([0, 1], group_desc=f"number {number}")
        tensor = random_tensor(job.rank, 3, seed=number)
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
        tensor = random_tensor(job.rank, 3, seed=number)
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
        tensor = random_tensor(job.rank, number + 1)
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
