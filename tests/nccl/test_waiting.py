"""Who waits for whom on devices: from the devices' own times, and never from issue times."""

from __future__ import annotations

import json
from typing import Any

import pytest
from recorded_jobs import RecordedJobs
from simulated_devices import Fault

# 40 steps. Each computes on the device for a while, and the hosts run ahead of it. The communicator
# is made with the group: if it were made by the first all_reduce, the rank that comes to it first
# would wait there for as long as the other one takes to come, some 200 ms on a busy machine.
STEPS = """
init(device_id=torch.device("cuda", rank)); x = torch.ones(64, device="cuda")
parameter = torch.nn.Parameter(torch.ones(1)); optimizer = torch.optim.SGD([parameter], lr=0.1)
dist.all_reduce(x); torch.cuda.synchronize()
for step in range(40):
    for _ in range(4): x.mul_(1.0)
    if rank == 1: time.sleep({host_s})
    dist.all_reduce(x)
    parameter.grad = torch.ones(1); optimizer.step()
    if step % 5 == 4: torch.cuda.synchronize()
wait_told("end")
dist.destroy_process_group()
"""


def report(jobs: RecordedJobs, *, slow: bool, host_s: float = 0.0, **env: str) -> dict[str, Any]:
    """Run the steps and return the report; if ``slow``, rank 1's device takes 20 times as long.

    ``late_ms`` is added: for each rank, and each five steps, by how much its ops took less on its
    device than the other rank's, which came earlier and waited.
    """
    code = STEPS.format(host_s=host_s)
    faults = [Fault("slow", rank=1, factor=20)] if slow else []
    job = jobs.start(2, code, faults=faults, SIMULATED_DEVICES_KERNEL_US="500", **env)
    job.wait_for(lambda rows: rows.filter(status="completed").height == 82)
    job.tell("end")
    job.job.succeed()
    result: dict[str, Any] = json.loads(job.command("report", "--json").stdout)
    result["late_ms"] = [[0.0] * 8, [0.0] * 8]
    for (seq,), op in job.records().group_by("seq"):
        took = op.sort("rank")["device_ms"].to_list()
        if None not in took:
            steps = max(0, seq - 2) // 5  # the first op is none of a step
            result["late_ms"][took.index(min(took))][steps] += max(took) - min(took)
    return result


@pytest.mark.parametrize("slow", [True, False])
def test_the_slow_device_is_named_by_device_times(jobs: RecordedJobs, slow: bool) -> None:
    """A slow device keeps the other rank waiting; a slow host in front of busy devices does not."""
    host_s = 0.0 if slow else 0.001
    found = report(jobs, slow=slow, host_s=host_s, RANKCALL_DEVICE_TIMES="1")
    by_rank = {row["rank"]: row for row in found["stragglers"]}
    assert found["run"]["times"]["device"] >= 30
    if slow:
        # 4 kernels of 10 ms against 4 of 0.5 ms in each step. On a busy machine the device of rank
        # 0 is held up as well, for as long as its own times say.
        assert sum(found["late_ms"][1]) > 30 * 25
        for rank in (0, 1):
            late_ms = pytest.approx(sum(found["late_ms"][rank]), rel=0.1, abs=20)
            assert by_rank[rank]["caused_wait_ms"] == late_ms
        # A rank that is held up as often as the slow one is no less to blame.
        if all(slow_ms > 5 * ms for ms, slow_ms in zip(*found["late_ms"], strict=True)):
            assert found["headline"].startswith("Rank 1 "), found["late_ms"]
    else:  # 1 ms of rank 1's host in each step, before 2 ms of its device
        assert by_rank[1]["issued"] < 10


@pytest.mark.parametrize("slow", [True, False])
def test_issue_times_are_no_waiting(jobs: RecordedJobs, slow: bool) -> None:
    """Without device times, no rank is said to have waited or to have caused waiting."""
    found = report(jobs, slow=slow, host_s=0.002)
    assert found["run"]["times"]["unknown"] == 41
    assert found["run"]["waiting_ms"] is None
    assert {row["caused_wait_ms"] for row in found["stragglers"]} == {None}
    assert found["comm_share"]["overall"] is None
    for table in ("collectives", "call_sites"):  # nor do calls take no time in all
        assert {row["total_ms"] for row in found[table]} == {None}
    assert found["headline"] == "How long the ranks wait for each other is not known."
