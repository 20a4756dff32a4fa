"""CUDA graphs: recording leaves a capture alone, and claims nothing of what a graph replays."""

from __future__ import annotations

import pytest
from recorded_jobs import RecordedJobs, torch_version


def test_a_captured_op_has_no_end(jobs: RecordedJobs, capture: str) -> None:
    """The graph replays what was captured, whose end is unknown; the ops around it have theirs."""
    job = jobs.run(
        2,
        """
        init(); x = torch.ones(64, device="cuda")
        dist.all_reduce(x); torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph): dist.all_reduce(x)
        x.fill_(1)
        for _ in range(3): graph.replay()
        torch.cuda.synchronize(); same(x, [8] * 64)
        dist.all_reduce(x); torch.cuda.synchronize(); same(x, [16] * 64)
        graph.reset()  # it must not outlive the group: torch 2.15.0 refers to that
        dist.destroy_process_group()
        """,
        RANKCALL_CAPTURE=capture,
    )
    rows = job.records().select("rank", "index", "status", "abandoned").rows()
    assert rows == [
        (rank, index, "enqueued" if index == 1 else "completed", index == 1)
        for rank in (0, 1)
        for index in (0, 1, 2)
    ]


# In CUDA's default mode, a capture becomes invalid if any thread asks for an event. The back end of
# torch 2.15 does, at each op, so that programs must choose the other mode there.
MODE = "global" if torch_version() < (2, 15) else "thread_local"


@pytest.mark.parametrize("times", ["0", "1"])
def test_a_capture_bears_the_ops_of_another_thread(
    jobs: RecordedJobs, capture: str, times: str
) -> None:
    """A thread that issues ops leaves the capture of another one valid, also with device times."""
    jobs.run(
        2,
        """
        init(); x = torch.ones(64, device="cuda"); y = torch.ones(64, device="cuda")
        second = dist.new_group(); failures = []
        def issue():
            try:
                torch.cuda.set_device(rank)
                for _ in range(10): dist.all_reduce(y, group=second)
                dist.all_reduce(y, group=second, async_op=True).wait()
            except Exception as error: failures.append(error)
        issue(); torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=os.environ["MODE"]):
            x.mul_(2); thread = threading.Thread(target=issue); thread.start(); thread.join(60)
            assert not thread.is_alive() and not failures, failures
        graph.replay(); torch.cuda.synchronize(); same(x, [2] * 64)
        graph.reset(); dist.destroy_process_group()
        """,
        RANKCALL_CAPTURE=capture,
        RANKCALL_DEVICE_TIMES=times,
        MODE=MODE,
    )
