"""``rankcall explain-policy``: the table, and what it says about a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rankcall.cli import main
from rankcall.recovery.policy import POLICY
from rankcall.run.recoveries import AttemptEnd, Signature, file_of, note
from rankcall.testing import synthetic_run

END = AttemptEnd(
    0,
    Signature("dead", "all_reduce", "ValueError: bad batch", "one rank"),
    "program",
    step=1200,
    steps=1200,
    progressed=True,
    noticed_ns=5,
    decision="restart",
    rule="try_again",
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run of two ranks that ended well."""
    synthetic_run(tmp_path / "run", 2, 20)
    return tmp_path / "run"


def test_a_failure_that_came_back(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The row that fits is marked, and the earlier failure is shown."""
    for event in (END, replace(END, restart=1, noticed_ns=9, decision="stop")):
        note(file_of(run, "node-a", 1), event)
    assert main(["explain-policy", str(run)]) == 0
    out = capsys.readouterr().out
    assert all(row.rule in out for row in POLICY)
    (marked,) = [line for line in out.splitlines() if line.lstrip().startswith(">")]
    assert marked.split()[1] == "repeats"
    assert (
        "before: dead, one rank, all_reduce, ValueError: bad batch (program), at step 1,200" in out
    )
    assert "so:     stop (repeats): this failure repeats at step 1,200" in out


def test_a_run_without_failures(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table is printed all the same, and no row is marked."""
    assert main(["explain-policy", str(run)]) == 0
    said = capsys.readouterr()
    assert ">" not in said.out
    assert f"nothing has failed in {run}" in said.err.replace("\n", "")
