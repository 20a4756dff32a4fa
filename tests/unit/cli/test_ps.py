"""The live jobs of a host: ``rankcall ps``, and the run that a command without one means."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from liveruns import into_shared_memory, live_run

from rankcall.cli import main
from rankcall.errors import RunNotFoundError
from rankcall.ring.layout import offset_of
from rankcall.run.live_jobs import chosen_run, live_jobs
from rankcall.run.paths import make_live_dir
from rankcall.testing.synthetic import synthetic_run


@pytest.fixture
def someone() -> Iterator[subprocess.Popen[bytes]]:
    """Return a process that is there, until the test is over."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait(200)


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the rings in shared memory of this test alone, and work in a folder of it."""
    (tmp_path / "memory").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("RANKCALL_SHM", str(tmp_path / "memory"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "memory"


def started(folder: Path, pid: int, ranks: int = 4) -> Path:
    """Write a live job that hangs: its rings are in shared memory, and name the run."""
    return into_shared_memory(live_run(folder, ranks, pid))


def test_the_only_live_job_is_meant(tmp_path: Path, someone: subprocess.Popen[bytes]) -> None:
    """Without a run, commands take the job that hangs now, wherever it was started."""
    run = started(tmp_path / "elsewhere", someone.pid)
    synthetic_run(Path("rankcall-runs/old").absolute(), 2, 20)
    assert chosen_run(None) == run
    assert chosen_run("rankcall-runs/old") == Path("rankcall-runs/old")
    for command in (["diagnose"], ["top", "--once"]):
        done = subprocess.run(
            [Path(sys.executable).with_name("rankcall"), *command],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 1, done.stderr
        assert "rank 1" in done.stdout.lower()
        assert f"reading {run}, the only live job of this host" in done.stderr


def test_several_live_jobs(
    tmp_path: Path,
    someone: subprocess.Popen[bytes],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None is guessed: the latest run here counts, or all are named, and ``ps`` lists them."""
    monkeypatch.delenv("COLUMNS", raising=False)  # workers of pytest-xdist have it
    runs = [started(tmp_path / name, someone.pid) for name in ("a", "b")]
    with pytest.raises(RunNotFoundError, match="2 jobs are live on this host") as caught:
        chosen_run(None)
    assert all(str(run) in str(caught.value) for run in runs)
    assert main(["ps", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {job["run"] for job in listed} == {str(run) for run in runs}
    for job in listed:
        assert (job["ranks"], job["world_size"]) == ([0, 1, 2, 3], 4)
        assert job["pids"] == [someone.pid] * 4
    assert main(["ps"]) == 0
    piped = capsys.readouterr().out
    assert all(str(run) in piped for run in runs)  # not cut in two
    assert "0-3" in piped
    assert max(map(len, piped.splitlines())) < 500
    synthetic_run(Path("rankcall-runs/here").absolute(), 2, 20)
    assert chosen_run(None).name == "here"


def test_the_latest_run_of_a_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the folder in which the job was started, its run is found as well."""
    synthetic_run(Path("rankcall-runs/here").absolute(), 2, 20)
    deep = tmp_path / "work/src/deep"
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    assert chosen_run(None) == tmp_path / "work/rankcall-runs/here"


def test_no_live_job(
    tmp_path: Path, someone: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """Rings of ended processes are no job, and neither are damaged ones or foreign folders."""
    run = started(tmp_path / "a", someone.pid)
    someone.kill()
    someone.wait(200)
    folder = make_live_dir(run)
    (folder / "rank-00009.ring").write_bytes(b"RANKCALL" + b"\xff" * 5000)
    os.mkfifo(folder / "rank-00010.ring")
    assert live_jobs() == []
    assert main(["ps"]) == 0
    assert "no job of this user is recorded" in capsys.readouterr().err
    with pytest.raises(RunNotFoundError, match="no run given"):
        chosen_run(None)


def test_a_ring_cannot_name_another_run(tmp_path: Path, someone: subprocess.Popen[bytes]) -> None:
    """A run whose live rings are elsewhere is not taken on a ring's word."""
    run = started(tmp_path / "a", someone.pid)
    other = synthetic_run(tmp_path / "other", 2, 20).path
    folder = make_live_dir(run)
    for ring in folder.glob("*.ring"):
        with ring.open("r+b") as file:
            file.seek(offset_of("run_dir"))
            file.write(str(other).encode().ljust(1024, b"\0"))
    assert [job.place for job in live_jobs()] == [folder]
