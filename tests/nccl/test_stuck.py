"""Hangs in which every rank has issued the call: its device is what does not go on."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from recorded_jobs import RecordedJob, RecordedJobs, torch_version
from simulated_devices import Fault, environment

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
# itself. So these ranks go on only once a kernel of their device has not begun for so long.
UNTIL_STRUCK = """
def is_struck():
    y.add_(1); event = torch.cuda.Event(); event.record()
    end = time.monotonic() + 2
    while time.monotonic() < end and not event.query(): time.sleep(0.01)
    return not event.query()
y = torch.ones(1, device="cuda"); side = torch.cuda.Stream()
with torch.cuda.stream(side):
    if rank in {stalled}: wait_until(is_struck)
"""
WAIT = 'wait_told("end"); os._exit(0)'
# With TORCH_NCCL_ENABLE_TIMING=1, ProcessGroupNCCL tells which op its device has started last. The
# back end of torch 2.15, ProcessGroupNCCL2, does not.
HAS_STARTS = torch_version() < (2, 15)
TELLS_STARTS = pytest.mark.skipif(not HAS_STARTS, reason="this torch's back end tells no starts")
WATCH = 'from rankcall import watch\nwatch.start(hang_after=3, on_hang="abort")\n'


def stall(
    jobs: RecordedJobs,
    program: str,
    *,
    size: int = 2,
    stalled: tuple[int, ...] = (1,),
    **env: str,
) -> RecordedJob:
    """Start a job, and let the devices of the ``stalled`` ranks start no more operations."""
    until_struck = UNTIL_STRUCK.replace("{stalled}", str(stalled))
    job = jobs.start(size, program.replace("{until_struck}", until_struck), **env)
    # The call before the loop is over, so that the fault does not strike in it.
    job.wait_for(lambda rows: rows.filter(seq=1, status="completed").height == size)
    for rank in stalled:
        job.faults.order(Fault("stall", rank=rank, scope="all"))
    job.tell("ordered")
    return job


def diagnosed(job: RecordedJob) -> dict[str, Any]:
    """Return what diagnose says, once all calls have been issued and some are overdue.

    Until a call is two seconds old, its end may not have been noticed, and nothing is found.
    """
    size = len(job.job.ranks)
    job.wait_for(lambda rows: rows.filter(seq=301).height == size)
    found: dict[str, Any] = {"findings": []}
    while not found["findings"]:
        assert time.monotonic() < job.job.deadline, job.job.report()
        found = json.loads(job.command("diagnose", "--json", "--hang-after", "0.2").stdout)
    return found


def findings(job: RecordedJob) -> list[dict[str, Any]]:
    """Return the findings of ``diagnosed``."""
    result: list[dict[str, Any]] = diagnosed(job)["findings"]
    return result


def oldest_in_flight(job: RecordedJob) -> list[int]:
    """Return the numbers of each rank's oldest call that has not ended."""
    rows = job.records()
    rows = rows.filter(rows["completed_ns"].is_null())
    return [rows.filter(rank=rank)["seq"].min() for rank in range(len(job.job.ranks))]


@TELLS_STARTS
@pytest.mark.parametrize(("size", "stalled"), [(2, (1,)), (3, (0,)), (4, (1, 2))])
def test_a_device_that_never_starts_is_named(
    jobs: RecordedJobs, size: int, stalled: tuple[int, ...]
) -> None:
    """With the back end's timing, the ranks whose devices have not started the call are named.

    Each rank stands in that one call, wherever the verdict speaks of it.
    """
    env = {"TORCH_NCCL_ENABLE_TIMING": "1"}
    job = stall(jobs, LOOP.replace("{then}", WAIT), size=size, stalled=stalled, **env)
    others = [rank for rank in range(size) if rank not in stalled]
    # Each rank reads the status once a second, so at first, not all starts are known.
    while True:
        found = diagnosed(job)
        (one,) = found["findings"]
        if (one["kind"], one["ranks"], one["victims"]) == ("missing", [*stalled], others):
            break
        assert time.monotonic() < job.job.deadline, found
        assert set(one["ranks"]) <= {*stalled}, found
        assert set(one["victims"]).isdisjoint(one["ranks"])
        known = {(row["stands"], row["seq"]) for row in found["ranks"]}
        # A rank that is late to look is said to be in no call.
        assert {(how, seq) for how, seq in known if how != "end_unknown"} == {("in", one["seq"])}
    assert one["facts"][0]["relation"] == "not_started"
    assert [one["seq"]] * size == oldest_in_flight(job)
    assert [row["seq"] for row in found["ranks"]] == [one["seq"]] * size
    job.tell("end")
    job.job.succeed()


@pytest.mark.parametrize("timing", ["0"] if HAS_STARTS else ["0", "1"])
@pytest.mark.parametrize(("size", "stalled"), [(2, (1,)), (4, (1, 2))])
def test_without_starts_it_says_what_it_cannot_tell(
    jobs: RecordedJobs, capture: str, timing: str, size: int, stalled: tuple[int, ...]
) -> None:
    """All ranks have issued the call, and nothing tells which devices have started it."""
    env = {"RANKCALL_CAPTURE": capture, "TORCH_NCCL_ENABLE_TIMING": timing}
    job = stall(jobs, LOOP.replace("{then}", WAIT), size=size, stalled=stalled, **env)
    (one,) = findings(job)
    assert (one["kind"], one["ranks"]) == ("stuck", [])
    assert one["facts"][0]["relation"] == "start_unknown"
    job.tell("end")
    job.job.succeed()


@TELLS_STARTS
def test_devices_that_both_started(jobs: RecordedJobs) -> None:
    """If both have started the call, the transfer itself is stuck, and no rank is named."""
    # With this scope, a stream comes to NCCL's operation though the device does not start it, and
    # that is what the back end calls a start. The second operation is the loop's first.
    job = jobs.start(
        2,
        LOOP.replace("{then}", WAIT).replace("{until_struck}", ""),
        faults=[Fault("stall", rank=1, scope="nccl", from_op=2)],
        TORCH_NCCL_ENABLE_TIMING="1",
    )
    job.tell("ordered")
    # Until each rank has looked, it may have left the call, or its device may not have started it.
    while True:
        (one,) = findings(job)
        assert (one["kind"], one["ranks"]) == ("stuck", [])
        if (one["facts"][0]["relation"], one["victims"]) == ("stuck_transfer", [0, 1]):
            break
        assert time.monotonic() < job.job.deadline, one
    job.tell("end")
    job.job.succeed()


@pytest.mark.parametrize("way", ["batch", "isend"])
def test_messages_that_do_not_get_through(jobs: RecordedJobs, capture: str, way: str) -> None:
    """Both ranks have issued a send and a receive, which do not end: no rank is to blame.

    The messages of a batch have no order, so neither rank waits for the other one's second message.
    """
    ops = "works = dist.batch_isend_irecv(ops)"
    if way == "isend":  # in this order: rank 1 has to receive first
        ops = "works = [op.op(op.tensor, op.peer) for op in ops[:: 1 - 2 * rank]]"
    # The operations are counted, so that the fault strikes the last exchange. A batch is one.
    struck = 1 + 4 * (2 if way == "isend" else 1)
    job = jobs.start(
        2,
        f"""
        init(); x = torch.ones(1 << 20, device="cuda"); y = x.clone()
        def exchange():
            ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)]
            {ops}
            for work in works: work.wait()
        for _ in range(4): exchange()
        torch.cuda.synchronize()
        exchange(); {WAIT}
        """,
        faults=[Fault("stall", rank=1, scope="nccl", from_op=struck)],
        RANKCALL_CAPTURE=capture,
    )
    job.wait_for(lambda rows: rows.height == 20)
    # Nobody knows the ends of batches on torch 2.15.
    kind = "stuck" if way == "isend" or HAS_STARTS else "no_progress"
    found: list[dict[str, Any]] = []
    while not found:
        assert time.monotonic() < job.job.deadline, job.job.report()
        found = json.loads(job.command("diagnose", "--json", "--hang-after", "1").stdout)[
            "findings"
        ]
    assert [(one["kind"], one["ranks"]) for one in found] == [(kind, [])]
    job.tell("end")
    job.job.succeed()


@pytest.mark.parametrize("timing", ["0", "1"])
@pytest.mark.parametrize(("size", "stalled"), [(2, (1,)), (4, (1, 2))])
def test_the_watcher_speaks_and_ends_the_job(
    jobs: RecordedJobs, timing: str, size: int, stalled: tuple[int, ...]
) -> None:
    """With ``on_hang="abort"``, devices that never start their op end the job, on all ranks."""
    program = WATCH + LOOP.replace("{then}", "torch.cuda.synchronize()")
    job = stall(jobs, program, size=size, stalled=stalled, TORCH_NCCL_ENABLE_TIMING=timing)
    ranks = job.job.wait()
    assert all(rank.status not in (0, None) for rank in ranks), job.job.report()
    told = " ".join(" ".join(rank.output for rank in ranks).split())
    if timing == "1" and HAS_STARTS:
        # The first verdict ends the job: a rank that has not looked by then is not in it.
        named = {"Rank 1", "Rank 2", "Ranks 1-2"} if len(stalled) > 1 else {"Rank 1"}
        assert any(f"missing: {ranks} " in told for ranks in named), told
        assert "has not started all_reduce" in told or "have not started all_reduce" in told
    else:
        assert f"stuck (possible): All {size} ranks have issued all_reduce" in told
        assert "Whether each device has started it is not known." in told


def test_what_nvml_knows_stands_beside_the_verdict(jobs: RecordedJobs) -> None:
    """A device of the node has had an error of its memory: diagnose says so without being asked.

    It says nothing of devices before there is trouble. That the device is none of the job's keeps
    the job's own calls of CUDA from failing, which would end it.
    """
    job = stall(jobs, LOOP.replace("{then}", WAIT))
    diagnosed(job)
    env = environment(gpus=4, faults=job.faults.folder)
    arguments = ("diagnose", "--hang-after", "0.2")
    assert "NVML" not in job.command(*arguments, env=env).stdout
    number = job.faults.order(Fault("ecc", device=3))
    shown = job.command(*arguments, env=env).stdout
    trouble = "device 3: 1 uncorrectable error of its memory since the driver was loaded"
    assert f"NVML: {trouble}" in shown
    node = json.loads(job.command(*arguments, "--json", env=env).stdout)["node"]
    assert node["devices"] == [trouble]
    job.faults.lift(number)
    job.faults.order(Fault("xid", device=3, code=79))
    assert (
        "NVML: device 3: The GPU has fallen off the bus" in job.command(*arguments, env=env).stdout
    )
    job.tell("end")
    job.job.succeed()
