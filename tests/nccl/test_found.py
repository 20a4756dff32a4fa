"""What ``rankcall diagnose`` finds in jobs that hang on devices."""

from __future__ import annotations

import json
import time
from typing import Any

from recorded_jobs import RecordedJobs, torch_version


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
    found = []
    while not found:  # a call on a device is young for two seconds, however short the threshold
        assert time.monotonic() < job.job.deadline
        written = job.command("diagnose", "--json", "--hang-after", "0.2").stdout
        found = json.loads(written)["findings"]
    assert [(one["kind"], one["ranks"]) for one in found] == [("missing", [1])]
    job.tell("end")
    job.job.succeed()


def test_a_rank_that_does_not_come_to_a_batch(jobs: RecordedJobs, capture: str) -> None:
    """It is named if the back end tells the ends of batches. If not, no call is said to hang."""
    job = jobs.start(
        2,
        """
        init(); x = torch.ones(64, device="cuda"); y = torch.ones(64, device="cuda")
        def batch():
            peer = 1 - rank
            ops = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, y, peer)]
            for work in dist.batch_isend_irecv(ops): work.wait()
        for _ in range(4): batch()
        torch.cuda.synchronize()
        if rank == 0: batch()
        wait_told("end"); os._exit(0)
        """,
        RANKCALL_CAPTURE=capture,
    )
    tells_ends = torch_version() < (2, 15)
    if tells_ends:
        job.wait_for(lambda rows: rows.filter(status="completed").height == 16)
    else:
        job.wait_for(lambda rows: rows.filter(abandoned=True).height == 18)
    while True:
        written = json.loads(job.command("diagnose", "--json", "--hang-after", "1").stdout)
        if written["findings"]:
            break
        job.after_a_look()
    (found,) = written["findings"]
    stands = [row["stands"] for row in written["ranks"]]
    if tells_ends:
        assert (found["kind"], found["ranks"]) == ("missing", [1])
        assert stands == ["in", "left"]
    else:
        assert (found["kind"], found["ranks"]) == ("no_progress", [])
        assert found["facts"][0]["others"]["ranks"] == [0, 1]
        assert stands == ["end_unknown", "end_unknown"]
    job.tell("end")
    job.job.succeed()


def test_a_call_left_out_before_one_of_another_group(jobs: RecordedJobs) -> None:
    """Rank 1 leaves out a call of its pair, and its host waits in the next call of all ranks.

    Rank 0 has issued both. Its device is in the pair's, so it has not come to the other one.
    """
    job = jobs.start(
        4,
        """
        init(); x = torch.ones(64, device="cuda"); pairs = [dist.new_group([0, 1]), None]
        def step(skip):
            if rank < 2 and not skip: dist.all_reduce(x, group=pairs[0])
            dist.all_reduce(x)
        for _ in range(3): step(False)
        torch.cuda.synchronize(); step(rank == 1); wait_told("end"); os._exit(0)
        """,
    )
    job.wait_for(lambda rows: rows.filter(status="completed").height == 18 and rows.height == 23)
    found: list[dict[str, Any]] = []
    while not found:
        assert time.monotonic() < job.job.deadline
        written = job.command("diagnose", "--json", "--hang-after", "0.2").stdout
        found = json.loads(written)["findings"]
    assert [(one["kind"], one["ranks"], one["victims"]) for one in found] == [
        ("deadlock", [0, 1], [2, 3])
    ]
    job.tell("end")
    job.job.succeed()
