"""One rank on the simulated accelerator, whose device hangs; run as a script.

``device_ending.py HOW BACKEND RECORDING RUN_DIR [RANK]``: how it ends. "exit" leaves the
interpreter with ops in flight, and "disable" switches recording off before. "async" and "sync" say
which kind of ops to issue; the rank then reports that it is there and waits for a line. Rank 1 does
not issue the op in which rank 0 hangs.
"""

from __future__ import annotations

import sys
import time

import accelerator as sim
import torch
import torch.distributed as dist
from accelerator import Stream

import rankcall

OPS = 3


def main() -> None:
    """Issue ops on a device that hangs at once, and end."""
    how, backend, recording, run_dir, *rank_given = sys.argv[1:]
    rank = int(rank_given[0]) if rank_given else 0
    sim.start(rank, meeting=f"{run_dir}.store" if rank_given else "")
    if recording != "off":
        rankcall.enable(run_dir, capture=recording)
    sim.freeze()
    group, tensor = sim.new_group(backend), torch.ones(16, device=sim.DEVICE)
    for _ in range(OPS - 1):
        dist.all_reduce(tensor, group=group, async_op=how != "sync")
    sim.advance(1000.0)
    sim.tick()
    if rank == 0:
        sim.hang(Stream(0, 0))  # the stream that the op's input comes from
        dist.all_reduce(tensor, group=group, async_op=how != "sync")
    if how in ("async", "sync"):
        print("here", flush=True)
        sys.stdin.readline()
        rankcall.disable()
    elif how == "disable":
        began = time.monotonic()
        rankcall.disable()
        print(time.monotonic() - began)
    print("end", time.monotonic(), flush=True)


if __name__ == "__main__":
    main()
