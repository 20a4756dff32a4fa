"""Verdicts in the run directory have a number each, and are read back unchanged."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest
from diagnosing import MISSING_AND_DESYNC, any_verdict, received_verdict

from rankcall.analysis.verdicts.finding import Finding
from rankcall.job.judge import findings_of, is_news, keep_verdict
from rankcall.run.hangs import Object, decode, kept_hangs, text_of
from rankcall.run.paths import live_dir
from rankcall.run.settle import settle


def later_than_5(kept: Object) -> bool:
    """Say so of verdicts that were made later than 5 ns."""
    return bool(kept["hang"]["epoch_ns"] > 5)


def test_findings_come_back() -> None:
    """Findings are the same after JSON, and the text names the first one."""
    verdict = received_verdict(MISSING_AND_DESYNC)
    assert findings_of(verdict) == MISSING_AND_DESYNC
    assert "missing" in verdict["text"]


def test_numbers_and_stacks(tmp_path: Path) -> None:
    """A verdict has a folder with text, JSON and stacks; damaged or partial ones are left out."""
    first = keep_verdict(
        tmp_path, received_verdict(MISSING_AND_DESYNC, 5), {2: "Thread 1"}, any_verdict
    )
    second = keep_verdict(tmp_path, received_verdict(MISSING_AND_DESYNC, 9), {}, later_than_5)
    assert (first, second) == (tmp_path / "hangs/0001", tmp_path / "hangs/0002")
    assert (tmp_path / "hangs/0001/stacks/rank-00002.txt").read_text() == "Thread 1\n"
    assert not (tmp_path / "hangs/0002/stacks").exists()
    assert "missing" in (tmp_path / "hangs/0001/verdict.txt").read_text()
    assert json.loads((tmp_path / "hangs/0001/verdict.json").read_text())["verdict"] == "missing"
    (tmp_path / "hangs/0003").mkdir()
    (tmp_path / "hangs/0004").mkdir()
    (tmp_path / "hangs/0004/verdict.json").write_text("[1, 2")
    assert [verdict["hang"]["epoch_ns"] for verdict in kept_hangs(tmp_path)] == [5, 9]
    assert text_of(kept_hangs(tmp_path)[0]) == received_verdict(MISSING_AND_DESYNC)["text"]


def test_of_two_equal_verdicts_one_is_kept(tmp_path: Path) -> None:
    """If several leaders give the same verdict at once, one is kept, and it is complete."""
    others = [Finding("stopped", (3,))]
    places: list[Path | None] = []

    def keep(findings: list[Finding], epoch_ns: int) -> None:
        places.append(keep_verdict(tmp_path, received_verdict(findings, epoch_ns), {}, any_verdict))

    threads = [
        threading.Thread(target=keep, args=(findings, 5 + number))
        for number, findings in enumerate([MISSING_AND_DESYNC] * 3 + [others] * 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(place.name for place in places if place) == ["0001", "0002"]
    assert places.count(None) == 4
    kinds = [findings_of(verdict)[0].kind for verdict in kept_hangs(tmp_path)]
    assert sorted(kinds) == ["missing", "stopped"]
    assert sorted(place.name for place in (tmp_path / "hangs").iterdir()) == ["0001", "0002"]


def test_the_stacks_of_other_nodes_are_added(tmp_path: Path) -> None:
    """A second node adds its stacks to a kept verdict, and keeps no second one."""
    places = {
        keep_verdict(
            tmp_path, received_verdict(MISSING_AND_DESYNC, 5), {rank: f"of {rank}"}, any_verdict
        )
        for rank in (2, 3)
    }
    assert places == {tmp_path / "hangs/0001"}
    stacks = {file.name: file.read_text() for file in (tmp_path / "hangs/0001/stacks").iterdir()}
    assert stacks == {"rank-00002.txt": "of 2\n", "rank-00003.txt": "of 3\n"}


def test_no_verdicts(tmp_path: Path) -> None:
    """A run without a hang has no verdicts."""
    assert kept_hangs(tmp_path) == []


def test_what_is_new() -> None:
    """A finding is news unless an earlier verdict named its ranks."""
    now = time.time_ns()
    earlier = [received_verdict([Finding("missing", (2,))], now)]
    assert not is_news([], [])
    assert is_news([Finding("missing", (2,))], [])
    assert is_news([Finding("desync", ())], [])
    assert not is_news([Finding("missing", (2,))], earlier)
    assert not is_news([Finding("dead", (2,))], earlier)
    assert not is_news([Finding("desync", ())], earlier)
    assert is_news([Finding("missing", (2,)), Finding("stopped", (3,))], earlier)


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
def test_a_damaged_verdict_is_refused(raw: bytes, tmp_path: Path) -> None:
    """``decode`` raises for a damaged verdict, and ``written`` leaves it out."""
    with pytest.raises(ValueError, match=r"."):
        decode(raw)
    place = tmp_path / "hangs/0001"
    place.mkdir(parents=True)
    (place / "verdict.json").write_bytes(raw)
    assert kept_hangs(tmp_path) == []


def test_a_run_that_this_user_may_not_read(tmp_path: Path) -> None:
    """After setuid, a run may be closed to its own process: it then has no verdicts."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    verdict = received_verdict(MISSING_AND_DESYNC, 5)
    keep_verdict(tmp_path / "run", verdict, {}, any_verdict)
    for closed in (tmp_path / "run/hangs", tmp_path / "run"):
        tmp_path.chmod(0o755)
        closed.chmod(0o700)
        os.seteuid(65534)
        try:
            assert kept_hangs(tmp_path / "run") == []
        finally:
            os.seteuid(0)
    assert len(kept_hangs(tmp_path / "run")) == 1


def test_a_run_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the run directory is read-only, the verdict is kept beside the live rings, then moved."""
    monkeypatch.setenv("RANKCALL_SHM", str(tmp_path / "shm"))
    run = tmp_path / "run"
    run.mkdir()
    (run / "hangs").write_text("in the way")
    place = keep_verdict(run, received_verdict(MISSING_AND_DESYNC, 5), {2: "Thread 1"}, any_verdict)
    assert place == live_dir(run) / "hangs/0001"
    assert [verdict["hang"]["epoch_ns"] for verdict in kept_hangs(run)] == [5]
    settle(run)
    assert [verdict["place"] for verdict in kept_hangs(run)] == [str(place)]
    (run / "hangs").unlink()
    settle(run)
    (kept,) = kept_hangs(run)
    assert kept["place"] == str(run / "hangs/0001")
    assert (run / "hangs/0001/stacks/rank-00002.txt").read_text() == "Thread 1\n"
    assert text_of(kept) == received_verdict(MISSING_AND_DESYNC)["text"]
    assert not live_dir(run).exists()
