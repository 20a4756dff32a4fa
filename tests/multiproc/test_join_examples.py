"""The examples of uneven inputs train to the end and report that they equal one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import try_ranks

from rankcall.cli import main

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]  # for a busy machine
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_uneven_fsdp() -> None:
    """The FSDP2 example ends with the comparison to one process."""
    results = try_ranks(EXAMPLES / "uneven_fsdp.py", 4, init=False, timeout=300)
    assert [result.exitcode for result in results] == [0] * 4, results
    assert "largest difference to training in one process" in results[0].stdout


def test_uneven_ddp_and_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report of the DDP example lists each rank's batches, shadowed steps and their time."""
    run = tmp_path / "run"
    results = try_ranks(EXAMPLES / "uneven_ddp.py", 4, init=False, timeout=300, run_dir=run)
    assert [result.exitcode for result in results] == [0] * 4, results
    assert main(["report", "--json", str(run)]) == 0
    (join,) = json.loads(capsys.readouterr().out)["joins"]
    rows = join["ranks"]
    assert [row["batches"] for row in rows] == [135, 102, 69, 36]
    assert [row["shadowed"] for row in rows] == [0, 33, 66, 99]
    assert rows[3]["extra_s"] > rows[0]["extra_s"]
    assert main(["report", str(run)]) == 0
    section = capsys.readouterr().out.partition("Uneven inputs (Join)")[2].splitlines()
    assert section[2].split()[:4] == ["3", "36", "99", "0"]
