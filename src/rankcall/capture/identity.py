"""Who this process is in its job: rank, world size, node and attempt, as far as it knows."""

from __future__ import annotations

import contextlib
import os

from rankcall.errors import local_rank
from rankcall.process import host_name
from rankcall.ring.writer import Identity


def own_identity(
    rank: int | None = None, world_size: int | None = None, first_attempt: int = 0
) -> Identity:
    """Return the identity of this process; a number that it does not know is -1.

    torch's default group says the rank, if there is one and no rank is given. Launchers set
    ``RANK`` and ``WORLD_SIZE`` before there is a group, but a program may create its group with
    other numbers. So these variables count only until then.

    Args:
        rank: The rank, if the caller knows it.
        world_size: The number of ranks, with ``rank``.
        first_attempt: The number of the job's attempt before any restart.
    """
    import torch.distributed as dist

    if rank is None and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    return Identity(
        rank=_number("RANK") if rank is None else rank,
        world_size=_number("WORLD_SIZE") if world_size is None else world_size,
        local_rank=local_rank(),
        node=_number("GROUP_RANK", "SLURM_NODEID"),
        attempt=first_attempt + restart_count(),
        host=host_name(),
    )


def restart_count() -> int:
    """Return how often torchrun has restarted this job."""
    return _number("TORCHELASTIC_RESTART_COUNT", default=0)


def _number(*names: str, default: int = -1) -> int:
    """Return the first of these environment variables that is a number."""
    for name in names:
        with contextlib.suppress(ValueError):
            return int(os.environ.get(name, ""))
    return default
