"""The lock that shows other processes that a ring has a living writer.

A process id means nothing in another pid namespace, but a ``flock`` does. The kernel drops it
when the last descriptor of its open file description is closed, at the latest when the writer
ends. A command that moves or removes a ring takes the lock first, and never waits for it while
the writer may be alive.
"""

from __future__ import annotations

import contextlib
import fcntl
import os

_held: set[WriterLock] = set()
_registered = False


class WriterLock:
    """An exclusive flock on a ring file, held until ``release`` or the end of the process.

    It has an open file description of its own: the descriptor that ``mmap`` keeps would go to every
    forked child, which then holds the lock for as long as it lives. The child closes ours instead.
    """

    def __init__(self, ring_fd: int) -> None:
        self._fd = -1
        self._file = (0, 0)
        if ring_fd < 0:
            return
        fd = -1
        try:
            fd = os.open(f"/proc/self/fd/{ring_fd}", os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # a file system without flock: the ring says that it is not locked
            if fd >= 0:
                os.close(fd)
            return
        self._fd, self._file = fd, _identity(fd)
        _held.add(self)
        _register_once()

    @property
    def held(self) -> bool:
        """Whether this process holds the lock."""
        return self._fd >= 0

    def release(self) -> None:
        """Give the lock up. A second call does nothing."""
        fd, self._fd = self._fd, -1
        _held.discard(self)
        # A program that closes all descriptors, as daemons do, may have reused the number since.
        # Then it is a file of the user's, and must stay open.
        with contextlib.suppress(OSError):
            if fd >= 0 and _identity(fd) == self._file:
                os.close(fd)


def try_lock(fd: int) -> bool:
    """Take the lock on an open ring at once if it is free; closing ``fd`` releases it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _identity(fd: int) -> tuple[int, int]:
    about = os.fstat(fd)
    return about.st_dev, about.st_ino


def _in_forked_child() -> None:
    """Close the parent's locks. The files stay locked, because the parent has them open, too."""
    for lock in list(_held):
        lock.release()


def _register_once() -> None:
    global _registered
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_in_forked_child)
