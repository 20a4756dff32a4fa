"""How long ops take on a device (RANKCALL_DEVICE_TIMES=1): which have a time, and what it is."""

from __future__ import annotations

import json

import polars as pl
import pytest
from recorded_jobs import RecordedJob, RecordedJobs, torch_version

import rankcall

ENV = {"RANKCALL_CAPTURE": "native", "RANKCALL_DEVICE_TIMES": "1"}
# Threads that issue look for the ends of earlier ops, a millisecond after the last look at the
# earliest. So after `settle()`, the next op makes those before it known.
SETTLE = """
def settle(): torch.cuda.synchronize(); time.sleep(0.002)
"""
BEGIN = (
    SETTLE
    + """
init(); x = torch.ones(64, device="cuda"); y = torch.ones(64, device="cuda")
dist.all_reduce(x); settle()
"""
)
END = """
settle(); dist.all_reduce(x); torch.cuda.synchronize()
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
settle(); dist.barrier(); settle()
big = torch.ones(1 << 18, device="cuda"); settle(); began = time.perf_counter()
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
dist.all_reduce(x, async_op=True); settle()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph): dist.all_reduce(x, async_op=True).wait()
graph.replay(); settle()
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
dist.all_reduce(x, async_op=True).wait(); settle()
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
settle(); counter.calls_fail_events(0)
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


# More ops at a time than any test below has, so that their pairs of events are there: each keeps
# its own until it was waited for. From then on none can be made.
NO_MORE_EVENTS = """
works = [dist.all_reduce(x, async_op=True) for _ in range(8)]
for work in works: work.wait()
del work, works
for _ in range(2): settle(); dist.all_reduce(x)
settle(); counter.calls_fail_events(1)
"""


def test_events_are_used_again(counted_jobs: RecordedJobs) -> None:
    """Once there are as many pairs as ops in flight, none is made.

    Not for another stream, by another thread, after a group is destroyed, or beside Works that
    nobody waits for.
    """
    job = counted_jobs.run(
        2,
        BEGIN
        + "second = dist.new_group(); dist.all_reduce(x, group=second)\n"
        + NO_MORE_EVENTS
        + """
side = torch.cuda.Stream()
def issue():
    torch.cuda.set_device(rank)
    for _ in range(10): dist.all_reduce(x); settle()
for _ in range(10):
    dist.all_reduce(x, async_op=True).wait(); settle()
    work = dist.all_reduce(x, async_op=True); settle(); del work
with torch.cuda.stream(side): issue()
dist.destroy_process_group(second)
thread = threading.Thread(target=issue); thread.start(); thread.join(60)
assert not thread.is_alive()
"""
        + END,
        **ENV,
    )
    for rank in (0, 1):
        found = times(job.records(), rank)
        assert None not in found[:11]
        assert [one is None for one in found[11:31]] == [False, True] * 10
        assert len(found) == 11 + 20 + 20
        assert None not in found[31:]


def test_events_of_streams_that_are_gone_are_used_again(counted_jobs: RecordedJobs) -> None:
    """A program that makes a stream for each op needs no event for each stream."""
    job = counted_jobs.run(
        2,
        BEGIN
        + """
preloaded = os.environ["LD_PRELOAD"].split(":")
runtime = ctypes.CDLL(next(path for path in preloaded if "libcudart" in path))
def on_new_streams(count):
    for _ in range(count):
        handle = ctypes.c_void_p()
        assert runtime.cudaStreamCreateWithFlags(ctypes.byref(handle), 1) == 0
        with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
            dist.all_reduce(x); settle()
on_new_streams(80); counter.calls_fail_events(1); on_new_streams(80)
"""
        + END,
        **ENV,
    )
    for rank in (0, 1):
        found = times(job.records(), rank)
        assert len(found) == 160
        assert None not in found


def test_events_outlive_a_recording(counted_jobs: RecordedJobs) -> None:
    """A recording that is begun after another uses the events of that one."""
    job = counted_jobs.run(
        2,
        BEGIN
        + NO_MORE_EVENTS
        + """
rankcall.disable()
rankcall.enable(os.environ["RANKCALL_RUN_DIR"] + "-later")
dist.all_reduce(y)
for _ in range(5): dist.all_reduce(x); settle()
"""
        + END,
        **ENV,
    )
    later = rankcall.load(f"{job.run_dir}-later").records
    for rank in (0, 1):
        assert None not in times(later, rank)
        assert len(times(later, rank)) == 5


@pytest.mark.skipif(
    torch_version() >= (2, 15),
    reason="a group of this torch's back end has one device in a process",
)
def test_each_device_has_its_own_events(jobs: RecordedJobs) -> None:
    """A process that uses two devices in turn times the ops of both."""
    job = jobs.run(
        1,
        SETTLE
        + """
init(); tensors = [torch.ones(64, device=f"cuda:{device}") for device in (0, 1)]
for _ in range(6):
    for tensor in tensors: dist.all_reduce(tensor)
    for device in (0, 1): torch.cuda.synchronize(device)
x = tensors[0]
"""
        + END,
        **ENV,
    )
    rows = job.records().sort("index")
    assert rows["device"].to_list() == ["cuda:0", "cuda:1"] * 6 + ["cuda:0"]
    assert rows["device_ms"].is_null().to_list() == [False] * 12 + [True]


def test_an_op_waited_for_on_another_stream_is_timed(jobs: RecordedJobs) -> None:
    """Its time begins on the stream that issued it, and ends on the stream that waited for it."""
    job = jobs.run(
        2,
        BEGIN
        + """
side = torch.cuda.Stream()
for _ in range(3):
    works = [dist.all_reduce(x, async_op=True) for _ in range(2)]
    with torch.cuda.stream(side):
        for work in works: work.wait()
    dist.all_reduce(y)
    settle()
"""
        + END,
        SIMULATED_DEVICES_LINK_GBS="0.00001",  # 13 ms for an op of 256 bytes, at the least
        **ENV,
    )
    for rank in (0, 1):
        found = times(job.records(), rank)
        assert len(found) == 9
        assert all(one is not None and one > 5 for one in found)


def test_two_threads_that_issue_on_one_stream(jobs: RecordedJobs) -> None:
    """Their ops may be noted in another order than their events were recorded in.

    Then when the op before has ended is not known, and the op has no time. That is seldom: a thread
    has to lose its CPU between two statements.
    """
    job = jobs.run(
        1,
        BEGIN
        + """
groups = [dist.new_group(), dist.new_group()]
def issue(group):
    for _ in range(200): dist.all_reduce(torch.ones(64, device="cuda"), group=group)
threads = [threading.Thread(target=issue, args=[group]) for group in groups]
for thread in threads: thread.start()
for thread in threads: thread.join(200); assert not thread.is_alive()
"""
        + END,
        **ENV,
    )
    found = times(job.records(), 0)
    assert len(found) == 400
    assert found.count(None) < 100


def test_a_forked_child_leaves_events_alone(counted_jobs: RecordedJobs) -> None:
    """It drops its copies of Works that nobody has waited for, and calls no more of CUDA for it.

    torch destroys events of its own there.
    """
    program = (
        BEGIN
        + """
if rank == 1: wait_told("forked")
works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
if rank == 0:
    child = os.fork()
    if child == 0:
        works.clear()
        say("CHILD", json.dumps(sum(calls().values(), collections.Counter()))); os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    open(os.environ["JOB"] + "/forked", "w").close()
works[0].wait()
"""
        + END
    )
    usual, timed = (
        counted_jobs.run(2, program, **env) for env in ({"RANKCALL_CAPTURE": "off"}, ENV)
    )
    called = [
        line
        for job in (usual, timed)
        for line in job.job.ranks[0].output.splitlines()
        if line[:6] == "CHILD "
    ]
    assert len(called) == 2
    assert called[0] == called[1]
    waited, *nobody = times(timed.records(), 0)
    assert waited is not None
    assert nobody == [None, None]
