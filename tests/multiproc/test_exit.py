"""A job ends when its program does, whatever rankcall's threads are doing then."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from once import once

from rankcall.background import EXIT_S
from rankcall.run.settle import settle

pytestmark = pytest.mark.multiproc

PROGRAM = Path(__file__).with_name("exit_program.py")
THREADS = ("hooks", "trace", "watch", "lines", "heart", "join", "agree")
# The exit status that Python itself gives each ending.
STATUS = {
    "return": 0,
    "exit": 3,
    "raise": 1,
    "os_exit": 4,
    "sigterm": -signal.SIGTERM,
    "interrupt": -signal.SIGINT,
}
HANG_S = 250.0  # nothing that ends takes so long, the building of the RPC agent included


@dataclass(frozen=True)
class Ended:
    """How the program ended.

    ``seconds`` is the time from the program's last line to the end of its process, and ``waited``
    the part of it that rankcall's waits took (0 if the process ended at once).
    """

    status: int
    seconds: float
    waited: float
    err: str


def end(folder: Path, state: str, ending: str, *threads: str, capture: str = "native") -> Ended:
    """Run the program to its end."""
    environment = {
        **os.environ,
        "CAPTURE": capture,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(folder), state, ending, *threads],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        out, err = process.communicate(timeout=HANG_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # dumps the stacks
        _, err = process.communicate(timeout=HANG_S)
        pytest.fail(f"not ended after {HANG_S:g} s\n{err}")
    finally:
        process.kill()
        process.wait(HANG_S)
    now = time.monotonic_ns()
    assert out, f"the program did not come to its last line\n{err}"
    settle(folder / "run")
    waited = re.search(r"^waited (.+)$", err, re.MULTILINE)
    return Ended(
        process.returncode,
        (now - int(out)) / 1e9,
        float(waited.group(1)) if waited else 0.0,
        err,
    )


@once
def idle_seconds(_: str, folder: Path) -> float:
    """Return how long this machine takes to end the program without rankcall."""
    return end(folder, "off", "return").seconds


def check(ended: Ended, ending: str, folder: Path) -> None:
    """Check that an end was the program's own, and was not held up beyond the budget.

    A busy machine ends processes slowly, so what an end without rankcall takes counts ten times.
    If that is not enough, it is measured again: the machine may have become busier.
    """
    assert ended.status == STATUS[ending], ended.err
    assert "Fatal Python error" not in ended.err
    assert "Exception ignored" not in ended.err
    slow = max(1.0, idle_seconds("once", folder / "idle"))
    if ended.seconds >= EXIT_S + 10 * slow:
        slow = max(slow, end(folder / "again", "off", "return").seconds)
    assert ended.waited < EXIT_S + slow, ended.err  # it takes time to notice that time is up
    assert ended.seconds < EXIT_S + 10 * slow, f"{ended.seconds:.1f} s\n{ended.err}"


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param(ending, marks=[pytest.mark.slow] if ending in ("exit", "raise") else [])
        for ending in STATUS
    ],
)
def test_blocked_threads_do_not_hold_up_an_end(ending: str, tmp_path: Path) -> None:
    """However a program ends, threads that are blocked for ever cost one budget together."""
    check(end(tmp_path / "job", "blocked", ending, *THREADS), ending, tmp_path)


@pytest.mark.parametrize(
    "state",
    [
        "busy",
        "ended",
        pytest.param("idle", marks=pytest.mark.slow),
        pytest.param("blocked", marks=pytest.mark.slow),
    ],
)
def test_threads_of_the_python_capture(state: str, tmp_path: Path) -> None:
    """Threads that idle, spin, are blocked or have ended leave the exit status alone."""
    check(end(tmp_path / "job", state, "exit", *THREADS, capture="python"), "exit", tmp_path)


def test_a_thread_that_builds_the_recorder(tmp_path: Path) -> None:
    """An end does not wait for the lock that another thread holds while it compiles."""
    check(end(tmp_path / "job", "blocked", "return", "hooks", "lock"), "return", tmp_path)


@pytest.mark.timeout(600)
def test_a_request_that_never_ends(tmp_path: Path) -> None:
    """An RPC agent whose request is blocked shares the budget with the other threads."""
    pytest.importorskip("zmq")
    check(end(tmp_path / "job", "blocked", "exit", "hooks", "watch", "rpc"), "exit", tmp_path)
