"""Verdicts in the run directory: each under a number of its own, read back as they were."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from rankcall._hangs import Object, decode, text_of
from rankcall.analysis.diagnosis import Diagnosis
from rankcall.analysis.state.snapshot import ALIVE, RankState, Snapshot, no_calls
from rankcall.analysis.verdicts.finding import Finding
from rankcall.rundir import live_dir, settle
from rankcall.watch import _verdict

FOUND = [
    Finding("missing", (2,), (0, 1, 3), ("node-a",), "0", 17, "all_reduce", "train.py:10", 61.0),
    Finding("desync", (), (0, 1), evidence=("one", "two")),
]


def verdict(findings: list[Finding], epoch_ns: int = 1) -> Object:
    """Return a verdict as a node gets it from another."""
    ranks = [RankState(rank, "node-a", 10 + rank, state=ALIVE) for rank in range(4)]
    made = Diagnosis("run", Snapshot(ranks, no_calls()), findings, 60.0)
    return {**decode(_verdict.encode(made)), "hang": {"epoch_ns": epoch_ns}}


def always(kept: Object) -> bool:
    """Say of every verdict that it is about the same hang."""
    return True


def later_than_5(kept: Object) -> bool:
    """Say so of verdicts that this test made later than 5."""
    return bool(kept["hang"]["epoch_ns"] > 5)


def test_findings_come_back() -> None:
    """Through JSON, as they were."""
    found = _verdict.findings_of(verdict(FOUND))
    assert found == FOUND
    assert "rank 2" in verdict(FOUND)["text"].lower() or "missing" in verdict(FOUND)["text"]


def test_numbers_and_stacks(tmp_path: Path) -> None:
    """One folder each; text, JSON and stacks in it; what is half written or damaged is left out."""
    first = _verdict.write(tmp_path, verdict(FOUND, 5), {2: "Thread 1"}, always)
    second = _verdict.write(tmp_path, verdict(FOUND, 9), {}, later_than_5)
    assert (first, second) == (tmp_path / "hangs/0001", tmp_path / "hangs/0002")
    assert (tmp_path / "hangs/0001/stacks/rank-00002.txt").read_text() == "Thread 1\n"
    assert not (tmp_path / "hangs/0002/stacks").exists()
    assert "missing" in (tmp_path / "hangs/0001/verdict.txt").read_text()
    assert json.loads((tmp_path / "hangs/0001/verdict.json").read_text())["verdict"] == "missing"
    (tmp_path / "hangs/0003").mkdir()
    (tmp_path / "hangs/0004").mkdir()
    (tmp_path / "hangs/0004/verdict.json").write_text("[1, 2")
    assert [each["hang"]["epoch_ns"] for each in _verdict.written(tmp_path)] == [5, 9]
    assert text_of(_verdict.written(tmp_path)[0]) == verdict(FOUND)["text"]


def test_of_two_that_say_the_same_one_is_kept(tmp_path: Path) -> None:
    """Two leaders that judge at the same time: one verdict, whole as soon as it is seen."""
    others = [Finding("stopped", (3,))]
    kept: list[Path | None] = []

    def keep(found: list[Finding], epoch_ns: int) -> None:
        kept.append(_verdict.write(tmp_path, verdict(found, epoch_ns), {}, always))

    threads = [
        threading.Thread(target=keep, args=(found, 5 + number))
        for number, found in enumerate([FOUND, FOUND, FOUND, others, others, others])
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(each.name for each in kept if each) == ["0001", "0002"]
    assert kept.count(None) == 4
    told = [_verdict.findings_of(each)[0].kind for each in _verdict.written(tmp_path)]
    assert sorted(told) == ["missing", "stopped"]
    assert sorted(each.name for each in (tmp_path / "hangs").iterdir()) == ["0001", "0002"]


def test_the_stacks_of_other_nodes_are_added(tmp_path: Path) -> None:
    """What another node has kept of the same verdict is not kept again."""
    places = {
        _verdict.write(tmp_path, verdict(FOUND, 5), {rank: f"of {rank}"}, always) for rank in (2, 3)
    }
    assert places == {tmp_path / "hangs/0001"}
    stacks = {each.name: each.read_text() for each in (tmp_path / "hangs/0001/stacks").iterdir()}
    assert stacks == {"rank-00002.txt": "of 2\n", "rank-00003.txt": "of 3\n"}


def test_no_verdicts(tmp_path: Path) -> None:
    """A run without a hang has none."""
    assert _verdict.written(tmp_path) == []


def test_what_is_new() -> None:
    """A finding is news unless a verdict before has named its ranks."""
    now = time.time_ns()
    told = [verdict([Finding("missing", (2,))], now)]
    assert not _verdict.news([], [])
    assert _verdict.news([Finding("missing", (2,))], [])
    assert _verdict.news([Finding("desync", ())], [])
    assert not _verdict.news([Finding("missing", (2,))], told)
    assert not _verdict.news([Finding("dead", (2,))], told)
    assert not _verdict.news([Finding("desync", ())], told)
    assert _verdict.news([Finding("missing", (2,)), Finding("stopped", (3,))], told)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        b'{"findings": 3}',
        b'{"findings": [], "hang": 7}',
        b'{"findings": ["x"], "hang": {"epoch_ns": 1}}',
        b'{"findings": [], "hang": {"epoch_ns": 1e300}}',
        b'{"findings": [], "hang": {"epoch_ns": Infinity}}',
        b'{"findings": [], "hang": {"epoch_ns": 1, "mono_ns": "soon"}}',
        b'{"findings": [], "hang": {"epoch_ns": 1, "mono_ns": -1}}',
        b"[" * 100_000,
        b"\x80\x04.",
    ],
)
def test_what_is_no_verdict(raw: bytes, tmp_path: Path) -> None:
    """It is refused, and left out where a run's verdicts are read."""
    with pytest.raises(ValueError, match=r"."):
        decode(raw)
    place = tmp_path / "hangs/0001"
    place.mkdir(parents=True)
    (place / "verdict.json").write_bytes(raw)
    assert _verdict.written(tmp_path) == []


def test_a_run_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk hangs jobs, too: the verdict is kept beside the live rings, then moved."""
    monkeypatch.setenv("RANKCALL_SHM", str(tmp_path / "shm"))
    run = tmp_path / "run"
    run.mkdir()
    (run / "hangs").write_text("in the way")
    place = _verdict.write(run, verdict(FOUND, 5), {2: "Thread 1"}, always)
    assert place == live_dir(run) / "hangs/0001"
    assert [each["hang"]["epoch_ns"] for each in _verdict.written(run)] == [5]
    settle(run)
    assert [each["place"] for each in _verdict.written(run)] == [str(place)]
    (run / "hangs").unlink()
    settle(run)
    (kept,) = _verdict.written(run)
    assert kept["place"] == str(run / "hangs/0001")
    assert (run / "hangs/0001/stacks/rank-00002.txt").read_text() == "Thread 1\n"
    assert text_of(kept) == verdict(FOUND)["text"]
    assert not live_dir(run).exists()
