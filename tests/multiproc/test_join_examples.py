"""The examples of uneven inputs train to the end and equal one process, as they say themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import try_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]  # for a busy machine
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_uneven_fsdp() -> None:
    """Four ranks with 40, 30, 20 and 10 % of the digits."""
    results = try_ranks(EXAMPLES / "uneven_fsdp.py", 4, init=False, timeout=300)
    assert [each.exitcode for each in results] == [0] * 4, results
    assert "largest difference to training in one process" in results[0].stdout


def test_uneven_ddp_and_its_report(tmp_path: Path) -> None:
    """Recorded by the launcher; the report says who had nothing to do, and for how long."""
    command = [sys.executable, "-m", "rankcall"]
    options = ["run", "--run-dir", str(tmp_path / "run"), "--nproc-per-node", "4"]
    for words in ([*options, str(EXAMPLES / "uneven_ddp.py")], ["report", "--json", "run"]):
        done = subprocess.run(
            [*command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=300,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    (join,) = json.loads(done.stdout)["joins"]
    rows = join["ranks"]
    assert [row["batches"] for row in rows] == [135, 102, 69, 36]
    assert [row["shadowed"] for row in rows] == [0, 33, 66, 99]
    assert rows[3]["extra_s"] > rows[0]["extra_s"]
    text = subprocess.run(
        [*command, "report", "run"], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        check=True,
    ).stdout  # fmt: skip
    section = text.partition("Uneven inputs (Join)")[2].splitlines()
    assert section[2].split()[:4] == ["3", "36", "99", "0"]
