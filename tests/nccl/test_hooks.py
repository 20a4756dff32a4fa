"""Hooks on devices: a start is the issue of an op, and the end is when the back end knows it."""

from __future__ import annotations

from recorded_jobs import RecordedJobs

PROGRAM = """
from rankcall import hooks
starts, ends = [], []
hooks.register_collective_start_hook(starts.append)
hooks.register_collective_end_hook(ends.append)
init(); x = torch.ones(64, device="cuda")
"""


def test_a_start_is_the_issue(jobs: RecordedJobs, capture: str) -> None:
    """A start hook fires for an op that its device cannot begin, and before any end is known."""
    job = jobs.start(
        2,
        PROGRAM
        + """
def names(statuses): return [(status.operation, status.sequence_number) for status in statuses]
dist.all_reduce(x); torch.cuda.synchronize(); wait_until(lambda: len(ends) == 1)
if rank == 0:
    dist.broadcast(x, 1); dist.all_reduce(x)  # rank 1 does not come before it is told
    wait_until(lambda: len(starts) == 3)
    assert names(starts) == [("all_reduce", 1), ("broadcast", 2), ("all_reduce", 3)]
    assert names(ends) == [("all_reduce", 1)]
    for status in starts:
        assert (status.status, status.duration) == ("enqueued", None)
        issued_ago = time.monotonic_ns() - status.record["enqueued_ns"]
        assert abs(time.time_ns() - status.timestamp - issued_ago) < 1e9
    assert names(hooks.pending()) == [("broadcast", 2), ("all_reduce", 3)]
    say("started")
else:
    wait_told("come"); dist.broadcast(x, 1); dist.all_reduce(x)
torch.cuda.synchronize(); wait_until(lambda: len(ends) == 3)
assert names(ends) == names(starts)
assert {status.status for status in ends} == {"completed"}
dist.destroy_process_group()
""",
        RANKCALL_CAPTURE=capture,
    )
    job.job.wait_for("started", 0)
    job.tell("come")
    job.job.succeed()
