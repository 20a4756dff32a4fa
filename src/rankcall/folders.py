"""Make and check folders that other users of the host can reach.

Other users can write to /dev/shm, to /tmp and to a shared disk. Two rules keep them from reading,
forging or redirecting what rankcall keeps there:

* A folder that we make has mode 0700, whatever the umask. The mode of any other folder is left.
* A folder that was there already must be a folder (no symbolic link), belong to an owner that the
  caller trusts, and not be writable for others. Otherwise ``UnsafeFolderError`` says which rule
  broke.

``files`` has the third: how a file is created and opened.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Collection
from pathlib import Path

_ATTEMPTS = 8  # to make a folder whose parents another process keeps removing
IS_LINK = "is a symbolic link, which rankcall does not follow here"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UnsafeFolderError(PermissionError):
    """A folder, or a file in it, that another user can change; the text says which and why."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(errno.EPERM, f"{path} {reason}")


def reason(error: OSError) -> str:
    """Return what failed and where, in one line."""
    if isinstance(error, UnsafeFolderError) or error.filename is None:
        return str(error.strerror or error)
    return f"{error.filename}: {error.strerror}"


def make_folder(path: Path, owners: Collection[int] = (), *, private: bool = True) -> None:
    """Make a folder of mode 0700 if it is missing; otherwise check it as ``check_folder`` does.

    Missing parents are made with mode 0755 at most, so that other users cannot rename the folder.
    """
    for _ in range(_ATTEMPTS):
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            break
        except FileNotFoundError:
            make_parents(path.parent)  # another process may remove them again: a bounded loop
        else:
            if stat.S_IMODE(path.lstat().st_mode) & 0o700 != 0o700:  # the umask took it from us
                _chmod(path, 0o700)
            return
    check_folder(path, owners, private=private)


def check_folder(path: Path, owners: Collection[int] = (), *, private: bool = True) -> None:
    """Raise ``UnsafeFolderError`` unless ``path`` is a folder of this user or of an owner.

    Args:
        path: The folder. It may not be a symbolic link.
        owners: User ids that are trusted beside the effective one of this process.
        private: Also require that group and others cannot write. Files on some network file systems
            show mode 0777 whatever is set, so a run directory is checked without this.
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise UnsafeFolderError(path, IS_LINK)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    _check_owner(path, status, owners, private=private)


def run_folder(run_dir: Path, name: str) -> Path:
    """Make or check a folder of a run directory, and return its path. Raises ``OSError``.

    Its owner may be that of the run directory, too: a network file system can give all files to
    one user (``all_squash``).
    """
    folder = run_dir / name
    owners = {run_dir.stat().st_uid} if run_dir.exists() else ()
    make_folder(folder, owners, private=False)
    return folder


def check_file(path: Path, owners: Collection[int] = ()) -> None:
    """Raise ``UnsafeFolderError`` unless a trusted user owns ``path``, a regular file."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise UnsafeFolderError(path, "is a link, or no regular file")
    _check_owner(path, status, owners, private=True)


def _check_owner(
    path: Path, status: os.stat_result, owners: Collection[int], *, private: bool
) -> None:
    if status.st_uid != os.geteuid() and status.st_uid not in owners:
        raise UnsafeFolderError(
            path, f"belongs to user {status.st_uid}, not to user {os.geteuid()}"
        )
    if private and status.st_mode & _OTHERS_WRITE:
        mode = stat.S_IMODE(status.st_mode)
        raise UnsafeFolderError(
            path, f"can be written by other users (mode {mode:04o}; chmod go-w)"
        )


def make_parents(path: Path) -> None:
    """Make a folder and its parents, of mode 0755 at most, as far as they are missing."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o755)
            if stat.S_IMODE(folder.lstat().st_mode) & 0o700 != 0o700:
                _chmod(folder, 0o755)


def _chmod(folder: Path, mode: int) -> None:
    """Set the mode of a folder that we made, through a descriptor that follows no link."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_uid == os.geteuid():
            os.chmod(f"/proc/self/fd/{fd}", mode)
    finally:
        os.close(fd)
