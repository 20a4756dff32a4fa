"""Hangs in which every rank has issued the call: its device is what does not go on."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from recorded_jobs import RecordedJob, RecordedJobs, torch_version
from simulated_devices import Fault

# The fault strikes before the loop, or in it. The hosts run ahead of their devices until its end.
LOOP = """
init(); x = torch.ones(64, device="cuda")
dist.all_reduce(x); torch.cuda.synchronize(); wait_told("ordered")
{until_struck}
for _ in range(300):
    x.mul_(1.0); dist.all_reduce(x); time.sleep(0.005)
{then}
"""
# The fault must not strike between the start of a call, as the back end sees it, and the operation
# itself. So rank 1 goes on only once a kernel of its device has not begun for so long.
UNTIL_STRUCK = """
def is_struck():
    y.add_(1); event = torch.cuda.Event(); event.record()
    end = time.monotonic() + 2
    while time.monotonic() < end and not event.query(): time.sleep(0.01)
    return not event.query()
y = torch.ones(1, device="cuda"); side = torch.cuda.Stream()
with torch.cuda.stream(side):
    if rank == 1: wait_until(is_struck)
"""
WAIT = 'wait_told("end"); os._exit(0)'
# With TORCH_NCCL_ENABLE_TIMING=1, ProcessGroupNCCL tells which op its device has started last. The
# back end of torch 2.15, ProcessGroupNCCL2, does not.
HAS_STARTS = torch_version() < (2, 15)
TELLS_STARTS = pytest.mark.skipif(not HAS_STARTS, reason="this torch's back end tells no starts")
WATCH = 'from rankcall import watch\nwatch.start(hang_after=3, on_hang="abort")\n'


def stall(jobs: RecordedJobs, program: str, scope: str = "all", **env: str) -> RecordedJob:
    """Start a job on two ranks, and let rank 1's device start no more operations.

    With the scope ``nccl``, it starts no more of NCCL's: its stream does come to each of them, and
    that is what the back end calls a start.
    """
    job = jobs.start(2, program.replace("{until_struck}", UNTIL_STRUCK * (scope == "all")), **env)
    job.wait_for(lambda rows: rows.filter(seq=1).height == 2)
    job.faults.order(Fault("stall", rank=1, scope=scope))
    job.tell("ordered")
    return job


def findings(job: RecordedJob) -> list[dict[str, Any]]:
    """Return what diagnose finds, once all calls have been issued and some are overdue."""
    job.wait_for(lambda rows: rows.filter(seq=301).height == 2)
    found = job.command("diagnose", "--json", "--hang-after", "0.2").stdout
    result: list[dict[str, Any]] = json.loads(found)["findings"]
    return result


def oldest_in_flight(job: RecordedJob) -> list[int]:
    """Return the numbers of each rank's oldest call that has not ended."""
    rows = job.records()
    rows = rows.filter(rows["completed_ns"].is_null())
    return [rows.filter(rank=rank)["seq"].min() for rank in (0, 1)]


@TELLS_STARTS
def test_a_device_that_never_starts_is_named(jobs: RecordedJobs) -> None:
    """With the back end's timing, the rank whose device has not started the call is named."""
    job = stall(jobs, LOOP.replace("{then}", WAIT), TORCH_NCCL_ENABLE_TIMING="1")
    while not (found := findings(job)) or found[0]["kind"] != "missing":
        # Each rank reads the status once a second.
        assert time.monotonic() < job.job.deadline, found
    one = found[0]
    assert (one["kind"], one["ranks"], one["victims"]) == ("missing", [1], [0])
    assert [one["seq"]] * 2 == oldest_in_flight(job)
    fact = one["facts"][0]
    assert (fact["relation"], fact["others"]["ranks"]) == ("not_started", [0])
    job.tell("end")
    job.job.succeed()


@pytest.mark.parametrize("timing", ["0"] if HAS_STARTS else ["0", "1"])
def test_without_starts_it_says_what_it_cannot_tell(
    jobs: RecordedJobs, capture: str, timing: str
) -> None:
    """Both ranks have issued the call, and nothing tells which device has started it."""
    env = {"RANKCALL_CAPTURE": capture, "TORCH_NCCL_ENABLE_TIMING": timing}
    job = stall(jobs, LOOP.replace("{then}", WAIT), **env)
    (one,) = findings(job)
    assert (one["kind"], one["ranks"]) == ("stuck", [])
    assert one["facts"][0]["relation"] == "start_unknown"
    job.tell("end")
    job.job.succeed()


@TELLS_STARTS
def test_devices_that_both_started(jobs: RecordedJobs) -> None:
    """If both have started the call, the transfer itself is stuck, and no rank is named."""
    job = stall(jobs, LOOP.replace("{then}", WAIT), "nccl", TORCH_NCCL_ENABLE_TIMING="1")
    # At first, the last end on the device is younger than the threshold, and nothing is found.
    while not (found := findings(job)) or found[0]["facts"][0]["relation"] != "stuck_transfer":
        assert time.monotonic() < job.job.deadline, found
    (one,) = found
    assert (one["kind"], one["ranks"], one["victims"]) == ("stuck", [], [0, 1])
    job.tell("end")
    job.job.succeed()


@pytest.mark.parametrize("timing", ["0", "1"])
def test_the_watcher_speaks_and_ends_the_job(jobs: RecordedJobs, timing: str) -> None:
    """With ``on_hang="abort"``, a device that never starts its op ends the job, on all ranks."""
    program = WATCH + LOOP.replace("{then}", "torch.cuda.synchronize()")
    job = stall(jobs, program, TORCH_NCCL_ENABLE_TIMING=timing)
    ranks = job.job.wait()
    assert all(rank.status not in (0, None) for rank in ranks), job.job.report()
    told = "\n".join(rank.output for rank in ranks)
    if timing == "1" and HAS_STARTS:
        assert "missing: Rank 1" in told
        assert "has not started all_reduce" in told
    else:
        assert "stuck (possible): All 2 ranks have issued all_reduce" in told
        assert "Whether each device has started it is not known." in " ".join(told.split())
