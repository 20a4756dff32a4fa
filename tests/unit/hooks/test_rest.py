"""Hooks in one process: their cost at rest and in a burst, and the interpreter's exit."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import polars  # noqa: F401  # sets an environment variable, which must not look like ours
import pytest
import torch
import torch.distributed as dist
from hooking import Seen, all_reduce, capture, group, hook_threads

from rankcall import hooks

__all__ = ["capture", "group"]  # fixtures


def switches(thread: threading.Thread) -> int:
    """Return how often a thread has gone to sleep."""
    text = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return int(text.split("voluntary_ctxt_switches:")[1].split()[0])


@pytest.mark.usefixtures("group")
def test_an_idle_process_is_left_alone() -> None:
    """Without events the thread wakes at most a few times a second, also with an op in flight."""
    seen = Seen()
    with hooks.register_collective_end_hook(seen):
        all_reduce()
        seen.wait(1)
        receive = dist.irecv(torch.zeros(2))  # from any rank, and no rank sends
        (thread,) = hook_threads()
        threading.Event().wait(0.1)  # the nap after the event is over
        before, began = switches(thread), time.monotonic()
        threading.Event().wait(1.5)  # the window that is measured; longer on a busy machine
        slept = switches(thread) - before
        assert 1 <= slept <= 5 * (time.monotonic() - began)
        assert [status.operation for status in hooks.pending()] == ["recv"]
        assert not receive.is_completed()


def run_script(text: str, timeout: float = 240) -> tuple[str, float]:
    """Run a script; return what it printed, and how long its exit took after the line "exit"."""
    prelude = """
        import os, sys, time, torch, torch.distributed as dist
        from rankcall import hooks
        tensor = torch.ones(1)  # kept to the end: CONTRIBUTING.md says why
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    """
    script = textwrap.dedent(prelude) + textwrap.dedent(text)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=timeout, check=False
    )
    ended = time.time()
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    exits = [float(line.split()[1]) for line in done.stdout.splitlines() if "exit" in line]
    return done.stdout, ended - exits[0]


def test_what_was_issued_just_before_exit_is_delivered() -> None:
    """The interpreter's exit drains."""
    out, _ = run_script("""
        count = 0
        def ended(status):
            global count
            count += 1
            if count == 500:
                os.write(1, b"all %d\\n" % status.sequence_number)
        hooks.register_collective_end_hook(ended)
        for _ in range(500):
            dist.all_reduce(tensor)
        os.write(1, b"exit %r\\n" % time.time())
    """)
    assert "all 500" in out


def test_a_hook_that_never_returns_holds_up_the_exit_for_two_seconds_at_most() -> None:
    """Draining has a limit, and an end in order."""
    _, took = run_script("""
        import threading
        inside = threading.Event()
        def stuck(status):
            inside.set()
            threading.Event().wait()
        hooks.register_collective_end_hook(stuck)
        dist.all_reduce(tensor)
        assert inside.wait(20)
        os.write(1, b"exit %r\\n" % time.time())
    """)
    assert 1.9 < took < 20  # with the time of the interpreter itself, on a busy machine
