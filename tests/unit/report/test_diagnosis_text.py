"""The output of ``rankcall diagnose`` for a small job, a large one, gaps and a healthy job."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import pytest
from diagnosing import RANK_2_MISSING, diagnose_calls, diagnose_parallel_job
from rich.console import Console
from worlds import MS, together, write_world

import golden
from rankcall.analysis.verdicts import diagnose
from rankcall.cli import main
from rankcall.report.diagnosis_text import diagnosis_text
from rankcall.run.load import load
from rankcall.testing.model import Planted


@pytest.mark.parametrize("width", [80, 120])
def test_a_small_world(tmp_path: Path, width: int) -> None:
    """The cause comes first, then the state of the ranks; no line is too wide."""
    text = diagnosis_text(diagnose_calls(tmp_path, RANK_2_MISSING, states={}), width)
    golden.check(f"diagnose-missing-{width}.txt", text)
    assert max(map(len, text.splitlines())) <= width


def test_a_large_world(tmp_path: Path) -> None:
    """1,024 ranks fit on a screen."""
    text = diagnosis_text(diagnose_parallel_job(tmp_path, Planted("stopped", (341,), 57)))
    golden.check("diagnose-1024.txt", text)
    assert len(text.splitlines()) <= 24


def test_two_causes(tmp_path: Path) -> None:
    """Two causes at once are two findings, each with its evidence."""
    faults = Planted("dead", (9,), 41), Planted("missing", (30,), 41)
    golden.check(
        "diagnose-two-causes.txt",
        diagnosis_text(diagnose_parallel_job(tmp_path, *faults, ranks=64)),
    )


def test_gaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gaps in the evidence are listed, and they lower the confidence."""
    monkeypatch.chdir(tmp_path)  # the run's path is printed, and lines wrap by its length
    text = diagnosis_text(
        diagnose_parallel_job(
            Path(), Planted("missing", (9,), 41), ranks=64, without_ranks=(10, 11)
        )
    )
    assert text.startswith("missing (likely): ")
    golden.check("diagnose-gaps.txt", text)


def test_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel, the text is the same: the watcher's verdict is for stderr and for a file."""
    diagnosis = diagnose_calls(tmp_path, RANK_2_MISSING, states={})
    expected = diagnosis_text(diagnosis)
    assert "Rank 2" in expected
    kernel = type("ZMQInteractiveShell", (), {})
    monkeypatch.setattr(builtins, "get_ipython", kernel, raising=False)
    assert Console().is_jupyter, "rich takes this process for a notebook's kernel"
    assert diagnosis_text(diagnosis) == expected


def test_healthy(tmp_path: Path) -> None:
    """For a healthy job, the text says how fast it goes."""
    golden.check("diagnose-healthy.txt", diagnosis_text(diagnose_parallel_job(tmp_path, ranks=64)))


def test_names_cannot_act_on_the_terminal(tmp_path: Path) -> None:
    """Control characters in names from a file are not printed."""
    calls = together(1, [0] * 4, MS, RANK_2_MISSING[0].group)
    run = write_world(tmp_path / "run", calls, hosts=dict.fromkeys(range(4), "a\x1b[31mb\r"))
    text = diagnosis_text(diagnose(load(run)))
    assert "\x1b" not in text
    assert "\r" not in text


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit status is 1 with a finding, 0 without one and 2 without a run; --json agrees."""
    diagnose_parallel_job(tmp_path / "hung", Planted("dead", (3,), 21), ranks=8)
    diagnose_parallel_job(tmp_path / "fine", ranks=8)
    assert main(["diagnose", str(tmp_path / "hung" / "run")]) == 1
    assert capsys.readouterr().out.startswith("dead: Rank 3 (node-0, pid 1003) was killed by")
    assert main(["diagnose", "--json", str(tmp_path / "hung" / "run")]) == 1
    diagnosis = json.loads(capsys.readouterr().out)
    assert (diagnosis["schema"], diagnosis["verdict"]) == (1, "dead")
    assert diagnosis["findings"][0]["ranks"] == [3]
    assert diagnosis["ranks"][3]["exit"] == -9
    assert main(["diagnose", str(tmp_path / "fine" / "run")]) == 0
    assert capsys.readouterr().out.startswith("healthy: 8 of 8 ranks ended well")
    assert main(["diagnose", str(tmp_path / "none")]) == 2
    assert "no such run" in capsys.readouterr().err
