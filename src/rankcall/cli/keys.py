"""The keys of a live view in a terminal."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator

LEAVE = "q or Ctrl-C leaves; the job goes on"
_QUITS = frozenset(b"qQ")


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits some seconds, and returns whether the user pressed ``q``.

    If this process may use a terminal, the block reads keys at once and does not echo them. At the
    end it restores the terminal. Without a terminal the function only waits.
    """
    try:
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
        in_foreground = os.tcgetpgrp(fd) == os.getpgrp()
    except (OSError, ValueError, AttributeError, termios.error):
        in_foreground = False
    if not in_foreground:  # a background process that changes the terminal is stopped
        yield _sleeps
        return
    try:
        tty.setcbreak(fd)
        yield lambda seconds: _pressed(fd, seconds)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _sleeps(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _pressed(fd: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
        typed = os.read(fd, 64)
        if not typed or not _QUITS.isdisjoint(typed):  # no bytes: the terminal is gone
            return True
    return False
