"""A copy of the run directory alone says what happened, also of ranks that ended without a word."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from launch import launch, run_program
from scenario_programs import HANG_AFTER_S, plain
from world import wait_until

from rankcall.analysis.verdicts import diagnose
from rankcall.cli.environment import BOOT
from rankcall.run.load import load
from rankcall.run.paths import ring_paths
from rankcall.testing import FaultPlan, start_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(550)]
PYTHON = sys.executable


def test_a_copy_that_is_made_after_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict of a job that still hangs follows from a copy of its run directory."""
    run, copied = tmp_path / "run", tmp_path / "copied"
    with start_ranks(
        plain,
        3,
        FaultPlan().hang(rank=1, seq=20),
        faults=FaultPlan().hang(rank=1, seq=20),
        run_dir=run,
        watch={"hang_after": HANG_AFTER_S},
    ):
        wait_until(lambda: list(run.glob("hangs/*/verdict.json")))
        wait_until(lambda: len(list((run / "rings").glob("*.tail.ring"))) == 3)
        # A hidden name is a file that is being written: it may be gone before it is copied.
        shutil.copytree(run, copied, ignore=shutil.ignore_patterns(".*"))
    monkeypatch.setenv("RANKCALL_SHM", str(tmp_path / "empty"))  # as on a laptop
    assert len(ring_paths(copied)) == 3
    diagnosis = diagnose(load(copied), state_of=lambda header: "unknown")
    (finding,) = diagnosis.findings
    kept_finding = json.loads((copied / "hangs/0001/verdict.json").read_text())["findings"][0]
    assert (finding.kind, finding.ranks) == ("missing", (1,))
    assert (finding.confidence, finding.seq) == (kept_finding["confidence"], kept_finding["seq"])


KILLED = """
import os, signal, sys, time
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + os.environ["MEET"], rank=rank, world_size=2)
dist.all_reduce(torch.ones(4))
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_reduce(torch.ones(4))
except RuntimeError:
    sys.exit(0)
"""


def test_the_ring_of_a_killed_rank(tmp_path: Path) -> None:
    """The next rank to end moves it into the run: no launcher and no command is needed."""
    (tmp_path / "killed.py").write_text(KILLED)
    both = f"RANK=1 {PYTHON} killed.py & RANK=0 {PYTHON} killed.py; wait"
    env = {"PYTHONPATH": str(BOOT), "RANKCALL": "1", "RANKCALL_CAPTURE": "python"}
    env |= {"MEET": str(tmp_path / "meet"), "RANKCALL_SHM": str(tmp_path / "shm")}
    env |= {"RANKCALL_RUN_DIR": str(tmp_path / "run")}
    (tmp_path / "shm").mkdir()
    run_program("bash", "-c", both, cwd=tmp_path, env=env)
    names = sorted(path.name[:10] for path in (tmp_path / "run/rings").iterdir())
    assert names == ["rank-00000", "rank-00001"]
    assert list((tmp_path / "shm").rglob("*.ring")) == []


RAISING = """
import os, sys
import torch
import torch.distributed as dist
{imports}

class Mine(Exception):
    pass

def train(rank):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(4))
    {end}

if __name__ == "__main__":
    {start}
"""
STARTS = {
    "script": ("", "train(0)"),
    "multiprocessing": (
        "import multiprocessing as mp",
        "p = mp.get_context('spawn').Process(target=train, args=(0,)); p.start(); p.join(100); "
        "assert p.exitcode is not None",
    ),
    "fork": (
        "import multiprocessing as mp",
        "p = mp.get_context('fork').Process(target=train, args=(0,)); p.start(); p.join(100); "
        "assert p.exitcode is not None",
    ),
    "torch": ("import torch.multiprocessing as mp", "mp.spawn(train, nprocs=1)"),
}
ENDS = {
    'raise Mine("of mine, --token=abc")': "Mine: of mine, --token=[redacted]",
    'raise ValueError("\\n")': "ValueError",
    "sys.exit(0)": "",
    "pass": "",
}


@pytest.mark.parametrize(
    ("start", "way"),
    [
        ("script", "exec"),
        pytest.param("torch", "variable", marks=pytest.mark.slow),
        pytest.param("script", "enable", marks=pytest.mark.slow),
        pytest.param("script", "variable", marks=pytest.mark.slow),
        pytest.param("multiprocessing", "variable", marks=pytest.mark.slow),
        pytest.param("fork", "variable", marks=pytest.mark.slow),
    ],
)
def test_an_exception_is_recorded(tmp_path: Path, start: str, way: str) -> None:
    """The exception that ended a rank is in its ring, without secrets, whatever started it."""
    for number, (end, failure) in enumerate(ENDS.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        imports, begin = STARTS[start]
        if way == "enable":
            begin = f"import rankcall; rankcall.enable('run', capture='python'); {begin}"
        (folder / "raising.py").write_text(RAISING.format(imports=imports, end=end, start=begin))
        env = {"RANKCALL_RUN_DIR": str(folder / "run"), "RANKCALL_CAPTURE": "python"}
        if way == "exec":
            launch("exec", "--", PYTHON, "raising.py", cwd=folder, env=env, timeout=120)
        else:
            env |= {"PYTHONPATH": str(BOOT), "RANKCALL": "1"} if way == "variable" else {}
            run_program(PYTHON, "raising.py", cwd=folder, env=env)
        (head,) = load(folder / "run").heads
        assert head.header.failure == failure
        assert bool(head.header.left_ns) == (failure == "")
        assert head.header.closed_ns


def test_the_status_of_a_child(tmp_path: Path) -> None:
    """A child of multiprocessing that exits with a status did not end well."""
    imports, begin = STARTS["multiprocessing"]
    text = RAISING.format(imports=imports, end="sys.exit(3)", start=begin)
    (tmp_path / "raising.py").write_text(text)
    env = {"RANKCALL_RUN_DIR": str(tmp_path / "run"), "RANKCALL_CAPTURE": "python"}
    env |= {"PYTHONPATH": str(BOOT), "RANKCALL": "1"}
    run_program(PYTHON, "raising.py", cwd=tmp_path, env=env)
    (head,) = load(tmp_path / "run").heads
    assert (head.header.failure, head.header.left_ns) == ("SystemExit: 3", 0)
