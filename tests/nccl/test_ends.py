"""When ops on devices end: each record has its end once the back end knows it, and not before."""

from __future__ import annotations

import pytest
from recorded_jobs import RecordedJobs, torch_version

HAS_STATUS = pytest.mark.skipif(
    torch_version() >= (2, 15), reason="the back end does not tell a batch's end"
)
PROGRAM = """
init(); x = torch.ones(64, device="cuda"); y = torch.ones(64, device="cuda")
def message(): (dist.send if rank == 0 else dist.recv)(y, 1 - rank)
def batch():
    ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)]
    for work in dist.batch_isend_irecv(ops): work.wait()
def coalesced():
    with dist._coalescing_manager(device=x.device, async_ops=True) as works:
        dist.all_reduce(x); dist.all_reduce(y)
    works.wait()
"""

LOOPS = {
    "synchronous": "dist.all_reduce(x)",
    "asynchronous": "dist.all_reduce(x, async_op=True).wait()",
    "messages": "message()",
    "mixed": "dist.all_reduce(x); message()",
    "message first": "dist.all_reduce(x) if i == 0 else None; message(); dist.all_reduce(x)",
    "several": "dist.broadcast(x, 0, async_op=True); dist.all_reduce(x); dist.barrier(); message()",
    "coalesced": "coalesced()",
}


@pytest.mark.parametrize("loop", LOOPS)
def test_ends_are_known_while_the_job_runs(jobs: RecordedJobs, capture: str, loop: str) -> None:
    """Once a job has waited for its ops, each record has completed; none is closed without an end.

    Synchronous collectives of torch's older NCCL back end have no Work. If the group sends messages
    as well, a number in the back end's status may be a collective's or a message's.
    """
    job = jobs.start(
        2,
        PROGRAM
        + f"""
for i in range(20): {LOOPS[loop]}
torch.cuda.synchronize(); say("waited"); wait_told("end")
dist.destroy_process_group()
""",
        RANKCALL_CAPTURE=capture,
    )
    for rank in range(2):
        job.job.wait_for("waited", rank)
    rows = job.wait_for(lambda rows: len(rows) and (rows["status"] == "completed").all())
    assert not rows["abandoned"].any()
    assert rows.filter(rank=0).height == rows.filter(rank=1).height >= 20
    job.tell("end")
    job.job.succeed()


@pytest.mark.parametrize(("rank", "hung"), [(0, "dist.all_reduce(x)"), (1, "message()")])
def test_what_hangs_stays_in_flight(jobs: RecordedJobs, capture: str, rank: int, hung: str) -> None:
    """In a group with collectives and messages, the op that hangs, and no other, has no end."""
    job = jobs.start(
        2,
        PROGRAM
        + f"""
for i in range(20): dist.all_reduce(x); message()
torch.cuda.synchronize()
if rank == {rank}: {hung}
say("hangs"); wait_told("end"); os._exit(0)
""",
        RANKCALL_CAPTURE=capture,
    )
    job.job.wait_for("hangs", rank)
    job.wait_for(lambda rows: rows.filter(status="completed").height >= 80)
    for _ in range(3):  # nor has it one after further looks at the back end
        rows = job.after_a_look()
        open_rows = rows.filter(rows["status"] != "completed")
        assert open_rows.select("rank", "index", "abandoned").rows() == [(rank, 40, False)]
    job.tell("end")
    job.job.succeed()


def test_a_hang_holds_back_what_is_behind_it_alone(jobs: RecordedJobs, capture: str) -> None:
    """Of the group that hangs, no op ends; of another one that goes on meanwhile, each does."""
    job = jobs.start(
        2,
        PROGRAM
        + """
second = dist.new_group()
dist.all_reduce(x); dist.all_reduce(y, group=second); torch.cuda.synchronize()
if rank == 0:
    for i in range(32): dist.all_reduce(x, async_op=True)
for i in range(8): dist.all_reduce(y, group=second, async_op=True)
say("hangs"); wait_told("end"); os._exit(0)
""",
        RANKCALL_CAPTURE=capture,
    )
    job.job.wait_for("hangs", 0)
    job.wait_for(lambda rows: rows.filter(status="completed").height >= 4 + 2 * 8)
    rows = job.after_a_look()
    stuck = rows.filter(rows["status"] != "completed")
    assert stuck["group"].n_unique() == 1
    assert stuck.select("rank", "seq").rows() == [(0, number) for number in range(2, 34)]
    assert not stuck["abandoned"].any()
    job.tell("end")
    job.job.succeed()


def test_a_message_s_number_is_not_a_collective_s(jobs: RecordedJobs, capture: str) -> None:
    """A message that ends does not end the collective of the same number, which hangs.

    The back end of torch 2.15 runs a group's messages behind its collectives, so they hang as well.
    """
    pass_it = torch_version() < (2, 15)
    job = jobs.start(
        2,
        PROGRAM
        + """
dist.all_reduce(x); message(); torch.cuda.synchronize()
if rank == 0: dist.all_reduce(x, async_op=True)
work = (dist.isend if rank == 0 else dist.irecv)(y, 1 - rank)
say("hangs"); wait_told("end"); say("over", work.is_completed()); os._exit(0)
""",
        RANKCALL_CAPTURE=capture,
    )
    for rank in (0, 1):
        job.job.wait_for("hangs", rank)
    job.wait_for(lambda rows: rows.filter(status="completed").height >= (6 if pass_it else 4))
    for _ in range(3):  # nor has it an end after further looks at the back end
        rows = job.after_a_look()
        stuck = rows.filter(rows["status"] != "completed")
        assert stuck.select("rank", "op", "abandoned").rows() == [
            (0, "all_reduce", False),
            *([] if pass_it else [(0, "send", False), (1, "recv", False)]),
        ]
    job.tell("end")
    for rank in job.job.succeed():
        assert f"over {pass_it}" in rank.output


@pytest.mark.skipif(torch_version() >= (2, 15), reason="each op has a Work, which tells its end")
def test_what_cannot_be_known_is_not_claimed(jobs: RecordedJobs, capture: str) -> None:
    """Without the Flight Recorder's status, a synchronous op is neither in flight nor completed."""
    job = jobs.start(
        2,
        PROGRAM
        + """
for i in range(5): dist.all_reduce(x)
torch.cuda.synchronize(); wait_told("end")
dist.destroy_process_group()
""",
        RANKCALL_CAPTURE=capture,
        TORCH_FR_BUFFER_SIZE="0",
        TORCH_NCCL_TRACE_BUFFER_SIZE="0",
    )
    rows = job.wait_for(lambda rows: rows.height == 10 and rows["abandoned"].all())
    assert rows["completed_ns"].is_null().all()
    job.tell("end")
    job.job.succeed()


def test_a_hung_device_holds_up_no_end(jobs: RecordedJobs, capture: str) -> None:
    """``disable()`` does not wait for the devices."""
    jobs.run(
        2,
        PROGRAM
        + """
dist.all_reduce(x); torch.cuda.synchronize()
if rank == 0: dist.all_reduce(x, async_op=True)  # rank 1 does not come
began = time.monotonic(); rankcall.disable()
assert time.monotonic() - began < 20  # two seconds, and a busy machine
os._exit(0)
""",
        RANKCALL_CAPTURE=capture,
    )


@HAS_STATUS
def test_batches_end(jobs: RecordedJobs, capture: str) -> None:
    """Sends and receives of a batch have no Work of their own; they end with the batch.

    After the last batch, the number completed last is higher than that of any collective.
    """
    job = jobs.start(
        2,
        PROGRAM
        + """
for i in range(20): batch(); dist.all_reduce(x); batch()
torch.cuda.synchronize(); wait_told("end")
dist.destroy_process_group()
""",
        RANKCALL_CAPTURE=capture,
    )
    rows = job.wait_for(lambda rows: len(rows) == 200 and rows["completed_ns"].is_not_null().all())
    assert not rows["abandoned"].any()
    job.tell("end")
    job.job.succeed()


@HAS_STATUS
def test_a_number_that_tells_nothing(jobs: RecordedJobs, capture: str) -> None:
    """After twenty batches and twenty collectives, number 20 may be that of the last of either.

    So the end of the last collective is not known. The next batch's number tells that it is over.
    """
    job = jobs.start(
        2,
        PROGRAM
        + """
for i in range(20): batch(); dist.all_reduce(x)
torch.cuda.synchronize(); wait_told("go on"); batch()
torch.cuda.synchronize(); wait_told("end")
dist.destroy_process_group()
""",
        RANKCALL_CAPTURE=capture,
    )
    rows = job.wait_for(lambda rows: rows["abandoned"].any())
    assert rows.filter(op="all_reduce", seq=20, status="enqueued", abandoned=True).height > 0
    job.tell("go on")
    rows = job.wait_for(lambda rows: len(rows) == 124 and rows["completed_ns"].is_not_null().all())
    assert not rows["abandoned"].any()
    job.tell("end")
    job.job.succeed()


@pytest.mark.parametrize("last", ["dist.destroy_process_group()", "pass"])
def test_a_short_job_has_its_ends(jobs: RecordedJobs, capture: str, last: str) -> None:
    """A job that ends at once leaves no record without an end, even if it never destroys its group.

    The exit itself gives the back end the time to notice what is over.
    """
    job = jobs.run(
        2,
        PROGRAM
        + f"""
for i in range(20): dist.all_reduce(x); dist.all_reduce(y, async_op=True).wait()
torch.cuda.synchronize()
{last}
""",
        RANKCALL_CAPTURE=capture,
    )
    rows = job.records()
    assert len(rows) == 80
    assert (rows["status"] == "completed").all()


def test_no_output_is_kept(jobs: RecordedJobs, capture: str) -> None:
    """A tensor is freed once its op is over and its user has dropped it, while the Work is kept."""
    jobs.run(
        2,
        PROGRAM
        + """
import gc, weakref
z = torch.ones(1 << 20, device="cuda"); gone = weakref.ref(z)
free = torch.cuda.memory_allocated()
work = dist.all_reduce(z, async_op=True); work.wait(); torch.cuda.synchronize()
wait_until(lambda: work.get_future_result().done())
del work, z; gc.collect()
wait_until(lambda: gone() is None and torch.cuda.memory_allocated() <= free - (4 << 20))
dist.destroy_process_group()
""",
        RANKCALL_CAPTURE=capture,
    )
