"""What ``rankcall diagnose`` finds in jobs that hang on devices."""

from __future__ import annotations

import json

from recorded_jobs import RecordedJobs


def test_a_missing_rank(jobs: RecordedJobs, capture: str) -> None:
    """Rank 1 does not come to the fifth collective: it is named, with the line that it is at."""
    job = jobs.start(
        2,
        """
        init(); x = torch.ones(64, device="cuda")
        for _ in range(4): dist.all_reduce(x)
        torch.cuda.synchronize()
        if rank == 0: dist.all_reduce(x)
        wait_told("end"); os._exit(0)
        """,
        RANKCALL_CAPTURE=capture,
    )
    job.wait_for(
        lambda rows: (
            rows.filter(status="completed").height == 8 and rows.filter(rank=0, seq=5).height == 1
        )
    )
    found = json.loads(job.command("diagnose", "--json", "--hang-after", "0.2").stdout)["findings"]
    assert [(one["kind"], one["ranks"]) for one in found] == [("missing", [1])]
    job.tell("end")
    job.job.succeed()
