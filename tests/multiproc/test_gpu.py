"""Device times on a real GPU: NCCL with one rank, Gloo with CUDA tensors on two.

They are skipped without a GPU. docs/performance.md says which of them ran, and on which GPU.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from ranks import run_ranks

pytestmark = pytest.mark.gpu


def drained(recording: Any) -> None:
    """Wait until every record has its end."""
    deadline = time.monotonic() + 20
    while len(set(recording.capture.counts())) > 1:
        assert time.monotonic() < deadline, recording.capture.counts()
        time.sleep(0.001)


def columns(recording: Any) -> list[dict[str, Any]]:
    """Return the records, as plain values."""
    import rankcall

    run = rankcall.load(recording.path)
    return run.records.select(
        "op", "status", "device", "device_ms", "enqueued_ns", "started_ns", "completed_ns"
    ).to_dicts()


def nccl(rank: int, world_size: int, folder: str, capture: str) -> list[dict[str, Any]]:
    """Record all_reduces on NCCL, each behind a known amount of other work on the stream."""
    import torch
    import torch.distributed as dist

    import rankcall

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
    tensor, weight = torch.ones(1 << 22, device="cuda"), torch.ones(1024, 1024, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    with rankcall.enable(folder, capture=capture) as recording:
        seen = []
        for async_op in (False, True):
            for _ in range(5):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                for _ in range(8):
                    weight @ weight
                begin.record()
                work = dist.all_reduce(tensor, async_op=async_op)
                if async_op:
                    work.wait()
                end.record()
                seen.append((begin, end))
                # So that the next op asks for this one's times.
                torch.cuda.synchronize()
                time.sleep(0.002)
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        drained(recording)
        records = columns(recording)[:-1]
    for record, (begin, end) in zip(records, seen, strict=True):
        record["witness_ms"] = begin.elapsed_time(end)
    dist.destroy_process_group()
    return records


@pytest.mark.parametrize("capture", ["native", "python"])
def test_nccl_times_come_from_the_device(capture: str, tmp_path: Any) -> None:
    """Device durations agree with CUDA events around the op; only the native recorder has them."""
    env = {"RANKCALL_DEVICE_TIMES": "1"}
    run_dir = str(tmp_path / "run")
    (records,) = run_ranks(nccl, 1, run_dir, capture, init=False, timeout=100, env=env)
    assert len(records) == 10
    for record in records:
        assert (record["op"], record["status"]) == ("all_reduce", "completed")
        assert record["device"] == "cuda:0"
        assert record["enqueued_ns"] < record["completed_ns"]
        if capture == "native":
            assert 0 < record["device_ms"] <= record["witness_ms"] + 0.2
        else:
            assert record["device_ms"] is None


def gloo(rank: int, world_size: int, folder: str) -> list[dict[str, Any]]:
    """Record Gloo's all_reduce of CUDA tensors."""
    import torch
    import torch.distributed as dist

    import rankcall

    tensor = torch.ones(1 << 16, device="cuda:0")
    with rankcall.enable(folder) as recording:
        for _ in range(5):
            dist.all_reduce(tensor)
        torch.cuda.synchronize()
        drained(recording)
        records = columns(recording)
    assert float(tensor[0]) == world_size**5
    return records


def test_gloo_with_cuda_tensors(tmp_path: Any) -> None:
    """Gloo's ops on CUDA tensors complete, on the device they ran on."""
    for records in run_ranks(gloo, 2, str(tmp_path / "run"), timeout=100):
        assert [record["status"] for record in records] == ["completed"] * 5
        assert {record["device"] for record in records} == {"cuda:0"}
        assert all(record["started_ns"] <= record["completed_ns"] for record in records)
