"""The guide's programs and commands do what it says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

GUIDE = (Path(__file__).parents[1] / "docs" / "failure-handling.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
COMMANDS = re.findall(r"^\$ (.*)$", GUIDE, re.MULTILINE)
REPLACED = {
    "devices": [sys.executable, "-m", "simulated_devices"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(PROGRAMS[0])
    (tmp_path / "recover.py").write_text(PROGRAMS[1])
    return tmp_path


def arguments(command: str) -> list[str]:
    """The command with this Python's own programs in place of those on PATH."""
    words = shlex.split(command)
    return [part for word in words for part in REPLACED.get(word, [word])]


def run(folder: Path, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments(command),
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_healthy_run(folder: Path) -> None:
    done = run(folder, COMMANDS[0])
    assert done.returncode == 0, done.stderr
    assert "rank 0: done" in done.stdout and "rank 1: done" in done.stdout


def test_the_watchdog_fires(folder: Path) -> None:
    order, export, job = COMMANDS[1:4]
    assert run(folder, order).returncode == 0
    name, _, value = export.removeprefix("export ").partition("=")
    done = run(folder, job, **{name: value})
    assert done.returncode == 1, done.stderr
    old = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=500, OpType=ALLREDUCE"
    assert old in done.stderr or "watchdog detected operation timeout" in done.stderr, done.stderr


def test_an_abort_releases_it(folder: Path) -> None:
    lift_before, order, job, lift = COMMANDS[4:8]
    assert run(folder, lift_before).returncode == 0 and run(folder, order).returncode == 0
    output = folder / "output"
    with output.open("w") as file:
        process = subprocess.Popen(arguments(job), cwd=folder, stdout=file, stderr=subprocess.STDOUT)
    try:
        while output.read_text().count("released") < 2:
            assert process.poll() is None, output.read_text()
            time.sleep(0.05)
        assert run(folder, lift).returncode == 0
        assert process.wait(60) == 0, output.read_text()
    finally:
        process.terminate()  # torchrun then ends its ranks, which a SIGKILL would leave behind
        process.wait(60)
    for rank in range(2):
        assert f"rank {rank}: step 1 is pending, aborting" in output.read_text()
        assert f"rank {rank}: goes on with 2 ranks" in output.read_text()


def test_the_suites_example(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last example is a test itself."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "100")
    names: dict[str, object] = {}
    exec(PROGRAMS[2], names)
    names["test_a_lost_device_ends_the_job"](folder)  # type: ignore[operator]
