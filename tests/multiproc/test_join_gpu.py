"""Join on GPUs: uneven inputs over NCCL; its abort reaches a rank that waits; SyncBatchNorm."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.multiproc]


def uneven(rank: int, world_size: int, device: str, model: str, policy: str) -> dict[str, Any]:
    """Train on uneven inputs: rank 0 has three batches, and rank 1 has five."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from rankcall.join import Join

    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(7)
    net: Any = torch.nn.Linear(4, 2).to(device)
    if model == "fsdp2":
        fully_shard(net, mesh=init_device_mesh(device, (world_size,)))
    else:
        net = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(rank)
    loader = [batch.to(device) for batch in torch.randn(3 + 2 * rank, 8, 4)]
    joined = [net, optimizer] if policy == "shadow" else [net]
    with Join(joined, on_exhausted=policy) as join:
        for batch in join.batches(loader):
            optimizer.zero_grad()
            (net(batch).square().mean() * join.weight).backward()
            optimizer.step()
    whole = [getattr(one, "full_tensor", lambda one=one: one)() for one in net.parameters()]
    assert join.summary is not None
    parts = [(one.batches, one.shadowed, one.replayed) for one in join.summary.ranks]
    dist.destroy_process_group()
    return {"weights": [one.detach().cpu().flatten().tolist() for one in whole], "parts": parts}


# The batches of each rank, the iterations that it shadowed, and the batches that it replayed.
PARTS = {
    "shadow": [[3, 2, 0], [5, 0, 0]],
    "replay": [[3, 0, 2], [5, 0, 0]],
    "stop": [[3, 0, 0], [3, 0, 0]],
}


@pytest.mark.parametrize(
    ("model", "policy"), [*(("ddp", policy) for policy in PARTS), ("fsdp2", "replay")]
)
def test_uneven_inputs_on_nccl(model: str, policy: str) -> None:
    """On NCCL, each policy trains as it does on Gloo on the CPU. Needs two GPUs."""
    needs_two()
    args = (model, policy)
    first, second = run_ranks(uneven, 2, "cuda", *args, init=False, timeout=100)
    on_cpu, _ = run_ranks(uneven, 2, "cpu", *args, init=False, timeout=100)
    assert first == second
    assert first["parts"] == on_cpu["parts"] == PARTS[policy]
    for found, wanted in zip(first["weights"], on_cpu["weights"], strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)


def needs_two() -> None:
    """Skip the test if there are not two GPUs."""
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


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
    needs_two()
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
