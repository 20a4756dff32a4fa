"""The scenarios of tests/multiproc, as they run on NCCL on simulated devices.

The programs, the faults and the causes are the same. Where NCCL behaves differently, the table
below says how, and what a diagnosis has to say then.
"""

from __future__ import annotations

import multiprocessing.forkserver
import os
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import scenario_programs
from faults_in_dispatch import FaultsInDispatch
from scenarios import ALL, Cause, Scenario, one

from rankcall.testing import FaultPlan
from rankcall.testing.spawn import fork_server

RANKS = 8  # at most
CAUSES: dict[str, tuple[Cause, ...]] = {
    # NCCL lets the call through. So the ranks go on, and later calls are other ones, too.
    "counts-first": one("desync", 2),
}
# NCCL lets these through, with wrong results, so nothing hangs. A diagnosis afterwards names them.
GO_THROUGH = ("skipped-op", "swapped")
LEFT_OUT = {
    "four-nodes-desync": "NCCL lets it through, and no watcher of several nodes looks afterwards",
    "stop-and-hang": "a stopped process stops its simulated device, before the other fault",
    "straggler": "without device times, waiting on devices is not known: see test_waiting.py",
    "straggler-clocks-apart": "the same",
    "straggler-rank-0-ddp": "the same",
    "slow-link": "the fault is a Work that ends late, and nobody waits for a Work on the host",
    "wrong-tag": "NCCL has no tags: the messages match",
}
# torch issues the collectives of tensor parallelism in C++, behind the mode that plants the faults.
NOT_NATIVE = ("tp-hang",)
FAST = (
    "python-hang",
    "three-deep",
    "fsdp2-hang",
    "stop-ddp",
    "data-run-out",
    "killed",
    "skipped-and-seen-late",
    "wrong-shape",
    "healthy",
    "checkpoint",
    "two-nodes-hang",
)


def on_devices(rank: int, world_size: int, plan: FaultPlan, program: str, *args: Any) -> None:
    """Run one of the programs with its tensors on a device and its groups on NCCL."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    torch.set_default_device("cuda")
    scenario_programs.BACKEND, scenario_programs.DEVICE = "nccl", "cuda"
    if program != "late_joiner":  # which makes the group itself
        dist.init_process_group("nccl", timeout=timedelta(seconds=300))
    native = os.environ["RANKCALL_CAPTURE"] == "native"
    with FaultsInDispatch(plan, rank) if native else nullcontext():
        getattr(scenario_programs, program)(rank, world_size, plan, *args)
    torch.cuda.synchronize()
    dist.destroy_process_group()


def _on_devices(scenario: Scenario) -> Scenario:
    return replace(
        scenario,
        program=on_devices,
        args=(scenario.program.__name__, *scenario.args),
        init=False,
        causes=CAUSES.get(scenario.name, scenario.causes),
        # Ranks whose peer has gone or disagrees get no error. They hang.
        ends=scenario.name in GO_THROUGH,
    )


ON_DEVICES = [_on_devices(scenario) for scenario in ALL if scenario.name not in LEFT_OUT]


def start_fork_server() -> None:
    """Have the ranks of ``start_ranks`` forked from a process on simulated devices.

    Raises:
        DevicesError: The installed torch cannot run on them.
    """
    from simulated_devices import environment

    with mock.patch.dict(os.environ, environment(gpus=RANKS, memory="1GiB")):
        fork_server()
        multiprocessing.forkserver.ensure_running()
