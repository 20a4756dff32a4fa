"""When a node's leader speaks: once it is clear who is at fault, and once."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_diagnose_culprits import WAITING, S, look, stuck
from torch.distributed import HashStore

from rankcall._hangs import decode, id_of
from rankcall.analysis.state.snapshot import RankState, Snapshot
from rankcall.analysis.verdicts import settles_in
from rankcall.ring.tables import Group
from rankcall.watch import _verdict
from rankcall.watch._exchange import Exchange
from rankcall.watch._judge import Judge

PAIR = Group("1", 0, "gloo", "pair", (2, 3))
# Rank 2, for whom all wait, comes to another call after 67 s: one that rank 3 does not come to.
TURNS = [*WAITING, *stuck(PAIR, 1, (2,), 67 * S, line=9)]


def test_who_has_just_come_to_a_call_may_be_on_its_way(tmp_path: Path) -> None:
    """For a tenth of the threshold; then it is followed to whom it waits for."""
    early = look(tmp_path / "early", TURNS, states={})
    assert [(each.kind, each.ranks) for each in early.findings] == [("missing", (2,))]
    assert settles_in(early.snapshot, early.findings, 60) == pytest.approx(3.0)
    later = look(tmp_path / "later", TURNS, states={}, seconds=74)
    assert [(each.kind, each.ranks) for each in later.findings] == [("deadlock", (2, 3))]
    assert settles_in(later.snapshot, later.findings, 60) == 0


def test_nothing_is_unclear_of_who_is_in_no_call(tmp_path: Path) -> None:
    """A rank in user code, and one that is stopped, are told at once."""
    for name, states in (("missing", {}), ("stopped", {2: "stopped"})):
        found = look(tmp_path / name, WAITING, states=states)
        assert settles_in(found.snapshot, found.findings, 60) == 0


def test_a_leader_looks_again_before_it_speaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It tells what is true in the end, and only that, once."""
    shown: list[Snapshot] = [
        look(tmp_path / str(seconds), TURNS, states={}, seconds=seconds).snapshot
        for seconds in (70, 74, 75)
    ]
    judge = Judge(tmp_path / "run", 60.0)
    monkeypatch.setattr(judge, "_stand", lambda headers: shown.pop(0))
    nobody: Any = {}
    first_ns = time.monotonic_ns()
    began = time.monotonic()
    assert not judge.look(nobody, first_ns, False)
    assert judge.next_look >= began + 3.0
    assert judge.look(nobody, first_ns, False)
    assert not judge.look(nobody, first_ns, False)
    (place,) = (tmp_path / "run/hangs").iterdir()
    told = json.loads((place / "verdict.json").read_text())["findings"]
    assert [(each["kind"], each["ranks"]) for each in told] == [("deadlock", [2, 3])]
    assert capsys.readouterr().err.count("kept with all stacks in") == 1


def test_a_leader_looks_again_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that comes to one call after the other, and never to ours, is told all the same."""
    early = look(tmp_path / "early", TURNS, states={}).snapshot
    judge = Judge(tmp_path / "run", 60.0)
    monkeypatch.setattr(judge, "_stand", lambda headers: early)
    nobody: Any = {}
    assert [judge.look(nobody, 7, False) for _ in range(2)] == [False, True]


def test_several_nodes_look_again_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who judges for all puts the verdict off, once, whichever node judges the next time."""
    shared = HashStore()
    halves = {0: (0, 1), 1: (2, 3)}
    views = [
        look(tmp_path / str(seconds), TURNS, states={}, seconds=seconds).snapshot
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
        monkeypatch.setattr(judge, "_stand", lambda headers, shown=shown: shown.pop(0))
        monkeypatch.setattr(judge, "_exchange", Exchange(lambda: shared))
    nobody: Any = {}

    def look_all() -> list[bool]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda each: each.look(nobody, time.monotonic_ns(), True), judges))

    began = time.monotonic()
    assert look_all() == [False, False]
    assert all(judge.next_look >= began + 3.0 for judge in judges)
    assert look_all() == [True, True]
    for node in halves:
        (verdict,) = _verdict.written(tmp_path / f"run{node}")
        assert [(each["kind"], each["ranks"]) for each in verdict["findings"]] == [
            ("deadlock", [2, 3])
        ]
    assert capsys.readouterr().err.count("kept with all stacks in") == 1


def test_nodes_whose_clocks_are_an_hour_apart_say_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That a verdict has been told does not hang on when the other node says that it was."""
    judge = Judge(tmp_path / "run", 60.0)
    whole = look(tmp_path / "world", WAITING, states={}).snapshot
    part = replace(whole, ranks=[*whole.ranks[:3], RankState(3, blind=True)])
    monkeypatch.setattr(judge, "_stand", lambda headers: part)
    raw = judge._judge(whole)
    verdict = decode(raw)
    hour_ago = {**verdict["hang"], "epoch_ns": verdict["hang"]["epoch_ns"] - 3600 * 10**9}
    raw = json.dumps({**verdict, "hang": hour_ago}).encode()
    monkeypatch.setattr(judge, "_together", lambda mine: (raw, False))
    nobody: Any = {}
    first_ns = time.monotonic_ns() - 61 * S
    assert [judge.look(nobody, first_ns, False) for _ in range(3)] == [True, False, False]
    assert len(_verdict.written(tmp_path / "run")) == 1


STEP_BACK_NS = -3600 * S


@pytest.fixture
def wall_clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that holds by how many ns the wall clock is off."""
    real, offset = time.time_ns, [0]
    monkeypatch.setattr(time, "time_ns", lambda: real() + offset[0])
    return offset


def _judge(folder: Path, monkeypatch: pytest.MonkeyPatch, *, other_node: bool = False) -> Judge:
    """Return a judge before whom rank 3 hangs; with ``other_node``, another host judges it."""
    judge = Judge(folder / "run", 60.0)
    whole = look(folder / f"world-{id(judge)}", WAITING, states={}).snapshot
    shown = whole
    if other_node:
        shown = replace(whole, ranks=[*whole.ranks[:3], RankState(3, blind=True)])
        verdict = decode(judge._judge(whole))
        verdict["hang"] = {**verdict["hang"], "boot_id": "another", "id": "another.1.1"}
        monkeypatch.setattr(judge, "_together", lambda mine: (json.dumps(verdict).encode(), False))
    monkeypatch.setattr(judge, "_stand", lambda headers: shown)
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
    nobody: Any = {}
    first_ns = time.monotonic_ns()
    news = []
    for offset in (STEP_BACK_NS, 2 * STEP_BACK_NS, -STEP_BACK_NS, 0):
        wall_clock[0] = offset
        news.append(judge.look(nobody, first_ns, False))
    assert news == [True, False, False, False]
    assert len(judge.told()) == 1
    assert len(_verdict.written(tmp_path / "run")) == 1


def test_the_newest_verdict_is_the_last_after_a_step_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wall_clock: list[int]
) -> None:
    """``on_hang`` gets the verdict that was kept last, not the one with the latest wall clock."""
    judge = _judge(tmp_path, monkeypatch)
    nobody: Any = {}
    assert judge.look(nobody, time.monotonic_ns(), False)
    wall_clock[0] = STEP_BACK_NS
    stepped = _judge(tmp_path, monkeypatch)
    assert stepped.look(nobody, time.monotonic_ns(), False)
    (newest,) = stepped.told()
    assert [each["place"] for each in judge.told()][-1] == newest["place"]
    assert len(judge.told()) == 2


def test_another_rank_that_takes_the_lead_repeats_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wall_clock: list[int]
) -> None:
    """A verdict of another host counts from when this process noticed it."""
    first = _judge(tmp_path, monkeypatch, other_node=True)
    second = _judge(tmp_path, monkeypatch)
    nobody: Any = {}
    first_ns = time.monotonic_ns()
    assert first.look(nobody, first_ns, False)
    wall_clock[0] = STEP_BACK_NS
    assert len(second.told()) == 1
    assert not second.look(nobody, first_ns, False)


def test_verdicts_of_an_older_version_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verdict without an id is told from others, and came before the watcher that finds it."""
    for number in (1, 2):
        judge = _judge(tmp_path / "old", monkeypatch)
        verdict = decode(judge._judge(judge._stand({})))
        verdict["hang"] = {"epoch_ns": time.time_ns() + 3600 * S + number, "by_pid": 7}
        place = tmp_path / f"run/hangs/000{number}"
        place.mkdir(parents=True)
        (place / "verdict.json").write_text(json.dumps(verdict))
    kept = _verdict.written(tmp_path / "run")
    assert len({id_of(each) for each in kept}) == 2
    judge = _judge(tmp_path, monkeypatch)
    nobody: Any = {}
    assert judge.told() == []
    assert judge.look(nobody, time.monotonic_ns(), False)
    assert len(judge.told()) == 1
