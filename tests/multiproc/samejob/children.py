"""Jobs that start processes: data loaders, a fork, an elastic agent."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from samejob.job import TIMEOUT, Job
from samejob.registry import program, random_tensor, reduce_scatter_tensor


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
        _Numbers(),
        batch_size=2,
        num_workers=2 if start_method == "fork" else 1,
        multiprocessing_context=start_method,
    )
    for number, batch in enumerate(loader):
        total = batch.sum()
        dist.all_reduce(total)
        job.saw(f"sum {number}", total)
        if number == 2:
            job.middle()


@program()
def fork_loader(job: Job) -> None:
    """Forked processes load the batches."""
    _load(job, "fork")


@program(slow=True)
def spawn_loader(job: Job) -> None:
    """Spawned processes load the batches."""
    _load(job, "spawn")


@program()
def forked_child(job: Job) -> None:
    """A forked child drops the Work that it inherits, and ends by os._exit."""
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
        tensor = random_tensor(rank, size, seed=10 * attempt + turn)
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


@program(world_size=1, bare=True, quiet=True)
def elastic(job: Job) -> None:
    """An elastic agent restarts its two ranks once."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    # A store for each attempt: the addresses of the first attempt's groups are stale in the second.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        max_restarts=1,
        monitor_interval=0.05,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        run_id="same",
        start_method="fork",
        local_addr="127.0.0.1",
    )
    launched = elastic_launch(config, _elastic_rank)(str(job.folder), [job.mode_name, 5])
    job.saw("results", launched)
