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
from rankcall.rundir import host_name, live_base


class Place:
    """One worker's folder, made at once. ``close()`` removes it."""

    def __init__(self, session: int) -> None:
        self.path = _make(f"{session:016x}")
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


def _make(name: str) -> Path:
    """Make a folder below this user's own; clear up what is there from before."""
    for _ in range(100):
        base = _own_base()
        try:
            _sweep(base)
            (base / name).mkdir(mode=0o700)
            return base / name
        except FileNotFoundError:
            continue  # the last worker that ended has just removed the base
    raise FileNotFoundError(f"{base} disappears again and again")


def _own_base() -> Path:
    base = live_base() / f"rankcall-{os.getuid()}" / "rpc"
    base.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError, FileNotFoundError):
        base.mkdir(mode=0o700)
    for folder, forbidden in ((base.parent, 0o022), (base, 0o077)):
        with suppress(FileNotFoundError):
            about = folder.stat(follow_symlinks=False)
            if about.st_uid != os.getuid() or about.st_mode & forbidden:
                raise PermissionError(f"{folder} is not this user's alone: remove it")
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
