"""A worker's folder on this host: its socket and its shared-memory blocks, gone with the worker.

    /dev/shm/rankcall-<uid>/rpc/<session>/   0700; lock (held while the worker lives), in, 1, 2, ...

What a killed worker left is removed by the next one that starts on the host.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

from rankcall.ring.writer import boot_id
from rankcall.run import host_name, live_base


class Place:
    """One worker's folder, made at once. ``close()`` removes it."""

    def __init__(self, session: int) -> None:
        base = _own_base()
        _sweep(base)
        self.path = base / f"{session:016x}"
        self.path.mkdir(mode=0o700)
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    @property
    def host(self) -> str:
        """What names this host: workers that give the same one can share memory."""
        return f"{host_name()} {boot_id()} {self.path.stat().st_dev}"

    def close(self) -> None:
        """Remove the folder and what is in it, once."""
        fd, self._lock = self._lock, -1
        if fd < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(fd)
        for folder in (self.path.parent, self.path.parent.parent):
            with suppress(OSError):
                folder.rmdir()


def _own_base() -> Path:
    base = live_base() / f"rankcall-{os.getuid()}" / "rpc"
    for folder in (base.parent, base):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat(follow_symlinks=False)
        if about.st_uid != os.getuid() or about.st_mode & 0o077:
            raise PermissionError(f"{folder} is not this user's alone: remove it or chmod 700 it")
    return base


def _sweep(base: Path) -> None:
    """Remove the folders whose workers are no more."""
    for lock in base.glob("*/lock"):
        with suppress(OSError):
            fd = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(fd)
