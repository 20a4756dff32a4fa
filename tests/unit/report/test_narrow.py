"""Terminals of 60 columns, and those whose user wants no colour."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from rankcall.analysis.report_reading import read_report
from rankcall.analysis.verdicts import diagnose
from rankcall.report import summary_text, top
from rankcall.report.diagnosis_text import diagnosis_text, show_diagnosis
from rankcall.run.load import load
from rankcall.testing.model import Planted
from rankcall.testing.synthetic import synthetic_run

JOBS: dict[str, dict[str, Any]] = {
    "healthy": {},
    "straggler": {"straggler": 2},
    "dead": {"planted": Planted("dead", (2,), 30)},
    "desync": {"planted": Planted("desync", (2,), 30)},
}


@pytest.mark.parametrize("ranks", [4, 64])
@pytest.mark.parametrize("job", JOBS)
def test_sixty_columns(tmp_path: Path, job: str, ranks: int) -> None:
    """No line of the report, the diagnosis and top is wider, and each names the culprit."""
    synthetic_run(tmp_path / "run", ranks, 60, hosts=max(1, ranks // 8), **JOBS[job])
    run = load(tmp_path / "run")
    summary, findings = read_report(run)
    diagnosis = diagnose(run)
    for text in (
        summary_text.render(summary, 60, findings),
        diagnosis_text(diagnosis, 60),
        top.render(diagnosis, 60),
    ):
        assert [line for line in text.splitlines() if cell_len(line) > 60] == []
        assert job == "healthy" or "Rank 2 " in text


@pytest.mark.parametrize("value", ["1", ""])
def test_no_color(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """``NO_COLOR`` takes the colours away, and leaves bold (https://no-color.org/)."""
    monkeypatch.setenv("NO_COLOR", value)
    monkeypatch.setenv("TERM", "xterm-256color")
    synthetic_run(tmp_path / "run", 4, 60, planted=Planted("dead", (2,), 30))
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    show_diagnosis(diagnose(load(tmp_path / "run")), console)
    styles = re.findall(r"\x1b\[([\d;]+)m", screen.getvalue())
    colours = [
        style
        for style in styles
        if any(re.fullmatch(r"[349]\d|10\d|38|48", n) for n in style.split(";"))
    ]
    assert styles
    assert bool(colours) == (value == "")
