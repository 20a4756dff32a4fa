"""When ops on devices end: each record has its end once the back end knows it, and not before."""

from __future__ import annotations

from recorded_jobs import RecordedJobs


def test_a_healthy_job_has_its_ends(jobs: RecordedJobs, capture: str) -> None:
    """Once a job has waited for its collectives, each record has completed; none is abandoned."""
    job = jobs.start(
        2,
        """
        init(); x = torch.ones(64, device="cuda")
        for _ in range(20): dist.all_reduce(x)
        torch.cuda.synchronize(); say("waited"); wait_told("go")
        dist.destroy_process_group()
        """,
        RANKCALL_CAPTURE=capture,
    )
    rows = job.wait_for(lambda rows: len(rows) == 40 and (rows["status"] == "completed").all())
    assert not rows["abandoned"].any()
    job.tell("go")
    job.job.succeed()
