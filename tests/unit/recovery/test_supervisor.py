"""The supervisor: from workers that have ended to a restart, a pause or the end of the job."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from receiving import Receiver

from rankcall.analysis.verdicts.encoding import encode
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.verdict import Origin, Verdict
from rankcall.folders import run_folder
from rankcall.job import notices
from rankcall.recovery import supervisor
from rankcall.recovery.history import decided
from rankcall.recovery.policy import Limits
from rankcall.recovery.supervisor import (
    JobStopped,
    Supervised,
    Supervisor,
    settings_from_environment,
)
from rankcall.run.exits import read_exits
from rankcall.run.hangs import fill, note_over
from rankcall.run.paths import HANGS
from rankcall.run.recoveries import END_VARIABLE, FILE_VARIABLE, GAVE_UP, read_recoveries


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
    monkeypatch.setenv(END_VARIABLE, "")


def test_a_crash_loop_ends(tmp_path: Path) -> None:
    """A program that fails at once is restarted once; the exits are noted in the run."""
    job = Job(tmp_path)
    job.attempt(3)
    with pytest.raises(JobStopped) as stopped:
        job.attempt(3)
    assert stopped.value.code == 65
    assert stopped.value.codes == {(1, (1 << 22) + 2): 3}
    assert "before an optimizer step was seen" in job.said[-1]
    assert "restarting will not help" in job.said[-1]
    assert [(ended.rank, ended.code) for ended in read_exits(tmp_path)] == [(1, 3), (1, 3)]
    (told,) = read_recoveries(tmp_path)
    assert [end.decision for end in told.ends] == ["restart", "stop"]
    assert [start.restart for start in told.starts] == [0, 1]
    assert os.environ[FILE_VARIABLE] == str(told.path)


def test_a_restart_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver of notices learns what failed and why the job goes on; the launcher says the end.

    The notice is sent while the policy's pause lasts.
    """
    job = Job(tmp_path)
    with Receiver().serving() as receiver:
        monkeypatch.setenv(notices.NOTIFY, receiver.url)
        job.attempt(3)
        with pytest.raises(JobStopped):
            job.attempt(3)
        notices.wait(60)
    [(_, body)] = receiver.got
    content = json.loads(body)
    assert content["type"] == "rankcall.restart"
    said = content["data"]
    assert (said["restarts"], said["rule"], said["run"]) == (1, "try_again", str(tmp_path))
    failure = said["failure"]
    assert (failure["kind"], failure["family"], failure["ranks"]) == ("dead", "program", [1])
    assert failure["hosts"] == [said["host"]]


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


def _keep_verdict(run_dir: Path, name: str, ident: str, *, over: bool = False) -> None:
    """Keep a verdict in a run, as the watchers do: rank 1 is stopped."""
    finding = Finding("stopped", (1,), summary="Rank 1 is stopped.", since_s=10.0, op="all_reduce")
    origin = Origin(ident, "boot", 1, time.time_ns(), 4711)
    folder = run_folder(run_dir, HANGS) / name
    fill(folder, encode(Verdict(str(run_dir), [finding], origin=origin)), "")
    if over:
        note_over(folder, 3.0)


@pytest.mark.parametrize(
    ("before", "during", "over", "kind"),
    [
        (False, True, False, "stopped"),  # the verdict is about this attempt
        (True, False, False, "dead"),  # it is about the attempt before
        (False, True, True, "dead"),  # the hang has passed, and then a worker crashed
        (True, True, False, "stopped"),
    ],
)
def test_a_stale_verdict_explains_nothing(
    before: bool, during: bool, over: bool, kind: str, tmp_path: Path
) -> None:
    """Only a verdict of this very attempt, of a hang that lasted, counts before the exits."""
    job = Job(tmp_path)
    if before:
        _keep_verdict(tmp_path, "0001", "old")
    job.supervisor.before_start(1)
    job.supervisor.started({0: 1 << 22, 1: (1 << 22) + 1}, 2)
    if during:
        _keep_verdict(tmp_path, "0002", "new", over=over)
    job.supervisor.failed({1: 3})
    job.supervisor.may_restart()
    (told,) = read_recoveries(tmp_path)
    assert told.ends[0].signature.kind == kind


def test_a_node_that_did_not_fail_blames_nobody(tmp_path: Path) -> None:
    """The launcher ended its workers. Without a verdict, it is not known who is at fault."""
    job = Job(tmp_path)
    job.supervisor.before_start(0)
    job.supervisor.started({0: 1 << 22}, 2)
    job.supervisor.follows()
    job.supervisor.before_start(1)
    job.supervisor.started({0: (1 << 22) + 1}, 3)
    job.supervisor.joined()
    (told,) = read_recoveries(tmp_path)
    assert [(end.signature.kind, end.culprits) for end in told.ends] == [
        ("another_node", ()),
        ("new_node", ()),
    ]
    assert all(end.fault_ns and end.noticed_ns for end in told.ends)  # a downtime can be told


def test_a_new_node_is_no_recovery(tmp_path: Path) -> None:
    """The limit counts restarts after failures, also those of other nodes, and no others."""
    job = Job(tmp_path, Limits(1, 60))
    for _ in range(3):
        job.supervisor.before_start(0)
        job.supervisor.started({0: 1 << 22, 1: (1 << 22) + 1}, 2)
        job.supervisor.joined()
    job.attempt(-9)
    with pytest.raises(JobStopped):
        job.attempt(-9)


def test_progress_until_a_new_node_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job got further between two failures, although that attempt did not fail."""
    job = Job(tmp_path)
    look = supervisor.cause_elsewhere
    for _ in range(9):  # without progress, the fourth in a row ends the job
        job.attempt(-9)
        with monkeypatch.context() as patch:
            patch.setattr(supervisor, "cause_elsewhere", lambda *all: replace(look(*all), steps=5))
            job.supervisor.joined()
    (told,) = read_recoveries(tmp_path)
    ends = [end for end in told.ends if end.rule != "joined"]
    assert [end.progressed for end in ends] == [False, *[True] * 8]


def test_the_launchers_own_limit(tmp_path: Path) -> None:
    """A failure after which torchrun may not restart is noted, so that a reader finds the last."""
    job = Job(tmp_path)
    job.attempt(-9)
    job.supervisor.before_start(1)
    job.supervisor.started({0: 1 << 22, 1: (1 << 22) + 9}, 2)
    job.supervisor.failed({1: 3})
    job.supervisor.gave_up()
    (told,) = read_recoveries(tmp_path)
    assert [(end.decision, end.rule) for end in told.ends] == [
        ("restart", "backs_off"),
        ("stop", GAVE_UP),
    ]
    assert [end.signature.line for end in decided([told])] == ["signal 9", "exit status 3"]
