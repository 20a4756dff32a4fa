"""Join on real GPUs: NCCL's abort reaches a rank that waits; SyncBatchNorm under replay."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.multiproc]


def fails_on_nccl(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 1 fails while rank 0 waits for its gradients."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from rankcall.join import Join

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    net = DistributedDataParallel(torch.nn.Linear(4, 4).cuda())
    try:
        with Join([net]) as join:
            for step, data in enumerate(join.batches([torch.ones(2, 4).cuda()] * 6)):
                if (rank, step) == (1, 3):
                    raise KeyError("no such sample")
                net(data).sum().backward()
                torch.cuda.synchronize()
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {}


def test_a_failure_reaches_a_rank_that_waits_on_nccl() -> None:
    """On NCCL, the abort ends the collective of a waiting rank. Needs two GPUs."""
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    waiting, failing = run_ranks(fails_on_nccl, 2, init=False, timeout=100)
    assert failing["error"] == "KeyError"
    assert waiting["error"] == "PeerError"
    assert "no such sample" in waiting["text"]


def synchronised(rank: int, world_size: int) -> list[list[float]]:
    """Replay under torch's SyncBatchNorm, over Gloo, on one GPU."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from rankcall.join import Join

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    net = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(plain).to("cuda:0"))
    with Join([net], on_exhausted="replay") as join:
        for data in join.batches([torch.randn(3, 4).to("cuda:0")] * (2 + rank)):
            (net(data).square().mean() * join.weight).backward()
    assert join.summary is not None
    counts = [float(rank_summary.replayed) for rank_summary in join.summary.ranks]
    return [counts, net.module[1].running_mean.tolist()]


def test_sync_batch_norm_is_replayed() -> None:
    """Replay under SyncBatchNorm ends, with the same statistics on all ranks."""
    first, second = run_ranks(synchronised, 2, timeout=100)
    assert first == second
    assert first[0] == [1.0, 0.0]
