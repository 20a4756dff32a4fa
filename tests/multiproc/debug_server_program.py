"""One rank of a job in which rank 1 does not come; rank 0 shows it on torch's debug server.

Arguments: the run directory, the port of the server, and how its process is started.
"""

from __future__ import annotations

import sys
from typing import Any


def main() -> None:
    """Hang until the test says, through the job's store, that it has read the page."""
    import torch
    import torch.distributed as dist
    from torch.distributed.debug import start_debug_server, stop_debug_server

    import rankcall
    from rankcall.watch import DebugPage

    rankcall.enable(sys.argv[1])
    dist.init_process_group("gloo")
    rank, gradient = dist.get_rank(), torch.ones(8)
    dist.all_reduce(gradient)
    pages: list[Any] | None = None
    if rank == 0:
        pages = [DebugPage()]
    start_debug_server(
        port=int(sys.argv[2]),
        start_method=sys.argv[3],  # type: ignore[arg-type]
        handlers=pages,
    )
    store: Any = dist.distributed_c10d._get_default_store()
    if rank == 0:
        work = dist.all_reduce(gradient, async_op=True)
        print("issued", flush=True)
        sys.stdin.readline()
        store.set("read", "1")
    store.wait(["read"])
    if rank == 1:
        dist.all_reduce(gradient)
    else:
        work.wait()
        stop_debug_server()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
