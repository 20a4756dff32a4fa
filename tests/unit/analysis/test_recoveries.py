"""Where the time of recoveries went: phases add up to the time without progress, and goodput."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rankcall.analysis.recoveries import PHASES, Carried, FirstMoments, agent_phases
from rankcall.cli import main
from rankcall.record import RECORD
from rankcall.run.recoveries import (
    FOLLOWS,
    AttemptEnd,
    AttemptResumed,
    AttemptStart,
    Recoveries,
    Signature,
    file_of,
    note,
    read_recoveries,
)
from rankcall.testing import synthetic_run

S = 1_000_000_000
BOOT_NS = 7 * S  # the monotonic clock began so long after the epoch


def ring(first_s: float, *calls: tuple[float, int], last_s: float = 100.0, dropped: int = 0) -> Any:
    """Return a ring that began at a time, with calls as (time, step). Times are epoch seconds."""
    records = np.zeros(len(calls), RECORD)
    records["enqueued_ns"] = [int(at * S) - BOOT_NS for at, _ in calls]
    records["step"] = [step for _, step in calls]
    anchor_ns = int(first_s * S)
    header = SimpleNamespace(
        anchor_epoch_ns=anchor_ns,
        anchor_mono_ns=anchor_ns - BOOT_NS,
        last_sign_epoch_ns=int(last_s * S),
    )
    return SimpleNamespace(header=header, records=records, dropped=dropped)


def end(decision: str = "restart", **more: Any) -> AttemptEnd:
    """Return the end of an attempt that hung at 30 s and was gone at 38 s."""
    moments = {"fault_ns": 30, "verdict_ns": 35, "ended_ns": 36, "noticed_ns": 37, "stopped_ns": 38}
    known = {"steps": 20, "lost": 5, **{name: at * S for name, at in moments.items()}}
    ended = AttemptEnd(0, Signature("stopped"), "machine", decision=decision)
    return replace(ended, **{**known, **more})


def carried(run_dir: Path, events: list[Any], *rings: Any) -> Carried:
    """Return the recoveries of a run with these events and rings."""
    for event in events:
        note(file_of(run_dir, "node-a", 1), event)
    moments = FirstMoments(read_recoveries(run_dir))
    for one_ring in rings:
        moments.add(one_ring)
    return moments.finish()


STARTS = [AttemptStart(0, 10 * S), AttemptStart(1, 40 * S)]
BEFORE = ring(11, (12, 0), (29, 20))


def test_phases_of_a_recovery(tmp_path: Path) -> None:
    """The first call and step of any rank count; the phases add up from the fault to the step."""
    events = [STARTS[0], end(), STARTS[1]]
    after = [ring(43, (47, 0), (50, 1), (51, 2), (58, 5)), ring(44, (46, 0), (52, 1), (57, 6))]
    told = carried(tmp_path, events, BEFORE, *after)
    (recovery,) = told.recoveries
    assert dict(zip(PHASES, recovery.phases_s, strict=True)) == {
        "verdict": 5.0,
        "evidence": 1.0,
        "end": 2.0,
        "restart": 2.0,
        "start": 6.0,
        "step": 4.0,
        "catch_up": 7.0,  # from 50 s until five steps were taken again, on any rank
    }
    assert recovery.down_s == 20.0
    assert recovery.lost_s == pytest.approx(5.0)  # 5 of 20 steps, which took from 10 s to 30 s
    assert told.elapsed_s == 90.0
    assert told.goodput == pytest.approx(1 - 25 / 90)


def test_a_crash_has_no_verdict(tmp_path: Path) -> None:
    """Its fault is its end, so that the first two phases take no time."""
    crash = end(fault_ns=36 * S, verdict_ns=0)
    told = carried(tmp_path, [STARTS[0], crash, STARTS[1]], BEFORE, ring(43, (46, 0), (50, 1)))
    assert told.recoveries[0].phases_s == (0.0, 0.0, 2.0, 2.0, 6.0, 4.0, None)


@pytest.mark.parametrize(("lost", "seconds"), [(0, 0.0), (1, 0.0), (3, 2.0), (4, None), (-1, None)])
def test_steps_that_are_taken_again(lost: int, seconds: float | None, tmp_path: Path) -> None:
    """Without a lost step there is nothing to catch up; without a checkpoint, it is not known."""
    events = [STARTS[0], end(lost=lost), STARTS[1]]
    told = carried(tmp_path, events, BEFORE, ring(43, (46, 0), (50, 1), (52, 3)))
    assert told.recoveries[0].phases_s[-1] == seconds
    assert told.recoveries[0].down_s == 20.0


def test_very_many_numbers_of_lost_steps(tmp_path: Path) -> None:
    """A file of another program's does not make each ring cost without bound."""
    ends = [end(lost=lost, restart=lost) for lost in range(4000)]
    agents = [Recoveries(tmp_path, (), ends)]
    assert len(FirstMoments(agents)._lost) == 256


@pytest.mark.parametrize(
    ("events", "rings"),
    [
        ([STARTS[0], end(), STARTS[1]], [BEFORE, ring(43, (46, 0))]),  # no step so far
        ([STARTS[0], end(), STARTS[1]], [BEFORE, ring(43, (46, 0), (50, 1), dropped=3)]),
        ([STARTS[0], end()], [BEFORE, ring(43, (46, 0), (50, 1))]),  # no start was noted
        ([end(), STARTS[1]], [BEFORE]),
    ],
)
def test_what_is_not_known(events: list[Any], rings: list[Any], tmp_path: Path) -> None:
    """A moment that is missing is no zero, and makes no figure of what it belongs to."""
    told = carried(tmp_path, events, *rings)
    assert len(told.recoveries) == 1
    assert told.recoveries[0].down_s is None
    assert told.goodput is None


def test_what_a_rank_noted_outlasts_its_ring(tmp_path: Path) -> None:
    """A ring whose first records are gone tells nothing; a rank has noted the moments before."""
    resumed = AttemptResumed(1, 46 * S, 50 * S, 57 * S)
    events = [STARTS[0], end(), STARTS[1], resumed]
    told = carried(tmp_path, events, BEFORE, ring(43, (80, 400), (90, 500), dropped=3))
    assert told.recoveries[0].phases_s[4:] == (6.0, 4.0, 7.0)


def test_a_recovery_that_several_nodes_noted(tmp_path: Path) -> None:
    """It is one: of the node that decided, with the moments that only another one knows.

    Node b has the culprit and the verdict. Node a only follows, has the rank that saves, and was
    the last to end its workers. Node c is started again for the second attempt.
    """
    follows = end(
        signature=Signature("another_node"),
        rule=FOLLOWS,
        fault_ns=37 * S,
        verdict_ns=0,
        ended_ns=0,
        stopped_ns=39 * S,
    )
    decides = end(lost=-1, steps=0, culprits=(1,), rule="goes_on")
    first, second = AttemptStart(0, 10 * S, "job"), AttemptStart(1, 40 * S, "job")
    later = AttemptStart(1, 41 * S, "job")  # a clock that is ahead, or a node that is slow
    for agent, events in {
        ("node-a", 1): [first, follows, second, AttemptResumed(1, 47 * S, 51 * S, 57 * S)],
        ("node-b", 1): [first, decides, later, AttemptResumed(1, 46 * S, 50 * S)],
        ("node-c", 1): [first],
        ("node-c", 2): [later],
    }.items():
        for event in events:
            note(file_of(tmp_path, *agent), event)
    told = FirstMoments(read_recoveries(tmp_path)).finish()
    (recovery,) = told.recoveries
    assert (recovery.end.signature.kind, recovery.end.culprits) == ("stopped", (1,))
    assert recovery.phases_s == (5.0, 1.0, 3.0, 1.0, 6.0, 4.0, 7.0)
    assert recovery.lost_s == pytest.approx(5.0)
    assert [attempt.restart for attempt in told.attempts.attempts] == [0, 1]


def test_nodes_whose_clocks_differ(tmp_path: Path) -> None:
    """No moment comes before the one before it, so that the phases add up."""
    ahead = end(signature=Signature("another_node"), rule=FOLLOWS, stopped_ns=45 * S)
    first, second = AttemptStart(0, 10 * S, "job"), AttemptStart(1, 40 * S, "job")
    for host, event in (("node-a", ahead), ("node-b", end(ended_ns=33 * S))):
        for noted in (first, event, second, AttemptResumed(1, 40 * S, 50 * S)):
            note(file_of(tmp_path, host, 1), noted)
    (recovery,) = FirstMoments(read_recoveries(tmp_path)).finish().recoveries
    assert recovery.phases_s[:-1] == (5.0, 0.0, 5.0, 0.0, 0.0, 10.0)
    assert recovery.down_s == 20.0


def test_a_job_that_a_launcher_began_again(tmp_path: Path) -> None:
    """The time between launchers is none that brought the job forward, if it is known."""
    later = [AttemptStart(0, 60 * S), end(fault_ns=80 * S, noticed_ns=82 * S, stopped_ns=83 * S)]
    calls = ring(43, (46, 0), (50, 1)), ring(61, (65, 0), (70, 1)), ring(86, (87, 0), (88, 1))
    # Of three attempts of 20, 15 and 20 s, a quarter of the steps was lost.
    goodput = 1 - (20 + 20 / 4 + 15 + 15 / 4 + 8 + 20 / 4) / 90
    for stopped in (True, False):
        run = tmp_path / f"{stopped}"
        last = end("stop", fault_ns=55 * S, noticed_ns=56 * S, stopped_ns=57 * S)
        for event in (STARTS[0], end(), STARTS[1], *([last] if stopped else [])):
            note(file_of(run, "node-a", 1), event)
        for event in (*later, AttemptStart(1, 85 * S)):
            note(file_of(run, "node-a", 2), event)
        moments = FirstMoments(read_recoveries(run))
        for one_ring in (BEFORE, *calls):
            moments.add(one_ring)
        told = moments.finish()
        assert len(told.recoveries) == 2
        assert told.goodput == (pytest.approx(goodput) if stopped else None)


def test_the_next_attempt_only(tmp_path: Path) -> None:
    """The first step of the attempt after next is not that of this recovery."""
    events = [STARTS[0], end(), STARTS[1], AttemptStart(2, 60 * S)]
    told = carried(tmp_path, events, BEFORE, ring(43, (46, 0)), ring(61, (65, 0), (66, 1)))
    assert told.recoveries[0].phases_s[-2] is None


def test_an_end_is_no_recovery(tmp_path: Path) -> None:
    """A job that was stopped by the policy did not recover from that."""
    assert carried(tmp_path, [STARTS[0], end("stop")], BEFORE).recoveries == []


def test_a_run_without_recoveries(tmp_path: Path) -> None:
    """There is nothing to say, and no share."""
    told = carried(tmp_path, [], BEFORE)
    assert (list(told.recoveries), told.goodput) == ([], None)


def test_what_an_agent_knows(tmp_path: Path) -> None:
    """Phases add up over recoveries; the last one, whose workers have not started, has no end."""
    moments = {"fault_ns": 50, "ended_ns": 51, "noticed_ns": 52, "stopped_ns": 54}
    late = end(verdict_ns=0, **{name: at * S for name, at in moments.items()})
    resumed = [AttemptResumed(1, 43 * S, 45 * S), AttemptResumed(1, 43 * S, 45 * S, 48 * S)]
    told = agent_phases(Recoveries(tmp_path, STARTS, [end(), late], resumed))
    assert told == {
        "verdict": 5.0 + 1.0,
        "evidence": 1.0,
        "end": 2.0 + 3.0,
        "restart": 2.0,
        "start": 3.0,
        "step": 2.0,
        "catch_up": 3.0,
    }


def test_the_page(tmp_path: Path) -> None:
    """It has a row for each recovery, with the culprits; a page without any has no such section."""
    pytest.importorskip("jinja2")
    run, page = tmp_path / "run", tmp_path / "page.html"
    synthetic_run(run, 2, 20)
    assert main(["report", str(run), "-o", str(page)]) == 0
    assert 'id="recoveries"' not in page.read_text()
    for event in (STARTS[0], end(culprits=(1,), step=1200), STARTS[1]):
        note(file_of(run, "node-a", 1), event)
    assert main(["report", str(run), "-o", str(page)]) == 0
    section = page.read_text().partition('id="recoveries"')[2].partition("</section>")[0]
    assert all(f"<th>{phase}</th>" in section for phase in PHASES)
    assert '<td class="t">stopped</td><td class="t">rank 1</td><td>1,200</td>' in section
