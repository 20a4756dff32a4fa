"""``outcome.json`` of launchers that ask no policy: what their ends say of the next one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launch import launch

pytestmark = pytest.mark.multiproc

JOB = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    dist.all_reduce(torch.ones(2))
    optimizer.step()
    if os.environ["RANK"] == "1" and step == int(sys.argv[1]):
        raise ValueError(f"bad batch of process {os.getpid()}")
    dist.all_reduce(torch.ones(2))
"""


def outcome(run: Path) -> dict[str, Any]:
    """Return what the last launcher has written."""
    content: dict[str, Any] = json.loads((run / "outcome.json").read_text())
    return content


@pytest.mark.slow
def test_a_failure_that_comes_back(tmp_path: Path) -> None:
    """The same failure of the program, at the same step of the same run, is not worth a restart."""
    (tmp_path / "job.py").write_text(JOB)
    run = tmp_path / "run"
    command = ("run", "--capture", "python", "--run-dir", run, "--nproc-per-node=2")
    told = []
    for step in (3, 1, 3):
        assert launch(*command, tmp_path / "job.py", str(step), cwd=tmp_path).status == 1
        told.append(outcome(run))
    assert [content["restart_helps"] for content in told] == [True, True, False]
    assert [content["failures"] for content in told] == [1, 2, 3]
    assert {content["failure"]["ranks"][0] for content in told} == {1}
    assert told[-1]["reason"] == "this failure repeats at step 4: restarting will not help"
    ended = launch("explain-policy", run, cwd=tmp_path)
    assert ended.out.count("before: dead, one rank") == 2


@pytest.mark.parametrize(("command", "status"), [("true", 0), ("false", 1)])
def test_a_command_without_ranks(command: str, status: int, tmp_path: Path) -> None:
    """If the run was named, it says how the command ended, although no rank has come."""
    run = tmp_path / "some/run"
    ended = launch("exec", "--run-dir", run, "--", command, cwd=tmp_path)
    assert ended.status == status
    content = outcome(run)
    assert (content["status"], content["failure"]) == (status, None)
    assert content["outcome"] == ("failed" if status else "done")
    assert not launch("exec", "--", command, cwd=tmp_path / "some").out
    assert [path.name for path in (tmp_path / "some").iterdir()] == ["run"]  # no run was named
