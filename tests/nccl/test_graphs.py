"""CUDA graphs: recording leaves a capture alone, and claims nothing of what a graph replays."""

from __future__ import annotations

from recorded_jobs import RecordedJobs


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
