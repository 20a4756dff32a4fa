"""A terminal for a command: its screen, typed keys, and the way it is left."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANKCALL = Path(sys.executable).with_name("rankcall")
ALTERNATE, NORMAL = "\x1b[?1049h", "\x1b[?1049l"  # screens, as xterm has them
HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"  # cursor


class Terminal:
    """A ``rankcall`` command in a pseudo-terminal of so many rows and columns."""

    def __init__(self, *args: str | Path, rows: int = 24, columns: int = 80) -> None:
        self._ours, theirs = pty.openpty()
        self.text = ""
        self.resize(rows, columns)
        self.before = termios.tcgetattr(theirs)
        env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
        self._theirs = theirs
        self.process = subprocess.Popen(
            [str(RANKCALL), *map(str, args)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**env, "TERM": "xterm-256color"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def resize(self, rows: int, columns: int) -> None:
        """Make it another size, as a user does by dragging."""
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, size)

    def type(self, keys: bytes) -> None:
        """Press keys; byte 3 is Ctrl-C."""
        os.write(self._ours, keys)

    def read_until(self, there: Callable[[str], Any], seconds: float = 60.0) -> str:
        """Read what is drawn until it has something, and return all since the start."""
        deadline = time.monotonic() + seconds
        while not there(self.text):
            assert time.monotonic() < deadline, self.text[-4000:]
            self._read(0.05)
        return self.text

    def status(self, seconds: float = 60.0) -> int:
        """Wait for its end; return its exit status."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text[-4000:]
            self._read(0.05)
        self._read(0.2)
        return self.process.returncode

    @property
    def settings(self) -> list[Any]:
        """How the terminal is set now."""
        return termios.tcgetattr(self._theirs)

    def _read(self, seconds: float) -> None:
        while select.select([self._ours], [], [], seconds)[0]:
            self.text += os.read(self._ours, 1 << 16).decode(errors="replace")
            seconds = 0.0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


def frames(text: str) -> list[str]:
    """Return the frames that were drawn in place, as plain lines."""
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", lambda m: "\f" if m[0] == "\x1b[H" else "", text)
    return [frame.replace("\r", "") for frame in drawn.split("\f")[1:] if frame.strip()]
