"""Back ends that are written in Python and make Works of their own."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from samejob.job import Job
from samejob.registry import program, random_tensor


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
        tensor = random_tensor(job.rank, 3)
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
        tensor = random_tensor(job.rank, 3)
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
