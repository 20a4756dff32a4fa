"""A rank of a real job fails before it comes to its process group, in which the others wait."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import RANKCALL, launch

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = """
import os, sys
if os.environ["RANK"] == "0":
    {end}
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
"""
ENDS = {
    "an exception": ('raise ValueError("no such config")', "exited with code 1"),
    "an exit": ("sys.exit(3)", "exited with code 3"),
    "a signal": ("os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_rank_is_named(tmp_path: Path, end: str) -> None:
    """It is dead, whatever its launcher had then cut short in the others; nothing is healthy."""
    statement, words = ENDS[end]
    (tmp_path / "job.py").write_text(PROGRAM.format(end=statement))
    ended = launch(
        "run", "--run-dir", "run", "--nproc-per-node", "3", "job.py", cwd=tmp_path, timeout=400
    )
    assert ended.status != 0
    verdict = launch("diagnose", "run", cwd=tmp_path)
    said = " ".join(verdict.out.split())
    assert verdict.status == 1, verdict
    assert said.startswith("dead: Rank 0 "), said
    assert words in said
    assert "left no records" in said
    assert ("ValueError: no such config" in said) == (end == "an exception")


# The rank that fails waits until the others have begun to record, so that there is a run.
LATE = """
import os, sys, time
from pathlib import Path
deadline = time.monotonic() + 200
if os.environ["RANK"] == "0":
    while len(list(Path("live").glob("**/*.ring"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    sys.exit(3)
import torch.distributed as dist
dist.init_process_group("gloo")
"""


def test_below_a_launcher_that_notes_no_exits(tmp_path: Path) -> None:
    """Below ``exec torchrun``, nobody notes the end of a rank without records: it is named."""
    (tmp_path / "live").mkdir(mode=0o700)
    (tmp_path / "job.py").write_text(LATE)
    torchrun = [str(RANKCALL.with_name("torchrun")), "--nproc-per-node=3", "job.py"]
    options = ["exec", "--capture=python", "--run-dir=run", "--"]
    env = {"RANKCALL_SHM": str(tmp_path / "live")}
    ended = launch(*options, *torchrun, cwd=tmp_path, env=env, timeout=400)
    assert ended.status != 0
    verdict = launch("diagnose", "run", cwd=tmp_path, env=env)
    assert verdict.status == 1, verdict
    said = " ".join(verdict.out.split())
    assert "Rank 0 left no records. Ranks 1-2 " in said
    assert "before their process group was made" in said
