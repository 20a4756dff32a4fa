"""What the ranks of the RPC tests share: coming up, and looking at what is there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

BACKENDS = ("ZMQ", "TENSORPIPE")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Run on both back ends."""
    return str(request.param)


def come_up(rank: int, world_size: int | None, backend: str, name: str = "", **kwargs: Any) -> None:
    """Be worker ``w<rank>`` of a static group, or of a dynamic one if there is no world size."""
    from rankcall import rpc

    kwargs.setdefault("rpc_timeout", 30)
    if world_size is None:
        os.environ.pop("WORLD_SIZE", None)
        kwargs.setdefault("init_method", f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}")
    options = rpc.construct_rpc_backend_options(rpc.BackendType[backend], **kwargs)
    rpc.init_rpc(name or f"w{rank}", backend, rank, world_size, options)


def hurry() -> None:
    """Let init_rpc fail sooner than its shortest deadline."""
    from rankcall.rpc import deadlines

    deadlines._SHORTEST_INIT_S = 1.0


def aside() -> Any:
    """Return a store beside the group's, for the ranks to take turns by."""
    from datetime import timedelta

    import torch.distributed as dist

    port = int(os.environ["MASTER_PORT"])
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=40))


def names() -> set[str]:
    """Return the names of the members, as this worker knows them."""
    from torch.distributed.rpc import api

    return {info.name for info in api._get_current_rpc_agent().get_worker_infos()}


def metrics() -> dict[str, int]:
    """Return the agent's counters."""
    from torch.distributed.rpc import api

    debug_info = api._get_current_rpc_agent().get_debug_info()
    return {key.removeprefix("agent."): int(float(value)) for key, value in debug_info.items()}


def blocks() -> int:
    """Return how many shared-memory blocks there are on this host."""
    walk = os.walk(os.environ["RANKCALL_SHM"])  # other workers' folders come and go meanwhile
    return sum(name.isdigit() for _, _, files in walk for name in files)


def sockets() -> int:
    """Return how many sockets this process has open."""
    held = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            held += os.readlink(link).startswith("socket:")
        except OSError:
            continue  # that of the listing itself
    return held


def threads() -> int:
    """Return how many threads this process has, native ones included."""
    return len(list(Path("/proc/self/task").iterdir()))
