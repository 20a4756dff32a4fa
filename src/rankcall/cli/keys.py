"""The keys of a live view in a terminal."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator

LEAVE = "q or Ctrl-C leaves; the job goes on"
QUIT = "q"
# What terminals send for keys that have no character, as xterm and the Linux console do.
_NAMES = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b[H": "home",
    "\x1b[1~": "home",
    "\x1bOH": "home",
    "\x1b[F": "end",
    "\x1b[4~": "end",
    "\x1bOF": "end",
    "\x1bOP": "F1",
    "\x1b[11~": "F1",
    "\x1bOR": "F3",
    "\x1b[13~": "F3",
    "\x1bOS": "F4",
    "\x1b[14~": "F4",
    "\x1b[17~": "F6",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x1b": "escape",
}
_KEY = re.compile(r"\x1b(?:\[[0-9;]*[A-Za-z~]|O[A-Za-z])|.", re.DOTALL)


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], list[str]]]:
    """Yield a function that waits some seconds for keys, and returns those that were pressed.

    A key is its character, or a name such as ``up``, ``enter`` and ``F6``. The function returns as
    soon as there are any. If the terminal is gone, it returns ``QUIT``.

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


def _sleeps(seconds: float) -> list[str]:
    time.sleep(seconds)
    return []


def _pressed(fd: int, seconds: float) -> list[str]:
    if not select.select([fd], [], [], max(0.0, seconds))[0]:
        return []
    typed = os.read(fd, 256)
    return names_of(typed.decode("utf-8", "replace")) if typed else [QUIT]


def names_of(typed: str) -> list[str]:
    """Return the keys behind some characters; sequences of unknown keys are left out."""
    pressed = []
    for key in _KEY.findall(typed):
        name = _NAMES.get(key, key)
        if len(name) > 1 and name.startswith("\x1b"):
            continue
        if name in _NAMES.values() or name.isprintable():
            pressed.append(name)
    return pressed
