"""Loops inside Join that end early, late or not together, or that ranks begin differently."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn

from join_programs.scenario import Log, Lying, Scenario, batches, sharded, train
from rankcall.join import Join


def _lying(rank: int, log: Log, real: int, promised: int, policy: str = "shadow") -> None:
    loader = Lying(batches(real if rank == 1 else 6))
    loader.said = promised if rank == 1 else 6
    net = log.model()
    with Join([net], on_exhausted=policy) as join:  # type: ignore[arg-type]
        log.began = time.time()
        for batch in join.batches(loader):
            log.began = time.time()
            train(net, log, batch, join.weight)


def too_short(rank: int, log: Log) -> None:
    """Rank 1 promised 6 batches and has 3."""
    _lying(rank, log, 3, 6)


def too_short_replayed(rank: int, log: Log) -> None:
    """The same under replay."""
    _lying(rank, log, 3, 6, "replay")


def too_long(rank: int, log: Log) -> None:
    """Rank 1 promised 3 batches and has 6."""
    _lying(rank, log, 6, 3)


def too_long_replayed(rank: int, log: Log) -> None:
    """The same under replay: known once the last of all has been handed out."""
    _lying(rank, log, 6, 3, "replay")


def short_in_the_tail(rank: int, log: Log) -> None:
    """Rank 1 promised 6 and has 4, when rank 0 has run dry already: nothing is wrong."""
    loader = Lying(batches({0: 2, 1: 4, 2: 6}[rank]))
    loader.said = {0: 2, 1: 6, 2: 6}[rank]
    net = log.model()
    with Join([net]) as join:
        for batch in join.batches(loader):
            train(net, log, batch)
    log.more["shadowed"] = [rank_summary.shadowed for rank_summary in join.summary.ranks]


def one_breaks(rank: int, log: Log) -> None:
    """Rank 1 leaves the loop early, alone."""
    _one_breaks(rank, log, log.model(), "shadow")


def one_breaks_in_fsdp(rank: int, log: Log) -> None:
    """The same where ranks replay."""
    _one_breaks(rank, log, sharded(), "replay")


def _one_breaks(rank: int, log: Log, net: nn.Module, policy: str) -> None:
    with Join([net], on_exhausted=policy) as join:  # type: ignore[arg-type]
        for batch in join.batches(batches(6)):
            train(net, log, batch, join.weight)
            if rank == 1 and log.steps == 3:
                log.began = time.time()
                break


def all_break(rank: int, log: Log) -> None:
    """Leave at the same step on all ranks, twice, as with a limit on the number of steps."""
    net = log.model()
    with Join([net]) as join:
        for _ in range(2):
            for batch in join.batches(batches(6 + rank)):
                train(net, log, batch)
                if log.steps % 3 == 0:
                    break
    total = torch.ones(1)
    dist.all_reduce(total)
    log.more["sum"] = total.item()


def all_break_in_the_second_epoch(rank: int, log: Log) -> None:
    """Leave the second epoch at the same step, after a first one in which ranks shadowed."""
    net = log.model()
    with Join([net]) as join:
        for epoch in range(2):
            for batch in join.batches(batches(2 + rank)):
                train(net, log, batch)
                if epoch == 1:
                    break


def breaks_in_the_tail(rank: int, log: Log) -> None:
    """Rank 0 has run dry; rank 1 then leaves its loop and shadows, too."""
    net = log.model()
    with Join([net]) as join:
        for batch in join.batches(batches(2 if rank == 0 else 6)):
            train(net, log, batch)
            if rank == 1 and log.steps == 4:
                break
    log.more["shadowed"] = [rank_summary.shadowed for rank_summary in join.summary.ranks]


def nothing_to_replay(rank: int, log: Log) -> None:
    """Rank 1 has no batch and was given no example."""
    with Join(group=dist.group.WORLD, on_exhausted="replay") as join:
        for _ in join.batches(batches(0 if rank == 1 else 3)):
            log.steps += 1


def nothing_on_one_rank(rank: int, log: Log) -> None:
    """Rank 1 has no batch: stop ends before the first, raise raises before it."""
    for policy in ("stop", "raise"):
        for loader in (batches(0 if rank == 1 else 3), iter(batches(0 if rank == 1 else 3))):
            with Join(group=dist.group.WORLD, on_exhausted=policy) as join:  # type: ignore[arg-type]
                for _ in join.batches(loader):
                    log.steps += 1
            log.more["stopped"] = log.more.get("stopped", 0) + 1


def different_settings(rank: int, log: Log) -> None:
    """Rank 1 text stop, the others replay."""
    with Join(group=dist.group.WORLD, on_exhausted="stop" if rank == 1 else "replay") as join:
        for _ in join.batches(batches(3)):
            log.steps += 1


def different_shares(rank: int, log: Log) -> None:
    """Declare that ranks 0 and 1 have the same data, and give them different numbers of batches."""
    pair, alone = dist.new_group([0, 1]), dist.new_group([2])
    with Join(
        group=dist.group.WORLD, on_exhausted="replay", same_data=alone if rank == 2 else pair
    ) as join:
        log.began = time.time()
        for _ in join.batches(batches(3 + rank)):
            log.steps += 1
            dist.barrier()


SCENARIOS: list[Scenario] = [
    too_short,
    too_short_replayed,
    too_long,
    too_long_replayed,
    short_in_the_tail,
    one_breaks,
    one_breaks_in_fsdp,
    all_break,
    all_break_in_the_second_epoch,
    breaks_in_the_tail,
    nothing_to_replay,
    nothing_on_one_rank,
    different_settings,
    different_shares,
]
