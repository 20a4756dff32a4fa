"""Which workers end after a verdict, and that a process that took over a pid is not touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.verdict import Verdict
from rankcall.capture import session
from rankcall.capture.settings import read_settings
from rankcall.job.ending import end_worker, workers_to_end
from rankcall.process import process_start
from rankcall.ring.layout import Header, read_header
from rankcall.run.exits import note_exit, read_exits


@pytest.fixture
def alive(tmp_path: Path) -> Iterator[Header]:
    """Return a header of this process."""
    recording = session.claim("watch", read_settings(tmp_path / "own"))
    try:
        assert recording.path is not None
        header = read_header(recording.path)
        assert header is not None
        yield replace(header, rank=0)
    finally:
        session.drop("watch")


def gone(header: Header, rank: int) -> Header:
    """Return the header of a process that has ended: its pid belongs to a later one."""
    return replace(header, rank=rank, process_start=header.process_start - 1)


def chosen(headers: list[Header], *findings: Finding) -> list[int]:
    """Return the ranks that end."""
    by_rank = {header.rank: header for header in headers}
    return [header.rank for header in workers_to_end(Verdict("run", list(findings)), by_rank)]


def test_who_ends(alive: Header) -> None:
    """The culprits that live here; without one anywhere, the lowest rank that waits."""
    here = [replace(alive, rank=rank) for rank in range(3)]
    assert chosen(here, Finding("missing", (1, 2))) == [1, 2]
    assert chosen(here, Finding("missing", (1,)), Finding("missing", (2,))) == [1]
    assert chosen(here, Finding("stuck", (), victims=(1, 2))) == [1]
    assert chosen(here, Finding("no_progress", ())) == [0]
    assert chosen(here) == [0]
    assert [header.rank for header in workers_to_end(None, {2: here[2]})] == [2]


def test_culprits_elsewhere_or_gone(alive: Header) -> None:
    """Another node ends its own ranks. One that is gone already leaves the lowest that waits."""
    here = [replace(alive, rank=rank) for rank in range(2)]
    assert chosen(here, Finding("missing", (7,), victims=(0, 1), hosts=("node-b",))) == []
    assert chosen(here, Finding("missing", (1, 7), hosts=("node-a", "node-b"))) == [1]
    dead = [here[0], gone(alive, 1)]
    assert chosen(dead, Finding("exhausted", (1,), victims=(0,))) == [0]
    assert chosen([gone(alive, 0)], Finding("stuck", (), victims=(0,))) == []


def test_culprits_that_nobody_can_end(alive: Header) -> None:
    """A rank that has not come to init_process_group has no ring: the lowest that waits ends."""
    here = [replace(alive, rank=rank) for rank in range(2)]
    assert chosen(here, Finding("no_progress", (2,), victims=(0, 1))) == [0]


def test_a_stopped_worker_ends(alive: Header, tmp_path: Path) -> None:
    """SIGKILL needs no SIGCONT. The run says that it was on purpose, whoever notes it later."""
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        start = process_start(child.pid)
        assert start is not None
        worker = replace(alive, rank=1, pid=child.pid, process_start=start)
        assert worker.process_state() == "stopped"
        assert chosen([worker], Finding("stopped", (1,))) == [1]
        end_worker(worker, tmp_path)
        assert child.wait(60) == -signal.SIGKILL
    finally:
        child.kill()
        child.wait()
    (ended,) = read_exits(tmp_path)
    assert (ended.rank, ended.code, ended.by_launcher) == (1, -signal.SIGKILL, True)
    note_exit(tmp_path, replace(ended, by_launcher=False))
    note_exit(tmp_path, replace(ended, code=None, by_launcher=False))
    assert read_exits(tmp_path) == [ended]


def test_another_process_of_that_pid_is_not_ended(alive: Header, tmp_path: Path) -> None:
    """The header of a process that has ended names a pid that belongs to this one now."""
    end_worker(gone(alive, 1), tmp_path)
    assert read_exits(tmp_path) == []
