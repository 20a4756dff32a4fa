"""Python stacks of a rank from another process, without its GIL: faulthandler on a signal.

A rank that watches has a memory file that its stacks are dumped into when it gets
``STACK_SIGNAL``; who may read the process may read the file, through /proc, and nothing is left
behind. The handler runs in C on the main thread, so a rank that holds the GIL or waits in a
collective answers too; one that is stopped does not.
"""

from __future__ import annotations

import faulthandler
import fcntl
import mmap
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from rankcall.processes import process_state
from rankcall.ring.header import Header
from rankcall.ring.writer import put

# Never taken from a ring file: a ring says only where to read. In the middle of the real-time
# signals: glibc has the first, schedulers announce by SIGUSR1 and SIGUSR2.
STACK_SIGNAL = signal.SIGRTMIN + 16
WITHOUT_STACKS = -1  # in a ring's stack_fd: the process watches, and cannot dump its stacks
WAIT_S = 3.0  # a machine with more processes than cores lets some wait
_POLL_S = 0.01
_MOST_BYTES = 1 << 18
_MOST_KEPT = 1 << 22

_fd = 0


def register(ring: mmap.mmap) -> None:
    """Have this process dump its stacks on ``STACK_SIGNAL``, and say in its ring where to.

    It stays so until the process ends: a signal on its way to nobody would kill it.
    """
    global _fd
    if not _fd:
        try:
            _fd = os.memfd_create("rankcall-stacks")
            fcntl.fcntl(_fd, fcntl.F_SETFL, os.O_APPEND)
            # Of the thread that takes the signal only, which is the main one: to walk another's
            # frames while it runs can crash.
            faulthandler.register(STACK_SIGNAL, _fd, all_threads=False, chain=False)
        except (OSError, RuntimeError, AttributeError):
            _fd = WITHOUT_STACKS
    put(ring, "stack_fd", _fd)


def unregister(ring: mmap.mmap) -> None:
    """Say in the ring that nobody answers any more."""
    put(ring, "stack_fd", 0)


def ask(headers: Iterable[Header], wait_s: float = WAIT_S) -> dict[int, str]:
    """Return the stacks of those ranks of this host that dump them, by rank.

    Takes at most ``wait_s`` s for all together; who does not answer is left out.
    """
    files: dict[int, _Dump] = {}
    for header in headers:
        if header.stack_fd > 0 and _answers(header):
            dump = _Dump(header)
            if dump.ask():
                files[header.rank] = dump
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline and not _all_settled(files.values()):
        time.sleep(_POLL_S)
    return {rank: text for rank, dump in files.items() if (text := dump.text())}


def _answers(header: Header) -> bool:
    """Tell whether the ring's process is there, is ours, and takes the signal."""
    if process_state(header) != "alive":
        return False  # one that is stopped would answer when it goes on
    try:
        if Path(f"/proc/{header.pid}").stat().st_uid != os.getuid():
            return False
        for line in Path(f"/proc/{header.pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (STACK_SIGNAL - 1) & 1)
    except (OSError, ValueError):
        pass
    return False


def _all_settled(dumps: Iterable[_Dump]) -> bool:
    return min([dump.settled() for dump in dumps], default=True)


class _Dump:
    """One process's memory file, from where it ended before the signal."""

    def __init__(self, header: Header) -> None:
        self._pid = header.pid
        self._path = f"/proc/{header.pid}/fd/{header.stack_fd}"
        self._from = self._last = 0
        self._steady = 0

    def ask(self) -> bool:
        """Send the signal; False where the file is not what it should be, or the process gone."""
        try:
            if not os.readlink(self._path).startswith("/memfd:rankcall-stacks"):
                return False
            if self._size() > _MOST_KEPT:
                os.truncate(self._path, 0)
            self._from = self._last = self._size()
            if self._pid == os.getpid():
                # Here the GIL is held: no other thread's frames change meanwhile.
                faulthandler.dump_traceback(_fd, all_threads=True)
            else:
                os.kill(self._pid, STACK_SIGNAL)
            return True
        except OSError:
            return False

    def settled(self) -> bool:
        """Tell whether something has come, and nothing more comes."""
        size = self._size()
        self._steady = self._steady + 1 if size == self._last and size > self._from else 0
        self._last = size
        return self._steady >= 2

    def text(self) -> str:
        """Return what was dumped."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._from)
                return file.read(_MOST_BYTES).decode("utf-8", "replace").strip()
        except OSError:
            return ""

    def _size(self) -> int:
        try:
            return os.stat(self._path).st_size
        except OSError:
            return self._last
