"""The supervisor: from workers that have ended to a restart, a pause or the end of the job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rankcall.recovery.policy import EXIT_STATUS, Limits
from rankcall.recovery.supervisor import (
    JobStopped,
    Supervised,
    Supervisor,
    settings_from_environment,
)
from rankcall.run.exits import read_exits
from rankcall.run.recoveries import FILE_VARIABLE, read_recoveries


class Job:
    """A supervisor, with what it said and how long it slept."""

    def __init__(self, run_dir: Path, limits: Limits | None = None) -> None:
        self.said: list[str] = []
        self.slept: list[float] = []
        settings = Supervised(run_dir, limits or Limits())
        self.supervisor = Supervisor(settings, self.said.append, self.slept.append)
        self.restarts = 0

    def attempt(self, code: int) -> None:
        """Run an attempt whose rank 1 ends with a code, before it has made a ring."""
        self.supervisor.before_start(self.restarts)
        self.supervisor.started({0: 1 << 22, 1: (1 << 22) + 1 + self.restarts}, 2)
        self.supervisor.failed({1: code})
        self.restarts += 1
        self.supervisor.may_restart()


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FILE_VARIABLE, "")


def test_a_crash_loop_ends(tmp_path: Path) -> None:
    """A program that fails at once is restarted once; the exits are noted in the run."""
    job = Job(tmp_path)
    job.attempt(3)
    with pytest.raises(JobStopped) as stopped:
        job.attempt(3)
    assert stopped.value.code == EXIT_STATUS == 65
    assert stopped.value.codes == {(1, (1 << 22) + 2): 3}
    assert "before the first optimizer step" in job.said[-1]
    assert "restarting will not help" in job.said[-1]
    assert [(ended.rank, ended.code) for ended in read_exits(tmp_path)] == [(1, 3), (1, 3)]
    (told,) = read_recoveries(tmp_path)
    assert [end.decision for end in told.ends] == ["restart", "stop"]
    assert [start.restart for start in told.starts] == [0, 1]
    assert os.environ[FILE_VARIABLE] == str(told.path)


def test_kills_at_the_start_back_off(tmp_path: Path) -> None:
    """A machine that kills workers at once gets pauses, and then the job ends."""
    job = Job(tmp_path)
    for _ in range(3):
        job.attempt(-9)
    assert job.slept == [2.0, 4.0, 8.0]
    with pytest.raises(JobStopped):
        job.attempt(-9)
    assert "in 8 s" in job.said[2]


def test_another_node_decides(tmp_path: Path) -> None:
    """A node whose workers did not fail restarts them, even if the policy would end the job."""
    job = Job(tmp_path, Limits(0, 60))
    job.supervisor.before_start(0)
    job.supervisor.started({0: 1 << 22}, 2)
    job.supervisor.follows()
    (told,) = read_recoveries(tmp_path)
    assert [(end.decision, end.rule) for end in told.ends] == [("restart", "follows")]
    assert job.said == []


def test_limits(tmp_path: Path) -> None:
    """With no recovery allowed, the first failure ends the job."""
    with pytest.raises(JobStopped) as stopped:
        Job(tmp_path, Limits(0, 60)).attempt(-9)
    assert "--max-recoveries" in stopped.value.reason


def test_a_run_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The job is restarted all the same, and a warning says what is lost."""
    (tmp_path / "run").write_text("a file")
    Job(tmp_path / "run").attempt(3)
    assert "cannot note the recovery" in caplog.text


def test_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a job that is to recover, and that has a run, is supervised."""
    monkeypatch.setenv("RANKCALL_ON_HANG", "recover")
    monkeypatch.delenv("RANKCALL_RUN_DIR", raising=False)
    assert settings_from_environment() is None
    monkeypatch.setenv("RANKCALL_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("RANKCALL_MAX_RECOVERIES", "4")
    monkeypatch.setenv("RANKCALL_RECOVERY_WINDOW", "nonsense")
    assert settings_from_environment() == Supervised(tmp_path, Limits(4, Limits().window_s))
    monkeypatch.setenv("RANKCALL_ON_HANG", "abort")
    assert settings_from_environment() is None
