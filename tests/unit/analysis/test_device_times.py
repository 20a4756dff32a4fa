"""Waiting, transfers and the pace of jobs on devices, against a written model of such a job.

A host issues steps ahead of its device, and waits for the device every few steps. Each device
computes, comes to a collective, and leaves it when all have come and the transfer is over. The ends
are noticed at the next whole second.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from figures import check
from worlds import MS, START, Call, group_of, write_world

from rankcall.analysis.pace import pace, usual_step_s
from rankcall.analysis.run_snapshot import snapshot_of_run
from rankcall.analysis.snapshot import Snapshot
from rankcall.analysis.summary import Summary, summarise
from rankcall.analysis.verdicts import find_slow
from rankcall.analysis.verdicts.lasting import patience
from rankcall.record import FLAG_DEVICE
from rankcall.report import json as json_report
from rankcall.report import summary_text
from rankcall.report.headline import headline
from rankcall.ring.tables import Group
from rankcall.run.load import load

STEPS = 200


@dataclass
class Job:
    """The calls of a job, and what is true of it."""

    calls: list[Call]
    waited_ms: list[float]  # by rank
    transfer_ms: float  # of each collective
    over_ms: float

    @property
    def steps_per_s(self) -> float:
        """The true pace."""
        return STEPS / self.over_ms * 1e3


def job(
    compute_ms: Sequence[float] = (1.0, 31.0),
    issue_ms: Sequence[float] = (0.1, 0.1),
    *,
    steps: int = STEPS,
    ahead: int = 5,
    timed: bool = True,
    transfer_ms: float = 1.5,
) -> Job:
    """Run the model: what each device computes, and each host takes, before each collective."""
    ranks = range(len(compute_ms))
    host, free = [1.0 for _ in ranks], [0.0 for _ in ranks]
    waited, calls = [0.0 for _ in ranks], []
    end = 0.0
    for step in range(steps):
        host = [host[rank] + issue_ms[rank] for rank in ranks]
        came = [max(free[rank], host[rank]) + compute_ms[rank] for rank in ranks]
        end = max(came) + transfer_ms
        noticed = math.ceil(end / 1e3) * 1000 * MS
        for rank in ranks:
            waited[rank] += max(came) - came[rank]
            took = end - came[rank] if timed else math.nan
            issued = round(host[rank] * MS)
            calls.append(
                Call(
                    rank,
                    step + 1,
                    issued,
                    noticed,
                    group=group_of(len(compute_ms)),
                    step=step,
                    flags=FLAG_DEVICE,
                    device_ms=took,
                )
            )
        free = [end for _ in ranks]
        if step % ahead == ahead - 1:
            host = [end for _ in ranks]
    return Job(calls, waited, transfer_ms, end)


def summary_of(folder: Path, job: Job, **options: object) -> Summary:
    """Write the job's rings, check that its figures add up, and return its summary."""
    run = load(write_world(folder / "run", job.calls, **options))  # type: ignore[arg-type]
    return check(run).summary


def live(folder: Path, job: Job) -> Snapshot:
    """Return where the job stands as its last step ends, with all its ends noticed."""
    run = load(write_world(folder / "run", job.calls, closed=lambda rank: False))
    now = START + round(job.over_ms * MS)
    return snapshot_of_run(run, state_of=lambda header: "alive", now_ns=lambda: now)


@pytest.mark.parametrize("ahead", [1, 5, 12])
@pytest.mark.parametrize("steps", [40, 200])
@pytest.mark.parametrize("hosts", [{}, {1: "node-b"}])
def test_the_slow_device_is_named(
    tmp_path: Path, hosts: dict[int, str], steps: int, ahead: int
) -> None:
    """Rank 1's device computes 30 ms longer: it causes all the waiting, and waits for nobody."""
    true = job(ahead=ahead, steps=steps)
    summary = summary_of(tmp_path, true, hosts=hosts)
    assert summary.late is not None
    assert summary.late.ranks == (1,)
    by_rank = {straggler.rank: straggler for straggler in summary.stragglers}
    assert by_rank[0].suffered_wait_ms == pytest.approx(true.waited_ms[0], rel=1e-3)
    assert by_rank[1].caused_wait_ms == pytest.approx(true.waited_ms[0], rel=1e-3)
    assert by_rank[1].suffered_wait_ms == pytest.approx(0, abs=0.01)
    (row,) = summary.collectives
    assert (row.transfer_ms, row.times) == (pytest.approx(true.transfer_ms), "device")


def test_a_slow_host_before_a_busy_device_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Rank 1's host issues each step 2 ms later; both devices are busy with what came before."""
    true = job((30.0, 30.0), (0.1, 2.1))
    assert max(true.waited_ms) < 0.02 * true.over_ms
    summary = summary_of(tmp_path, true)
    assert summary.late is None
    assert summary.waiting_ms == pytest.approx(sum(true.waited_ms), rel=1e-3)
    assert headline(summary).text == "No rank makes the others wait."


def test_one_call_on_the_cpu_does_not_tell_how_long_devices_wait(tmp_path: Path) -> None:
    """The ranks meet once on the CPU, at the end. Of the calls on devices, no time is known."""
    true = job((30.0, 30.0), (0.1, 2.1), timed=False)
    at = round(true.over_ms * MS)
    meeting = Group("1", 0, "gloo", "meeting", (0, 1))
    calls = [*true.calls, *(Call(rank, 1, at, at + 1, group=meeting) for rank in (0, 1))]
    summary = summary_of(tmp_path, replace(true, calls=calls))
    assert (summary.sources.host, summary.sources.unknown) == (1, STEPS)
    assert headline(summary).text == "No rank is known to make the others wait."


def test_without_device_times_waiting_is_unknown(tmp_path: Path) -> None:
    """Issue times show only who issued last; no figure of waiting rests on them."""
    true = job((30.0, 30.0), (0.1, 2.1), timed=False)
    summary = summary_of(tmp_path, true)
    assert (summary.late, summary.waiting_ms, summary.comm_share) == (None, 0.0, None)
    assert headline(summary).text == "How long the ranks wait for each other is not known."
    first, second = summary.stragglers
    assert (first.rank, first.issued_last, first.issued) == (1, STEPS, STEPS)
    assert (second.issued_last, second.came_last, second.collectives) == (0, 0, 0)
    # Between two moments at which both hosts wait, rank 1 is 2, 4, ... 10 ms behind.
    assert first.issued_late_by_ms == pytest.approx(6.0, rel=1e-3)
    report = json.loads(json_report.render(summary))
    assert report["run"]["waiting_ms"] is None
    assert report["run"]["times"] == {"host": 0, "device": 0, "unknown": STEPS}
    assert {row["caused_wait_ms"] for row in report["stragglers"]} == {None}
    assert {row["times"] for row in report["collectives"]} == {"unknown"}
    text = summary_text.render(summary, 100)
    assert "Issue skew" in text
    assert "only issued: when they ran is not known" in text
    # A total of 0 would be a duration. There is none.
    assert {row["total_ms"] for row in report["collectives"] + report["call_sites"]} == {None}
    assert "caused" not in text


def test_a_member_without_its_device_time(tmp_path: Path) -> None:
    """If one member's duration is not known, nothing is known of who waited in that collective."""
    true = job()
    lost = [call.seq in (5, 6) and call.rank == 1 for call in true.calls]
    for at, is_lost in enumerate(lost):
        if is_lost:
            fields = {**vars(true.calls[at]), "device_ms": math.nan}
            true.calls[at] = Call(**fields)
    summary = summary_of(tmp_path, true)
    assert vars(summary.sources) == {"host": 0, "device": STEPS - 2, "unknown": 2}
    by_rank = {straggler.rank: straggler for straggler in summary.stragglers}
    known = true.waited_ms[0] * (STEPS - 2) / STEPS
    assert by_rank[1].caused_wait_ms == pytest.approx(known, rel=0.01)


def test_messages_on_devices(tmp_path: Path) -> None:
    """A receiver waits for its sender as much longer as it takes; issue times do not matter."""
    calls = []
    for seq in range(1, 21):
        for rank, op, took in ((0, "send", 2.0), (1, "recv", 12.0)):
            calls.append(
                Call(
                    rank,
                    seq,
                    seq * 20 * MS + rank * MS,
                    1000 * MS,
                    op,
                    peer=1 - rank,
                    flags=FLAG_DEVICE,
                    device_ms=took,
                )
            )
    summary = summarise(load(write_world(tmp_path / "run", calls)))
    by_rank = {straggler.rank: straggler for straggler in summary.stragglers}
    assert by_rank[0].caused_wait_ms == pytest.approx(200)
    assert by_rank[1].suffered_wait_ms == pytest.approx(200)


@pytest.mark.parametrize("timed", [False, True])
def test_the_pace_is_the_devices(tmp_path: Path, timed: bool) -> None:
    """Steps are counted over whole stretches, not between two issues of a host that is ahead."""
    true = job(timed=timed)
    snapshot = live(tmp_path, true)
    now = pace(snapshot)
    assert now.steps_per_s == pytest.approx(true.steps_per_s, rel=0.05)
    if timed:  # the median of the two ranks: one waits for 30 ms of each step
        shares = [(waited + STEPS * true.transfer_ms) / true.over_ms for waited in true.waited_ms]
        assert now.share == pytest.approx(sum(shares) / 2, rel=0.05)
    else:
        assert now.share is None


@pytest.mark.parametrize("seconds", [4.2, 6.0])
def test_hosts_far_ahead_are_no_pace(tmp_path: Path, seconds: float) -> None:
    """The hosts issue all steps at once, at 10,000 a second: the devices do 30 of them a second."""
    true = job(ahead=STEPS, timed=False)
    now = round(seconds * 1000) * MS
    open_calls = [replace(call, end=None) for call in true.calls if (call.end or 0) > now]
    calls = [call for call in true.calls if (call.end or 0) <= now] + open_calls
    run = load(write_world(tmp_path / "run", calls, closed=lambda rank: False))
    snapshot = snapshot_of_run(run, state_of=lambda header: "alive", now_ns=lambda: START + now)
    found = pace(snapshot)
    assert found.steps_per_s == pytest.approx(true.steps_per_s, rel=0.05)
    assert found.calls_per_s == pytest.approx(true.steps_per_s, rel=0.5)  # by whole seconds


def test_ends_that_were_noticed_together_are_no_pace(tmp_path: Path) -> None:
    """A thousand ends were noticed within a millisecond: when the ops ended is not known."""
    ends = [
        Call(rank, seq, seq * MS, 5000 * MS + seq * 1000, group=group_of(2), flags=FLAG_DEVICE)
        for rank in (0, 1)
        for seq in range(1, 1001)
    ]
    snapshot = snapshot_of_run(load(write_world(tmp_path / "run", ends)))
    assert not snapshot.live
    assert pace(snapshot).calls_per_s is None


def test_a_device_that_ends_steps_issued_long_ago_goes_on(tmp_path: Path) -> None:
    """The last steps were issued a minute ago, and the devices end some of them every second."""
    true = job((1000.0, 1000.0), ahead=100, steps=100, timed=False)
    snapshot = live(tmp_path, true)
    assert float(snapshot.calls["age_s"].min()) > 60
    found = pace(snapshot)
    assert found.steps_per_s == pytest.approx(1.0, rel=0.05)
    assert found.calls_per_s == pytest.approx(1.0, rel=0.25)  # 12 ends in 10 s


def test_patience_follows_the_devices(tmp_path: Path) -> None:
    """A step takes 4 s on the devices, and the hosts issue five at once: a call may take 40 s."""
    true = job((4000.0, 4000.0), timed=False)
    snapshot = live(tmp_path, true)
    assert usual_step_s(snapshot) == pytest.approx(4, rel=0.05)
    assert patience(snapshot, 10.0).min() == pytest.approx(40, rel=0.05)


def test_the_straggler_of_a_running_job(tmp_path: Path) -> None:
    """The live verdict goes by device times, and names nobody without them."""
    for timed, named in ((True, [("straggler", (1,))]), (False, [])):
        found = find_slow(live(tmp_path / str(timed), job(timed=timed)))
        assert [(finding.kind, finding.ranks) for finding in found] == named
    late_host = job((30.0, 30.0), (0.1, 5.1), timed=False)
    assert find_slow(live(tmp_path / "host", late_host)) == []
