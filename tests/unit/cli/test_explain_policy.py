"""``rankcall explain-policy``: the table, and what it says about a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rankcall.cli import main
from rankcall.recovery.policy import POLICY
from rankcall.run.recoveries import AttemptEnd, Check, NodeChecked, Signature, file_of, note
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


def test_how_nodes_were(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last check of each node is shown, by this command and in the report."""
    fan = Check("command", "failed", "the health check ended with exit status 1: the fan")
    link = Check("network", "suspect", "no transfer between node-c and node-d\x1b[2J")
    for node, at, *checks in (
        ("node-b", 5, fan),
        ("node-a", 6, fan),
        ("node-a", 7, Check("disk", "well"), Check("device", "absent", "no driver")),
        ("node-c", 8, Check("disk", "well"), link),
    ):
        note(file_of(run, node, 1), NodeChecked(node, at, tuple(checks)))
    lines = [
        "node-a: 1 check, all well (not here: device)",
        "node-b: failed: command: the health check ended with exit status 1: the fan",
        "node-c: suspect: network: no transfer between node-c and node-d",
    ]
    assert main(["explain-policy", str(run)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert [
        line[5 : 5 + len(wanted)] for line, wanted in zip(_of(out), lines, strict=True)
    ] == lines
    assert main(["report", str(run)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert all(line in out for line in lines)
    assert main(["report", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["checks"]
    assert [checked["node"] for checked in told] == ["node-a", "node-b", "node-c"]
    assert told[2]["checks"][1] == {**vars(link), "seconds": 0.0}
    page = run / "page.html"
    assert main(["report", str(run), "-o", str(page)]) == 0
    assert all(f"<li>{line}" in page.read_text() for line in lines)


def _of(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("node ")]
