"""The launcher notes how each worker ended, and never guesses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rankcall.cli.exits import ExitWatch
from rankcall.cli.outcome import note_failures
from rankcall.cli.torchrun import Outcome
from rankcall.ring.layout import Geometry, Header, make_header, parse_header
from rankcall.run.exits import Exit, note_exit, read_exits


def start_worker(rank: int) -> subprocess.Popen[bytes]:
    """Start a child that looks like a worker of torchrun and ends only if it gets a signal."""
    variables = {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": "0"}
    program = "print(flush=True); import signal; signal.pause()"
    worker = subprocess.Popen(
        [sys.executable, "-S", "-c", program], env=os.environ | variables, stdout=subprocess.PIPE
    )
    assert worker.stdout is not None
    worker.stdout.readline()
    return worker


def header_of(rank: int, pid: int) -> Header:
    """Return the header of a worker's ring."""
    return parse_header(make_header(Geometry(), {"rank": rank, "pid": pid, "host": b"h"}), "")


@pytest.mark.parametrize("reaped", [False, True])
def test_a_status_that_is_gone_is_unknown(tmp_path: Path, reaped: bool) -> None:
    """If torchrun has reaped the worker, its status is noted as unknown; otherwise as it was.

    Here the test takes torchrun's part, and calls the thread's function at the moments that matter.
    """
    watch = ExitWatch(tmp_path, "h")
    with start_worker(3) as worker:
        try:
            watch._poll(0)
            worker.send_signal(signal.SIGTERM)
            if reaped:
                worker.wait(timeout=20)
            watch._poll(20)
        finally:
            worker.kill()
            watch._selector.close()
    (ended,) = read_exits(tmp_path)
    assert (ended.rank, ended.pid, ended.by_launcher) == (3, worker.pid, False)
    assert ended.code == (None if reaped else -signal.SIGTERM)


def test_a_worker_that_torchrun_ends_is_not_the_first_to_fail(tmp_path: Path) -> None:
    """On a busy machine, torchrun reaps the failed worker, and ends the others, before a look."""
    watch = ExitWatch(tmp_path, "h")
    with start_worker(0) as failed, start_worker(2) as ended:
        try:
            watch._poll(0)
            failed.kill()
            failed.wait(timeout=20)
            watch._poll(20)
            ended.send_signal(signal.SIGTERM)
            watch._poll(20)
        finally:
            failed.kill()
            ended.kill()
            watch._selector.close()
    noted = {known.rank: (known.code, known.by_launcher) for known in read_exits(tmp_path)}
    assert noted == {0: (None, False), 2: (-signal.SIGTERM, True)}


def test_torchrun_knows_a_code_that_nobody_else_read(tmp_path: Path) -> None:
    """After the job, a known code replaces an unknown one; a code that was read stays."""
    note_exit(tmp_path, Exit(0, 0, "h", 10, None, 1))
    note_exit(tmp_path, Exit(1, 0, "h", 11, -9, 1))
    note_exit(tmp_path, Exit(2, 0, "h", 12, None, 1))
    note_exit(tmp_path, Exit(4, 0, "h", 14, None, 1))  # it has no ring
    headers = [header_of(rank, 10 + rank) for rank in range(4)]
    codes = {(0, 10): 3, (1, 11): -15, (3, 13): -15, (4, 14): 1}
    note_failures(tmp_path, Outcome(1, codes), headers)
    ends = {ended.rank: (ended.code, ended.by_launcher) for ended in read_exits(tmp_path)}
    assert ends == {0: (3, False), 1: (-9, False), 2: (None, False), 3: (-15, True), 4: (1, False)}


@pytest.mark.parametrize("attempt", [0, 2])
def test_a_worker_that_nobody_saw(tmp_path: Path, attempt: int) -> None:
    """It was gone before the first look, and torchrun alone knows its code: it ended first."""
    note_exit(tmp_path, Exit(1, 0, "h", 11, 1, 5))
    note_exit(tmp_path, Exit(1, attempt, "h", 21, -15, 70, by_launcher=True))
    note_exit(tmp_path, Exit(2, attempt, "h", 22, None, 80))
    note_failures(tmp_path, Outcome(1, {(0, 20): 3, (1, 21): -15, (2, 22): -15}), [])
    ends = {ended.pid: ended for ended in read_exits(tmp_path)}
    unseen = ends[20]
    assert (unseen.rank, unseen.attempt, unseen.code) == (0, attempt, 3)
    assert not unseen.by_launcher
    assert unseen.epoch_ns <= 70
    assert ends[21].by_launcher
    assert ends[22].by_launcher
