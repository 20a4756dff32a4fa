"""Jobs that were ended: all at once, by their launcher, or with one node of several."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_diagnose_culprits import BEFORE, HERE, WAITING, WORLD, S, look, said, stuck
from worlds import MS, START, Call, write_world

from rankcall.analysis.diagnosis import diagnose
from rankcall.processes import LAUNCHER, Exit, note_exit
from rankcall.report.diagnosis import render
from rankcall.run import load

HALVES = {0: "node-a", 1: "node-a", 2: "node-b", 3: "node-b"}


def test_all_killed_at_once(tmp_path: Path) -> None:
    """Nobody is to blame for where the others were; that the job was killed is told."""
    gone = dict.fromkeys(range(4), "gone")
    in_user_code = [*BEFORE, *stuck(WORLD, 4, (0, 1, 3), 69 * S + 900 * MS, line=7)]
    in_one_call = [*BEFORE, *stuck(WORLD, 4, (0, 1, 2, 3), 69 * S + 900 * MS, line=7)]
    for name, calls in (("apart", in_user_code), ("in one", in_one_call)):
        beats = dict.fromkeys(range(4), 70.0)
        found = look(tmp_path / name, calls, seconds=75, states=gone, beats=beats)
        assert said(found) == [("dead", (0, 1, 2, 3))], name
        assert found.findings[0].confidence == "likely"
        assert "ended together; nobody noted how" in found.findings[0].summary
    copied = look(tmp_path / "copied", in_user_code, seconds=70)
    assert said(copied) == [("dead", (0, 1, 2, 3))]
    assert copied.findings[0].confidence == "possible"


def test_gone_between_two_calls(tmp_path: Path) -> None:
    """Who leaves by os._exit at its end looks so too: that nobody noted how it ended is all."""
    gone, beats = dict.fromkeys(range(4), "gone"), dict.fromkeys(range(4), 70.0)
    found = look(tmp_path, BEFORE, seconds=75, states=gone, beats=beats)
    assert said(found) == []
    assert "Of 4 ranks nobody noted how they ended." in " ".join(render(found).split())


def test_killed_in_a_hang(tmp_path: Path) -> None:
    """Who hung the job is named, where it had hung for longer than a step before the end."""
    gone, beats = dict.fromkeys(range(4), "gone"), dict.fromkeys(range(4), 70.0)
    found = look(tmp_path, WAITING, seconds=75, states=gone, beats=beats)
    assert said(found) == [("missing", (2,))]


def test_told_to_end(tmp_path: Path) -> None:
    """A job that its launcher ended was healthy; how its ranks ended is told."""
    folder = tmp_path / "run"
    write_world(folder, BEFORE, closed=lambda rank: False)
    for rank in range(4):
        note_exit(folder, Exit(rank, 0, "node-a", 1000 + rank, -15, HERE + S, by_launcher=True))
    found = diagnose(load(folder), state_of=lambda header: "gone", now_ns=lambda: START + 9 * S)
    assert found.verdict == "healthy"
    assert "4 were ended by the launcher." in " ".join(render(found).split())


def ended_with_launcher(run: Path, host: str, ranks: tuple[int, ...], code: int, at: int) -> None:
    """Note that a host's launcher was told to stop at ``at``, ns, and its ranks ended."""
    note_exit(run, Exit(LAUNCHER, 0, host, 1, -15, HERE + at))
    for rank in ranks:
        note_exit(run, Exit(rank, 0, host, 1000 + rank, code, HERE + at + 20 * MS))


@pytest.mark.parametrize("code", [-15, 1])
def test_a_node_that_is_preempted(tmp_path: Path, code: int) -> None:
    """Its ranks ended with its launcher: they are the cause of the others' failing."""
    failed = [Call(rank, 4, 5 * MS, 2 * S, group=WORLD, status="failed", line=7) for rank in (0, 1)]
    run = write_world(
        tmp_path / "run", [*BEFORE, *failed, *stuck(WORLD, 4, (2, 3), 6 * MS, line=7)],
        closed=lambda rank: False, hosts=HALVES,
    )  # fmt: skip
    ended_with_launcher(run, "node-b", (2, 3), code, 2 * S - 50 * MS)
    for rank in (0, 1):
        note_exit(run, Exit(rank, 0, "node-a", 1000 + rank, 1, HERE + 2 * S + 90 * MS))
    found = diagnose(load(run), state_of=lambda header: "gone", now_ns=lambda: START + 9 * S)
    assert said(found) == [("dead", (2, 3))]
    (finding,) = found.findings
    assert finding.victims == (0, 1)
    assert "were ended with their launcher, which SIGTERM told to stop," in finding.summary
    assert "who ended the launcher on node-b" in finding.advice


def test_others_wait_for_a_node_that_is_preempted(tmp_path: Path) -> None:
    """Where nothing fails they hang, and the cause is told at once."""
    run = write_world(
        tmp_path / "run", [*BEFORE, *stuck(WORLD, 4, (0, 1), 6 * MS, line=7)],
        closed=lambda rank: False, hosts=HALVES,
        beats=dict.fromkeys((0, 1), (8 * S, 8 * S)) | dict.fromkeys((2, 3), (S, S)),
    )  # fmt: skip
    ended_with_launcher(run, "node-b", (2, 3), -15, S)
    found = diagnose(
        load(run), now_ns=lambda: START + 8 * S,
        state_of=lambda header: "alive" if header.rank < 2 else "gone",
    )  # fmt: skip
    assert said(found) == [("dead", (2, 3))]


def test_a_job_that_is_ended_on_all_nodes(tmp_path: Path) -> None:
    """Whatever codes its ranks end with (a KeyboardInterrupt is a 1), it was wanted."""
    run = write_world(tmp_path / "run", BEFORE, closed=lambda rank: False, hosts=HALVES)
    ended_with_launcher(run, "node-a", (0, 1), 1, S)
    ended_with_launcher(run, "node-b", (2, 3), -15, S + 3 * MS)
    found = diagnose(load(run), state_of=lambda header: "gone", now_ns=lambda: START + 9 * S)
    assert said(found) == []


def test_a_failure_before_the_launcher_is_told_to_stop(tmp_path: Path) -> None:
    """Who failed first is the cause; its node's other ranks are not."""
    run = write_world(tmp_path / "run", BEFORE, closed=lambda rank: False, hosts=HALVES)
    note_exit(run, Exit(2, 0, "node-b", 1002, 3, HERE + S))
    ended_with_launcher(run, "node-b", (3,), -15, 2 * S)
    ended_with_launcher(run, "node-a", (0, 1), -15, 2 * S)
    found = diagnose(load(run), state_of=lambda header: "gone", now_ns=lambda: START + 9 * S)
    assert said(found) == [("dead", (2,))]
