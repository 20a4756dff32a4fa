"""Collectives that fail, and ranks that end before their time."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from samejob.job import Job
from samejob.registry import all_gather_into_tensor, program, random_tensor, reduce_scatter_tensor


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
        tensor = random_tensor(job.rank, 3)
        dist.all_reduce(tensor)
        job.saw(f"{half} sum", tensor)
        if half == "first":
            job.middle()


@program()
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
        tensor = random_tensor(job.rank, 2)
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
    tensor = random_tensor(job.rank, 3)
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
    tensor = random_tensor(job.rank, 3)
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
    dist.all_reduce(random_tensor(job.rank, 3))
    job.middle()
    dist.barrier()
    if job.rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    os._exit(5)
