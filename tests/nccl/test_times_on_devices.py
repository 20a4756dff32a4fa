"""How long ops take on a device (RANKCALL_DEVICE_TIMES=1): which have a time, and what it is."""

from __future__ import annotations

import json

import polars as pl
from recorded_jobs import RecordedJob, RecordedJobs

ENV = {"RANKCALL_CAPTURE": "native", "RANKCALL_DEVICE_TIMES": "1"}
BEGIN = """
init(); x = torch.ones(64, device="cuda"); y = torch.ones(64, device="cuda")
dist.all_reduce(x); torch.cuda.synchronize()
"""
# Threads that issue look for the ends of earlier ops. So the last op makes those before it known.
END = """
torch.cuda.synchronize(); dist.all_reduce(x); torch.cuda.synchronize()
dist.destroy_process_group()
"""


def times(rows: pl.DataFrame, rank: int) -> list[float | None]:
    """Return how long the ops of a rank took, in issue order, without the first and the last."""
    return rows.filter(rank=rank).sort("index")["device_ms"].to_list()[1:-1]


def elapsed_ms(job: RecordedJob, rank: int) -> float:
    """Return the time that a rank has measured itself."""
    (line,) = [one for one in job.job.ranks[rank].output.splitlines() if one[:8] == "ELAPSED "]
    return float(json.loads(line[8:])) * 1e3


def test_each_op_is_timed(jobs: RecordedJobs) -> None:
    """An op that was waited for has a time, and the times are not longer than all took together.

    Ten ops are issued one behind the other, as DDP issues its buckets. All of their first events
    are reached at once, but an op's time begins when the one before it has ended.
    """
    job = jobs.run(
        2,
        BEGIN
        + """
for _ in range(4): x.mul_(1.0); dist.all_reduce(x)
torch.cuda.synchronize(); dist.barrier(); torch.cuda.synchronize()
big = torch.ones(1 << 18, device="cuda"); torch.cuda.synchronize(); began = time.perf_counter()
works = [dist.all_reduce(big, async_op=True) for _ in range(10)]
for work in works: work.wait()
torch.cuda.synchronize(); say("ELAPSED", time.perf_counter() - began)
"""
        + END,
        SIMULATED_DEVICES_LINK_GBS="0.1",  # 10 ms for an op of 1 MiB, at the least
        **ENV,
    )
    for rank in (0, 1):
        found = times(job.records(), rank)
        assert len(found) == 4 + 1 + 10
        assert None not in found[:4] + found[5:]
        behind = [one for one in found[5:] if one is not None]
        # Were each to begin with its first event, they would be five times as long.
        assert 5 * 10 < sum(behind) <= elapsed_ms(job, rank)


def test_what_has_no_time(jobs: RecordedJobs) -> None:
    """An op that nobody waited for has no time, nor has one that is captured; others have one."""
    job = jobs.run(
        2,
        BEGIN
        + """
dist.all_reduce(x, async_op=True); torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph): dist.all_reduce(x, async_op=True).wait()
graph.replay(); torch.cuda.synchronize()
dist.all_reduce(x, async_op=True).wait()
"""
        + END,
        **ENV,
    )
    for rank in (0, 1):
        nobody, captured, waited = times(job.records(), rank)
        assert (nobody, captured) == (None, None)
        assert waited is not None


def test_a_hung_op_has_no_time_and_is_in_flight(jobs: RecordedJobs) -> None:
    """Device times do not end a record: what hangs, and what is behind it, stays in flight."""
    job = jobs.start(
        2,
        BEGIN
        + """
dist.all_reduce(x, async_op=True).wait(); torch.cuda.synchronize()
if rank == 0:
    for _ in range(4): dist.all_reduce(x, async_op=True).wait()  # rank 1 does not come
say("hangs"); wait_told("end"); os._exit(0)
""",
        **ENV,
    )
    job.job.wait_for("hangs", 0)
    job.wait_for(lambda rows: rows.filter(status="completed").height == 4)
    rows = job.after_a_look().filter(rank=0).sort("index")
    assert rows["completed_ns"].is_null().to_list() == [False] * 2 + [True] * 4
    assert rows["device_ms"].is_null().to_list() == [False] * 2 + [True] * 4
    job.tell("end")
    job.job.succeed()


def test_events_that_fail_cost_times_only(counted_jobs: RecordedJobs) -> None:
    """An op whose events cannot be made is followed all the same, and the next one is timed."""
    job = counted_jobs.run(
        2,
        BEGIN
        + """
counter.calls_fail_events(1)
for _ in range(3): dist.all_reduce(x, async_op=True).wait()
torch.cuda.synchronize(); counter.calls_fail_events(0)
dist.all_reduce(x, async_op=True).wait()
"""
        + END,
        **ENV,
    )
    rows = job.records()
    assert (rows["status"] == "completed").all()
    for rank in (0, 1):
        *failed, timed = times(rows, rank)
        assert failed == [None] * 3
        assert timed is not None
