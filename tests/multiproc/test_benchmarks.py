"""Benchmarks that use an example go on working when the example changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]  # 50 s
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_training() -> None:
    """One short round of the training benchmark prints the figures it is there for."""
    command = [sys.executable, str(BENCHMARKS / "training.py"), "--json"]
    done = subprocess.run(
        [*command, "--rounds", "1", "--epochs", "1"],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout)
    assert {"ratio_median", "ring_mib_per_rank", "rss_added_mib"} <= figures.keys()
    assert figures["ratio_median"] > 0
