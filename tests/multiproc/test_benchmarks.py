"""Benchmarks go on working when what they measure changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiproc
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_training() -> None:
    """One short round of the training benchmark prints the figures it is there for."""
    command = [sys.executable, str(BENCHMARKS / "training.py"), "--json"]
    done = subprocess.run(
        [*command, "--rounds", "1", "--epochs", "1"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout)
    assert {"ratio_median", "ring_mib_per_rank", "rss_added_mib"} <= figures.keys()
    assert figures["ratio_median"] > 0


@pytest.mark.slow
def test_trace() -> None:
    """The trace benchmark prints a figure for each sink, each export and the page."""
    command = [sys.executable, str(BENCHMARKS / "trace.py"), "--json", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--calls", "1000", "--ranks", "4", "--collectives", "50"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout)
    added = ("monitor_style", "jsonl", "nvtx", "prometheus", "otel", "parquet")
    assert {f"{name}_added_us" for name in added} < figures.keys()
    assert figures["monitor_style_added_us"] > 10
    for name in ("export_parquet_records_per_s", "export_perfetto_records_per_s", "html_seconds"):
        assert figures[name] > 0
    assert 0 < figures["html_mib"] < 5


def test_agreement() -> None:
    """Nodes agree over a real store on the rank that is missing, and one of them prints it."""
    command = [sys.executable, str(BENCHMARKS / "agreement.py"), "--json", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--nodes", "8"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout)["8_nodes"]
    assert figures["ranks"] == 64
    assert figures["right"] == figures["verdicts"] == figures["printed"] == 1
    assert 0 < figures["seconds_median"] <= figures["seconds_worst"]
