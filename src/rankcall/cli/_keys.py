"""Leaving a live view by a key: ``q``, as everywhere."""

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
    """Yield what waits so many s, and tells whether the user wants to leave.

    Where the terminal is the user's, keys are taken as they are pressed and not shown, and the
    terminal is as it was afterwards. Without one, nobody can press any.
    """
    try:
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
        ours = os.tcgetpgrp(fd) == os.getpgrp()
    except (OSError, ValueError, AttributeError, termios.error):
        ours = False
    if not ours:  # or it runs in the background, where to change the terminal would stop it
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
        if not typed or not _QUITS.isdisjoint(typed):  # the terminal is gone, or it was pressed
            return True
    return False
