"""What ``rankcall diagnose`` finds in jobs that hang on devices."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from recorded_jobs import RecordedJob, RecordedJobs, torch_version


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
    found = _first_found(job)["findings"]
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


# What hangs, and on which rank, while the other one does not come.
HUNG = {"collective": (0, "dist.all_reduce(x)"), "message": (1, "message()")}


@pytest.mark.parametrize("hung", HUNG)
def test_a_group_with_collectives_and_messages(jobs: RecordedJobs, capture: str, hung: str) -> None:
    """While all ranks do something else, no call is said to hang; then, the one that does is named.

    The back end counts collectives and messages apart, and a status has one number for both.
    """
    waiting, code = HUNG[hung]
    job = jobs.start(
        2,
        f"""
        init(); x = torch.ones(64, device="cuda"); y = torch.ones(64, device="cuda")
        def message(): (dist.send if rank == 0 else dist.recv)(y, 1 - rank)
        for _ in range(20): dist.all_reduce(x); message()
        torch.cuda.synchronize(); wait_told("hang")
        if rank == {waiting}: {code}
        wait_told("end"); os._exit(0)
        """,
        RANKCALL_CAPTURE=capture,
    )
    job.wait_for(lambda rows: rows.filter(status="completed").height == 80)
    found = _first_found(job)
    assert [(one["kind"], one["ranks"]) for one in found["findings"]] == [("no_progress", [])]
    assert [row["stands"] for row in found["ranks"]] == ["left", "left"]
    job.tell("hang")
    job.wait_for(lambda rows: rows.height == 81)
    found = _first_found(job)
    (one,) = found["findings"]
    assert (one["kind"], one["ranks"], one["victims"]) == ("missing", [1 - waiting], [waiting])
    assert (one["op"], one["seq"]) == ("all_reduce" if hung == "collective" else "recv", 21)
    job.tell("end")
    job.job.succeed()


def _first_found(job: RecordedJob) -> dict[str, Any]:
    """Return the first diagnosis that finds anything.

    A call on a device is young for two seconds, however short the threshold.
    """
    found: dict[str, Any] = {"findings": []}
    while not found["findings"]:
        assert time.monotonic() < job.job.deadline
        found = json.loads(job.command("diagnose", "--json", "--hang-after", "0.2").stdout)
    return found


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
    while True:
        (found,) = _first_found(job)["findings"]
        if found["victims"] == [2, 3]:
            break
        # Until a rank has looked at its device, it may have left its call: of rank 1, it is only
        # known that it has not come to the pair's.
        assert (found["kind"], found["ranks"]) in [("missing", [1]), ("deadlock", [0, 1])]
    assert (found["kind"], found["ranks"]) == ("deadlock", [0, 1])
    job.tell("end")
    job.job.succeed()


def test_a_batch_left_out_before_a_collective(jobs: RecordedJobs, capture: str) -> None:
    """Rank 2 leaves out the last of forty exchanges in a ring, and rank 0 waits for its message.

    After every second exchange comes a collective, so that a number of the back end's may be one's
    or the other one's. Rank 0 has issued the last collective, too, but its device has not come to
    it. On torch 2.15, whose back end does not tell the ends of batches, no rank is named.
    """
    job = jobs.start(
        3,
        """
        init(); x = torch.ones(64, device="cuda"); y = torch.ones(64, device="cuda")
        def exchange():
            ops = [
                dist.P2POp(dist.isend, x, (rank + 1) % 3), dist.P2POp(dist.irecv, y, (rank - 1) % 3)
            ]
            for work in dist.batch_isend_irecv(ops): work.wait()
        for step in range(20):
            exchange()
            if (rank, step) != (2, 19): exchange()
            dist.all_reduce(x)
        wait_told("end"); os._exit(0)
        """,
        RANKCALL_CAPTURE=capture,
    )
    job.wait_for(lambda rows: rows.filter(op="all_reduce", seq=20).height == 3)
    while True:
        diagnosis = _first_found(job)
        (found,) = diagnosis["findings"]
        if torch_version() >= (2, 15):
            assert (found["kind"], found["ranks"]) in [("stuck", []), ("no_progress", [])]
            break
        if found["kind"] == "deadlock" and found["victims"]:
            assert (found["ranks"], found["victims"]) == ([0, 2], [1])
            assert {row["rank"]: row["seq"] for row in diagnosis["ranks"]} == {0: 40, 1: 20, 2: 20}
            break
        # Until a rank has looked at its device, it may have left its call.
        assert found["kind"] in ("stuck", "no_progress", "missing", "deadlock")
        assert set(found["ranks"]) <= {0, 2}
    job.tell("end")
    job.job.succeed()


def test_a_thread_that_uses_another_back_end_of_the_group(jobs: RecordedJobs, capture: str) -> None:
    """As in asynchronous checkpoints, a thread issues on Gloo while the main thread trains on NCCL.

    Each back end counts its own calls: on rank 0 the thread comes first, and on rank 1 the devices.
    Then rank 1 does not come to a collective on devices. That is no desync.
    """
    job = jobs.start(
        2,
        """
        init("cpu:gloo,cuda:nccl"); x = torch.ones(64, device="cuda"); y = torch.ones(64)
        def beside(count): [dist.all_reduce(y) for _ in range(count)]
        thread = threading.Thread(target=beside, args=(5,))
        if rank == 0: thread.start()
        for _ in range(20): dist.all_reduce(x)
        torch.cuda.synchronize()
        if rank == 1: thread.start()
        thread.join()
        if rank == 0: dist.all_reduce(x)
        wait_told("end"); os._exit(0)
        """,
        RANKCALL_CAPTURE=capture,
    )
    job.wait_for(lambda rows: rows.filter(status="completed").height == 50 and rows.height == 51)
    while True:
        diagnosis = _first_found(job)
        (found,) = diagnosis["findings"]
        if found["kind"] == "missing":
            break
        assert (found["kind"], found["ranks"]) == ("no_progress", [])
    assert (found["ranks"], found["victims"], found["seq"]) == ([1], [0], 21)
    job.tell("end")
    job.job.succeed()


# What two ranks issue in an order that does not fit, and the number of the calls that hang.
CROSSED = {
    "messages": ("dist.send(big, 1 - rank); dist.recv(y, 1 - rank)", 1),
    "groups": ("[dist.all_reduce(big, group=group) for group in pair[:: 1 - 2 * rank]]", 2),
}


@pytest.mark.parametrize("crossed", CROSSED)
def test_calls_in_orders_that_do_not_fit(jobs: RecordedJobs, capture: str, crossed: str) -> None:
    """Each host has issued both calls, and each device waits in the first for the other device."""
    code, number = CROSSED[crossed]
    job = jobs.start(
        2,
        f"""
        init(); big = torch.ones(1 << 22, device="cuda"); y = torch.zeros(1 << 22, device="cuda")
        pair = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        for group in pair: dist.all_reduce(big, group=group)
        torch.cuda.synchronize()
        {code}
        wait_told("end"); os._exit(0)
        """,
        RANKCALL_CAPTURE=capture,
    )
    job.wait_for(lambda rows: rows.filter(status="completed").height == 4 and rows.height == 8)
    # Until both ranks have looked at their devices, one of them is only known to have issued both.
    while (found := _first_found(job))["findings"][0]["kind"] == "stuck":
        assert "end_unknown" in {row["stands"] for row in found["ranks"]}
    (one,) = found["findings"]
    assert (one["kind"], one["ranks"], one["confidence"]) == ("deadlock", [0, 1], "likely")
    assert {fact["call"]["seq"] for fact in one["facts"] if fact["call"]} == {number}
    job.tell("end")
    job.job.succeed()
