"""Ranks that are asked to stop, by real signals."""

from __future__ import annotations

import itertools
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rankcall.join import Join


def asked_by_signal(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 1 gets SIGTERM in its second step, under each policy, in the first of two epochs.

    Return for each case the steps of the epochs, how many batches were drawn and not used, and a
    sum over the ranks after the block.
    """
    torch.set_num_threads(1)
    outcomes = {}
    for policy, kind in itertools.product(
        ("shadow", "replay", "stop", "raise"), ("known", "unknown")
    ):
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        loader = [torch.ones(2, 4)] * (40 + rank)
        steps = []
        with Join([model], on_exhausted=policy) as join:  # type: ignore[arg-type]
            signal.signal(signal.SIGTERM, lambda *_, join=join: join.stop())
            for _ in range(2):
                drawn = iter(loader)
                source: Any = drawn if kind == "unknown" else _Known(drawn, len(loader))
                steps.append(0)
                for batch in join.batches(source):
                    steps[-1] += 1
                    if rank == 1 and steps == [2]:
                        os.kill(os.getpid(), signal.SIGTERM)
                    (model(batch).sum() * join.weight).backward()
                if join.stopped:
                    break
        outcomes[f"{policy}, {kind}"] = {
            "steps": steps,
            "unused": len(loader) - steps[0] - len(list(drawn)),
            "stopped": join.stopped,
            "sum": _sum_of_ones(),
        }
    return outcomes


class _Known:
    """An iterator with a length."""

    def __init__(self, batches: Any, length: int) -> None:
        self._batches, self._length = batches, length

    def __iter__(self) -> Any:
        return self._batches

    def __len__(self) -> int:
        return self._length


def asked_while_shadowing(rank: int, world_size: int) -> list[Any]:
    """Rank 0 has one batch and the others have no end of them; only the signal ends the loop."""
    torch.set_num_threads(1)
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    steps = 0
    with Join([model]) as join:
        signal.signal(signal.SIGTERM, lambda *_: join.stop())
        inputs = torch.ones(2, 4)
        for batch in join.batches(iter([inputs]) if rank == 0 else itertools.repeat(inputs)):
            steps += 1
            if rank == 1 and steps == 20:
                os.kill(pids[0], signal.SIGTERM)
            model(batch).sum().backward()
        again = list(join.batches([inputs] * 3))
    assert join.summary is not None
    return [steps, join.stopped, len(again), join.summary.ranks[0].shadowed, _sum_of_ones()]


def asked_too_late(rank: int, world_size: int) -> list[Any]:
    """Rank 1 is asked in its last step of all, and after its block: neither ends a loop early."""
    torch.set_num_threads(1)
    steps = 0
    with Join(group=dist.group.WORLD, on_exhausted="stop") as join:
        for step, _ in enumerate(join.batches([0] * 3)):
            steps += 1
            if step == 2:
                dist.barrier()  # all ranks have begun it
                if rank == 1:
                    join.stop()
    with Join(group=dist.group.WORLD, on_exhausted="stop") as other:
        steps += len(list(other.batches([0] * 3)))
    join.stop()
    return [steps, _sum_of_ones(), join.stopped, other.stopped]


def ended_before_the_stop(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 1 is killed outside any collective; then rank 0 is asked to stop."""
    torch.set_num_threads(1)
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    try:
        with Join(group=dist.group.WORLD, on_exhausted="stop") as join:
            for step, _ in enumerate(join.batches([0] * 4)):
                if step == 1 and rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step == 1:
                    _wait_for_end(pids[1])
                    join.stop()
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "rank": error.rank}  # type: ignore[attr-defined]
    return {}


def _wait_for_end(pid: int) -> None:
    """Wait until a process has ended; it may be a zombie."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return
        except OSError:
            return
        time.sleep(0.01)


def _sum_of_ones() -> float:
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()
