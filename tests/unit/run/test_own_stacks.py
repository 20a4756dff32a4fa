"""A request for stacks ends no process, at whatever moment of its life or its end it comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rankcall.run.own_stacks import STACK_SIGNAL

# A process that takes long to end: at its end, millions of objects are freed, and this is where the
# interpreter takes faulthandler's handler out. A thread of its own may register.
CHILD = """
import atexit, mmap, sys, threading
from pathlib import Path
from rankcall.ring.layout import Geometry
from rankcall.ring.writer import Identity, create
from rankcall.run.own_stacks import register_stack_dump, unregister_stack_dump

ring = create(Path(sys.argv[1]), Identity(rank=0, world_size=1, host="h"), Geometry(64, 8, 4096))
if sys.argv[2] == "thread":
    thread = threading.Thread(target=register_stack_dump, args=(ring,))
    thread.start()
    thread.join()
else:
    register_stack_dump(ring)
if sys.argv[2] == "unregistered":
    atexit.register(unregister_stack_dump, ring)
kept = {number: [number] for number in range(300_000)}
print("up", flush=True)
sys.stdin.read(1)
"""


@pytest.mark.parametrize("where", ["main", "thread", "unregistered"])
def test_a_signal_at_every_moment_of_an_end(tmp_path: Path, where: str) -> None:
    """The signal is sent again and again from before the end until the process is gone.

    A process unregisters at its exit, as the watcher does. If it cannot, it ends well, too, but for
    one of some 100,000 signals in a row: a thread that had just got it read what the interpreter
    had freed (SIGSEGV). A request sends one signal a thread.
    """
    for attempt in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path / f"{attempt}.ring"), where],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            assert process.stdin is not None
            assert process.stdout.readline() == b"up\n"
            process.stdin.close()  # from here on, it ends
            sent = 0
            while process.poll() is None:
                os.kill(process.pid, STACK_SIGNAL)
                sent += 1
            at_worst = -signal.SIGSEGV if where != "unregistered" else 0
            assert process.returncode in (0, at_worst), (attempt, sent)
            assert sent
        finally:
            process.kill()
            process.wait(60)
            process.stdout.close()
