"""A worker's directory on its host: its Unix socket and its slabs of shared memory.

``run/worker_dirs.py`` says what is in it. A worker that starts on the host removes the directories
of workers that were killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

from rankcall.process import boot_id, host_name
from rankcall.run import worker_dirs
from rankcall.run.paths import live_base


class WorkerDir:
    """One worker's directory. ``close()`` removes it, but not in a forked child."""

    def __init__(self, session: int) -> None:
        self.path, self._lock = _make(f"{session:016x}")
        self._pid = os.getpid()

    @property
    def host(self) -> str:
        """The name of this host: workers with the same one can share memory.

        Two containers on one machine may have the same host name and boot id. The device number
        tells whether they see the same tmpfs.
        """
        return f"{host_name()} {boot_id()} {self.path.stat().st_dev}"

    def close(self) -> None:
        """Remove the directory with its content, once."""
        fd, self._lock = self._lock, -1
        if fd < 0:
            return
        # A forked child shares the lock with its parent, which goes on with the files.
        if os.getpid() == self._pid:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(fd)
        for folder in (self.path.parent, self.path.parent.parent):
            with suppress(OSError):
                folder.rmdir()


def _make(name: str) -> tuple[Path, int]:
    """Make and lock a directory; remove those of killed workers. Return it and the lock.

    Other workers may remove the directory before it is locked, and the base before it has any. So
    this compares the locked file with the one that has the name, and tries again.
    """
    for _ in range(100):  # each try fails only if another worker came in between
        base = _own_base()
        with suppress(FileNotFoundError, FileExistsError):
            worker_dirs.remove_unheld(base)
            path = base / name
            path.mkdir(mode=0o700)
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if (path / "lock").stat().st_ino == os.fstat(lock).st_ino:
                    return path, lock
            os.close(lock)
    raise FileNotFoundError(f"other processes remove {base} again and again")


def _own_base() -> Path:
    base = live_base() / f"rankcall-{os.getuid()}" / worker_dirs.NAME
    for folder in (base.parent.parent, base.parent, base):
        with suppress(FileExistsError, FileNotFoundError):
            folder.mkdir(mode=0o700)
    for folder, forbidden in ((base.parent, 0o022), (base, 0o077)):
        with suppress(FileNotFoundError):
            about = folder.stat(follow_symlinks=False)
            if about.st_uid != os.getuid() or about.st_mode & forbidden:
                raise PermissionError(
                    f"{folder} belongs to another user, or others can write or read it: remove it"
                )
    return base
