"""The identity of a process, and the test whether it is alive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rankcall import process
from rankcall.process import ALIVE, DEAD, UNKNOWN, Process


@contextmanager
def child() -> Iterator[subprocess.Popen[bytes]]:
    """Return a process that waits for its input to end; it is reaped in any case."""
    running = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield running
    finally:
        running.kill()
        running.wait(30)
        assert running.stdin is not None
        running.stdin.close()


def identity_of(pid: int) -> Process:
    """Return the identity of a process of this namespace."""
    return replace(Process.current(), pid=pid, start=process.process_start(pid) or 0)


def test_this_process_is_alive() -> None:
    """The calling process is alive and not stopped, and knows where its id is valid."""
    me = Process.current("node-a")
    assert me.liveness() == ALIVE
    assert me.state() == "alive"
    assert me.pid == os.getpid()
    assert me.pid_namespace == os.stat("/proc/self/ns/pid").st_ino
    assert me.host == "node-a"


def test_a_process_that_ends() -> None:
    """A stopped process is alive, a zombie is dead, and so is one that was reaped."""
    with child() as running:
        other = identity_of(running.pid)
        assert other.liveness() == ALIVE
        os.kill(running.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, running.pid, os.WSTOPPED)
        assert (other.liveness(), other.state()) == (ALIVE, "stopped")
        running.kill()
        os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOWAIT)
        assert other.liveness() == DEAD
        running.wait(30)
        assert other.liveness() == DEAD


def test_a_traced_process_is_not_stopped() -> None:
    """A process that a tracer holds is alive: py-spy holds a rank while it reads the stacks.

    The child stands still under its tracer, this process, as proc(5)'s letter shows.
    """
    trace_me = (
        "import ctypes, os, signal; ctypes.CDLL(None).ptrace(0, 0, 0, 0);"
        "os.kill(os.getpid(), signal.SIGSTOP)"
    )
    held = subprocess.Popen([sys.executable, "-c", trace_me])
    try:
        os.waitid(os.P_PID, held.pid, os.WSTOPPED | os.WNOWAIT)
        stat = Path(f"/proc/{held.pid}/stat").read_text()
        assert stat.rpartition(")")[2].split()[0] == "t"
        assert identity_of(held.pid).state() == "alive"
        assert process.has_tracer(held.pid)
    finally:
        held.kill()
        held.wait(30)


def test_a_reused_pid_is_another_process() -> None:
    """A pid that started at another time belongs to another process."""
    assert replace(Process.current(), start=1).liveness() == DEAD


@pytest.mark.parametrize(
    "elsewhere",
    [{"boot_id": "another"}, {"boot_id": ""}, {"pid_namespace": 1}, {"pid": 0}],
    ids=["another boot", "no boot", "another pid namespace", "no pid"],
)
def test_what_cannot_be_looked_up_is_unknown(elsewhere: dict[str, object]) -> None:
    """A pid of another host, boot or namespace is unknown, even if that number exists here."""
    me = Process.current()
    assert replace(me, **elsewhere).liveness() == UNKNOWN  # type: ignore[arg-type]
    assert replace(me, start=1, **elsewhere).liveness() == UNKNOWN  # type: ignore[arg-type]


def test_a_ring_without_a_namespace() -> None:
    """Without a namespace, as in rings of 0.1, a match means alive, and a mismatch unknown."""
    old = replace(Process.current(), pid_namespace=0)
    assert old.liveness() == ALIVE
    assert replace(old, start=1).liveness() == UNKNOWN


def test_a_hidden_process_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc may hide the processes of other users; the kernel still says that there is one."""
    monkeypatch.setattr(process, "_stat", lambda name: None)
    assert replace(Process.current(), start=7).liveness() == UNKNOWN


def test_proc_of_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """If /proc lists another namespace's processes, its numbers are not used."""
    monkeypatch.setattr(process.os, "readlink", lambda path: "1234567")
    assert replace(Process.current(), start=1).liveness() == UNKNOWN
