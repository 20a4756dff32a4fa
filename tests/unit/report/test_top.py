"""``rankcall top`` fits on one screen, however many ranks there are."""

from __future__ import annotations

from pathlib import Path

import pytest
from diagnosing import RANK_2_MISSING, diagnose_calls, diagnose_parallel_job
from worlds import write_world

import golden
from rankcall.analysis.looks import look
from rankcall.cli import main
from rankcall.report.top import render
from rankcall.report.top_lines import bar
from rankcall.run.load import load
from rankcall.testing.model import Planted


def test_a_large_world(tmp_path: Path) -> None:
    """1,024 ranks take a few rows, below the verdict."""
    diagnosis = diagnose_parallel_job(tmp_path, Planted("stopped", (341,), 57))
    for width in (80, 110):
        text = render(diagnosis, width)
        golden.check(f"top-1024-{width}.txt", text)
        assert max(map(len, text.splitlines())) <= width
        assert len(text.splitlines()) <= 20


def test_a_live_job(tmp_path: Path) -> None:
    """For a hang in a live job, the screen has the cause and the advice."""
    golden.check("top-missing.txt", render(diagnose_calls(tmp_path, RANK_2_MISSING, states={})))


def test_healthy(tmp_path: Path) -> None:
    """If all ranks go on, the screen has one green line and one row."""
    golden.check("top-healthy.txt", render(diagnose_parallel_job(tmp_path, ranks=64)))


def test_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--once prints one screen and exits with diagnose's status; an ended job is not followed."""
    diagnose_parallel_job(tmp_path / "hung", Planted("dead", (3,), 21), ranks=8)
    diagnose_parallel_job(tmp_path / "fine", ranks=8)
    assert main(["top", "--once", str(tmp_path / "hung" / "run")]) == 1
    assert "Rank 3 (node-0, pid 1003) was killed by SIGKILL" in capsys.readouterr().out
    assert main(["top", str(tmp_path / "fine" / "run")]) == 0
    assert "healthy  the job has ended" in capsys.readouterr().out
    assert main(["top", "--once", str(tmp_path / "none")]) == 2


def test_ranks_that_have_issued_nothing(tmp_path: Path) -> None:
    """A job that has only begun is healthy, in every view."""
    run = write_world(tmp_path / "run", [], ranks=range(4))
    diagnosis = look(load(run), 60.0)
    assert diagnosis.kind == "healthy"
    with pytest.warns(DeprecationWarning, match=r"use Diagnosis\.kind"):
        assert diagnosis.verdict == "healthy"
    assert "nothing yet" in render(diagnosis)
    assert main(["diagnose", str(run)]) == 0


def test_bars() -> None:
    """A small share is visible, and a full share fills the bar."""
    assert [bar(0), bar(0.0001), bar(1), len(bar(0.5))] == ["", "▏", "█" * 12, 6]
