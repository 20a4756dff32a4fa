"""What ``make demo`` does: real training on four ranks, and a report that names the slow one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from launch import launch

EXAMPLE = Path(__file__).parents[2] / "examples/train_digits.py"


@pytest.mark.multiproc
def test_the_report_names_the_straggler(tmp_path: Path) -> None:
    """The example learns; rank 2, which reads slowly, is the first straggler, with the reason.

    On a busy machine, the other ranks come late as well. Rank 2 therefore reads ten times as slowly
    as in the demo, and its share of the waiting is not looked at.
    """
    options = ["--nproc-per-node=4", EXAMPLE, "--epochs=6", "--slow-rank=2", "--slow-ms=200"]
    trained = launch("run", *options, cwd=tmp_path, timeout=240)
    assert trained.status == 0, trained.err
    accuracies = [float(percent) for percent in re.findall(r"test accuracy ([\d.]+)%", trained.out)]
    assert accuracies[-1] >= 95
    reported = launch("report", "--json", cwd=tmp_path)
    assert reported.status == 0, reported.err
    report = json.loads(reported.out)
    assert report["stragglers"][0]["rank"] == 2
    page = launch("report", "-o", "report.html", cwd=tmp_path)
    assert page.status == 0, page.err
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert re.search(r"<h1>Rank 2 on \S+ makes the others wait</h1>", html)
    assert "train_digits.py:" in html.partition("</header>")[0]
    assert "in its data loader" in html.partition("What to look at")[0]
