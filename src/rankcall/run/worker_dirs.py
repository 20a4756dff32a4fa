"""The directories of RPC workers in shared memory, and those that no worker holds any more.

   /dev/shm/rankcall-<uid>/rpc/<session>/   0700; lock (held while it lives), in, 1, 2, ...

``in`` is the socket, and the numbers are the slabs. The kernel gives a lock up with its process, so
a lock that can be taken is that of a worker that was killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

from rankcall.run.moving import age_s

NAME = "rpc"  # beside the folders of the runs
_LOCK = "lock"
_MADE_SECONDS = 60.0  # a worker locks its directory much sooner after it has made it


def remove_unheld(base: Path) -> tuple[int, int]:
    """Remove the directories that no worker holds; return their number and size in bytes."""
    removed = freed = 0
    for folder in base.iterdir() if base.is_dir() else ():
        with suppress(OSError):
            size = _size_if_unheld(folder)
            if size is not None:
                removed, freed = removed + 1, freed + size
    return removed, freed


def _size_if_unheld(folder: Path) -> int | None:
    """Remove a directory and return its size, or return None if it may be held."""
    try:
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        if age_s(folder.lstat().st_mtime) < _MADE_SECONDS:
            return None
        return _removed(folder)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _removed(folder)
    finally:
        os.close(fd)


def _removed(folder: Path) -> int:
    size = sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in os.scandir(folder))
    shutil.rmtree(folder, ignore_errors=True)
    return size
