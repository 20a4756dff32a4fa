"""A barrier that one rank does not come to: every other rank is told who is missing.

    torchrun --nproc-per-node 4 examples/barrier_missing.py

The rank asleep is the last but one (``--asleep`` names others). All others print the error after
``--timeout`` seconds, and end.
"""

from __future__ import annotations

import argparse
import os
import time

import torch.distributed as dist

from rankcall import store
from rankcall.errors import BarrierTimeout


def main() -> None:
    """Come to a barrier, or sleep through it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timeout", type=float, default=3.0, help="seconds")
    parser.add_argument("--asleep", type=int, nargs="*", help="ranks that do not come in time")
    options = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    asleep = [max(0, world_size - 2)] if options.asleep is None else options.asleep
    tcp, *_ = next(dist.rendezvous("env://", rank, world_size))

    store.barrier(tcp, world_size, "epoch-0", rank=rank)  # all come to the first one
    if rank in asleep:
        time.sleep(options.timeout + 2)
        return
    try:
        store.barrier(tcp, world_size, "epoch-3", options.timeout, rank, what="before evaluation")
    except BarrierTimeout as error:
        print(error, flush=True)


if __name__ == "__main__":
    main()
