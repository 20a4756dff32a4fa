"""A node's leader gives a verdict once, as soon as the culprit is clear."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diagnosing import RANK_2_MISSING, SECOND, WORLD, causes, diagnose_calls, unfinished
from torch.distributed import HashStore
from worlds import MS, Call, together, write_world

from rankcall.analysis.snapshot import FAILED, RankState, Snapshot
from rankcall.analysis.verdicts import settles_in
from rankcall.analysis.verdicts.encoding import encode
from rankcall.analysis.verdicts.kept import kept_in
from rankcall.analysis.verdicts.over import quiet_if_over
from rankcall.job.judge import Judge
from rankcall.job.other_nodes import Agreed, Exchange
from rankcall.record import FLAG_DEVICE
from rankcall.ring.tables import Group
from rankcall.run.load import load

PAIR = Group("1", 0, "gloo", "pair", (2, 3))
# All wait for rank 2. After 67 s it enters another call, which rank 3 does not enter.
TURNS = [*RANK_2_MISSING, *unfinished(PAIR, 1, (2,), 67 * SECOND, line=9)]


def test_a_rank_that_just_entered_a_call_may_be_on_its_way(tmp_path: Path) -> None:
    """For a tenth of the threshold it may still go on; then the wait is followed further."""
    early = diagnose_calls(tmp_path / "early", TURNS, states={})
    assert [(finding.kind, finding.ranks) for finding in early.findings] == [("missing", (2,))]
    assert settles_in(early.snapshot, early.findings, 60) == pytest.approx(3.0)
    later = diagnose_calls(tmp_path / "later", TURNS, states={}, seconds=74)
    assert [(finding.kind, finding.ranks) for finding in later.findings] == [("deadlock", (2, 3))]
    assert settles_in(later.snapshot, later.findings, 60) == 0


def test_a_rank_in_no_call_is_clear_at_once(tmp_path: Path) -> None:
    """A rank in user code and a stopped rank are final at once."""
    for name, states in (("missing", {}), ("stopped", {2: "stopped"})):
        diagnosis = diagnose_calls(tmp_path / name, RANK_2_MISSING, states=states)
        assert settles_in(diagnosis.snapshot, diagnosis.findings, 60) == 0


def test_a_leader_looks_again_before_it_speaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It puts off an unclear verdict, and then prints and keeps the final one, once."""
    shown: list[Snapshot] = [
        diagnose_calls(tmp_path / str(seconds), TURNS, states={}, seconds=seconds).snapshot
        for seconds in (70, 74, 75)
    ]
    judge = Judge(tmp_path / "run", 60.0)
    monkeypatch.setattr(judge, "_snapshot", lambda headers: shown.pop(0))
    no_rings: Any = {}
    first_ns = time.monotonic_ns()
    began = time.monotonic()
    assert not judge.look(no_rings, first_ns, False)
    assert judge.next_look >= began + 3.0
    assert judge.look(no_rings, first_ns, False)
    assert not judge.look(no_rings, first_ns, False)
    (place,) = (tmp_path / "run/hangs").iterdir()
    kept = json.loads((place / "verdict.json").read_text())["findings"]
    assert [(finding["kind"], finding["ranks"]) for finding in kept] == [("deadlock", [2, 3])]
    assert capsys.readouterr().err.count("kept with all stacks in") == 1


def test_a_leader_looks_again_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict is put off once only, even if the culprit still enters other calls."""
    early = diagnose_calls(tmp_path / "early", TURNS, states={}).snapshot
    judge = Judge(tmp_path / "run", 60.0)
    monkeypatch.setattr(judge, "_snapshot", lambda headers: early)
    no_rings: Any = {}
    assert [judge.look(no_rings, 7, False) for _ in range(2)] == [False, True]


def test_the_next_look_is_when_a_call_has_held_a_device_for_too_long(tmp_path: Path) -> None:
    """The call was issued 25 s ago, behind one that ended 15 s ago. It may last 20 s.

    The rank looks at its device every 2 s.
    """
    before = Call(0, 1, 0, 10 * SECOND, group=WORLD, flags=FLAG_DEVICE)
    behind = Call(0, 2, MS, None, group=WORLD, flags=FLAG_DEVICE)
    seen = diagnose_calls(tmp_path, [before, behind], states={}, seconds=25).snapshot
    judge = Judge(tmp_path / "run", 20.0)
    judge._pause = 15.0
    assert judge._next_look(seen, False) - time.monotonic() == pytest.approx(7, abs=0.5)


def test_a_difference_far_back(tmp_path: Path) -> None:
    """A node that has all ranks looks back as far as a diagnosis from outside.

    Rank 0 passed another size 180 calls ago, and the call went through, as NCCL lets it. A node of
    a larger job would have to send so many calls to the other nodes, so it keeps fewer.
    """
    calls = [
        call
        for seq in range(1, 201)
        for call in together(seq, [0] * 4, seq * MS, WORLD, line=7, flags=FLAG_DEVICE)
    ]
    odd = calls.index(next(call for call in calls if (call.rank, call.seq) == (0, 20)))
    calls[odd] = replace(calls[odd], bytes=8192)
    calls[-4] = replace(calls[-4], end=None)
    seen = {}
    for world_size in (4, 8):
        run = write_world(tmp_path / f"run-{world_size}", calls, world_size=world_size)
        judge = Judge(run, 60.0)
        headers = {head.header.rank: head.header for head in load(run).heads}
        seen[world_size] = judge._snapshot(headers)
    found = judge._hangs(seen[4])
    assert [(finding.kind, finding.ranks, finding.seq) for finding in found] == [
        ("mismatch", (0,), 20)
    ]
    assert len(seen[8].calls) == 4 * 64


def test_several_nodes_look_again_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The judge of all nodes puts the verdict off once, even if another node judges next time."""
    shared = HashStore()
    halves = {0: (0, 1), 1: (2, 3)}
    views = [
        diagnose_calls(tmp_path / str(seconds), TURNS, states={}, seconds=seconds).snapshot
        for seconds in (70, 74)
    ]

    def half(of: Snapshot, node: int) -> Snapshot:
        ranks = [
            state if state.rank in halves[node] else RankState(state.rank, blind=True)
            for state in of.ranks
        ]
        mine = of.calls[np.isin(of.calls["rank"], halves[node])]
        return replace(of, ranks=ranks, calls=mine)

    judges = [Judge(tmp_path / f"run{node}", 60.0) for node in halves]
    for node, judge in enumerate(judges):
        shown = [half(view, node) for view in views]
        monkeypatch.setattr(judge, "_snapshot", lambda headers, shown=shown: shown.pop(0))
        monkeypatch.setattr(judge, "_exchange", Exchange(lambda: shared))
    no_rings: Any = {}

    def look_all() -> list[bool]:
        with ThreadPoolExecutor(2) as pool:
            return list(
                pool.map(lambda judge: judge.look(no_rings, time.monotonic_ns(), True), judges)
            )

    began = time.monotonic()
    assert look_all() == [False, False]
    assert all(judge.next_look >= began + 3.0 for judge in judges)
    assert look_all() == [True, True]
    for node in halves:
        (kept,) = kept_in(tmp_path / f"run{node}")
        assert causes(kept.verdict) == [("deadlock", (2, 3))]
    assert capsys.readouterr().err.count("kept with all stacks in") == 1


@pytest.mark.parametrize("verdict", [b"", b"{}", b"[]", b"\xff", b'{"findings": [{}], "hang": 1}'])
def test_a_damaged_verdict_of_another_node(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verdict: bytes,
) -> None:
    """This node judges by what it knows itself, and says what it could not read."""
    seen = diagnose_calls(tmp_path / "seen", RANK_2_MISSING, states={}).snapshot
    ranks = [RankState(3, blind=True) if state.rank == 3 else state for state in seen.ranks]
    judge = Judge(tmp_path / "run", 60.0)
    monkeypatch.setattr(judge, "_snapshot", lambda headers: replace(seen, ranks=ranks))
    monkeypatch.setattr(judge._exchange, "agree", lambda *_: Agreed(verdict, False))
    no_rings: Any = {}
    assert judge.look(no_rings, time.monotonic_ns(), True)
    assert "cannot be read" in capsys.readouterr().err


def test_nodes_whose_clocks_are_an_hour_apart_say_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verdict from another node is kept once, whatever time that node gives for it."""
    judge = Judge(tmp_path / "run", 60.0)
    whole = diagnose_calls(tmp_path / "world", RANK_2_MISSING, states={}).snapshot
    part = replace(whole, ranks=[*whole.ranks[:3], RankState(3, blind=True)])
    monkeypatch.setattr(judge, "_snapshot", lambda headers: part)
    verdict = judge._judge(whole)
    hour_ago = replace(verdict.origin, epoch_ns=verdict.origin.epoch_ns - 3600 * 10**9)
    verdict = replace(verdict, origin=hour_ago)
    monkeypatch.setattr(judge, "_together", lambda mine: (verdict, False))
    no_rings: Any = {}
    first_ns = time.monotonic_ns() - 61 * SECOND
    assert [judge.look(no_rings, first_ns, False) for _ in range(3)] == [True, False, False]
    assert len(kept_in(tmp_path / "run")) == 1


STEP_BACK_NS = -3600 * SECOND


@pytest.fixture
def wall_clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that holds the wall clock's error in ns."""
    real, offset = time.time_ns, [0]
    monkeypatch.setattr(time, "time_ns", lambda: real() + offset[0])
    return offset


def _judge(folder: Path, monkeypatch: pytest.MonkeyPatch, *, other_node: bool = False) -> Judge:
    """Return a judge that sees a hang; with ``other_node``, another host gives the verdict."""
    judge = Judge(folder / "run", 60.0)
    whole = diagnose_calls(folder / f"world-{id(judge)}", RANK_2_MISSING, states={}).snapshot
    shown = whole
    if other_node:
        shown = replace(whole, ranks=[*whole.ranks[:3], RankState(3, blind=True)])
        verdict = judge._judge(whole)
        elsewhere = replace(verdict.origin, boot_id="another", id="another.1.1")
        verdict = replace(verdict, origin=elsewhere)
        monkeypatch.setattr(judge, "_together", lambda mine: (verdict, False))
    monkeypatch.setattr(judge, "_snapshot", lambda headers: shown)
    return judge


@pytest.mark.parametrize("other_node", [False, True])
def test_a_wall_clock_that_steps_repeats_no_verdict(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wall_clock: list[int],
    other_node: bool,
) -> None:
    """One hang is kept once and passed to ``on_hang``, however the wall clock steps (A26)."""
    judge = _judge(tmp_path, monkeypatch, other_node=other_node)
    no_rings: Any = {}
    first_ns = time.monotonic_ns()
    news = []
    for offset in (STEP_BACK_NS, 2 * STEP_BACK_NS, -STEP_BACK_NS, 0):
        wall_clock[0] = offset
        news.append(judge.look(no_rings, first_ns, False))
    assert news == [True, False, False, False]
    assert len(judge.verdicts()) == 1
    assert len(kept_in(tmp_path / "run")) == 1


def test_the_newest_verdict_is_the_last_after_a_step_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wall_clock: list[int]
) -> None:
    """``on_hang`` gets the verdict that was kept last, not the one with the latest wall clock."""
    judge = _judge(tmp_path, monkeypatch)
    no_rings: Any = {}
    assert judge.look(no_rings, time.monotonic_ns(), False)
    wall_clock[0] = STEP_BACK_NS
    stepped = _judge(tmp_path, monkeypatch)
    assert stepped.look(no_rings, time.monotonic_ns(), False)
    (newest,) = stepped.verdicts()
    assert judge.verdicts()[-1] == newest
    assert len(judge.verdicts()) == 2


def test_another_rank_that_takes_the_lead_repeats_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wall_clock: list[int]
) -> None:
    """A verdict of another host counts from when this process noticed it."""
    first = _judge(tmp_path, monkeypatch, other_node=True)
    second = _judge(tmp_path, monkeypatch)
    no_rings: Any = {}
    first_ns = time.monotonic_ns()
    assert first.look(no_rings, first_ns, False)
    wall_clock[0] = STEP_BACK_NS
    assert len(second.verdicts()) == 1
    assert not second.look(no_rings, first_ns, False)


def test_verdicts_of_an_older_version_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verdicts without an id are kept apart, and count as older than the watcher."""
    for number in (1, 2):
        judge = _judge(tmp_path / "old", monkeypatch)
        verdict = json.loads(encode(judge._judge(judge._snapshot({}))))
        verdict["hang"] = {"epoch_ns": time.time_ns() + 3600 * SECOND + number, "by_pid": 7}
        place = tmp_path / f"run/hangs/000{number}"
        place.mkdir(parents=True)
        (place / "verdict.json").write_text(json.dumps(verdict))
    assert len({kept.verdict.origin.id for kept in kept_in(tmp_path / "run")}) == 2
    judge = _judge(tmp_path, monkeypatch)
    no_rings: Any = {}
    assert judge.verdicts() == []
    assert judge.look(no_rings, time.monotonic_ns(), False)
    assert len(judge.verdicts()) == 1


def test_when_a_job_goes_on(tmp_path: Path) -> None:
    """That needs a sign of every rank that is known, and none that ends or whose call failed."""
    busy = [call for seq in (1, 2) for call in together(seq, [0] * 4, seq * SECOND, WORLD)]
    snapshot = diagnose_calls(tmp_path / "busy", busy, states={}, seconds=5).snapshot
    assert quiet_if_over(snapshot, [], 4.0) == pytest.approx(3.0, abs=0.1)
    assert quiet_if_over(snapshot, [], 2.0) is None
    for change in ({"state": "gone"}, {"leaving": True}, {"closed": True}):
        ended = replace(snapshot.ranks[1], **change)  # type: ignore[arg-type]
        ranks = [snapshot.ranks[0], ended, *snapshot.ranks[2:]]
        assert quiet_if_over(replace(snapshot, ranks=ranks), [], 4.0) is None, change
    calls = snapshot.calls.copy()
    calls["status"][-1] = FAILED
    assert quiet_if_over(replace(snapshot, calls=calls), [], 4.0) is None
    unknown = [*snapshot.ranks[:3], RankState(3, blind=True)]
    assert quiet_if_over(replace(snapshot, ranks=unknown), [], 4.0) is not None
