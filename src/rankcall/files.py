"""Create and open files in folders that other users can reach.

Other users of a host can write to /dev/shm, to /tmp and to a shared disk. Three rules keep them
from reading, forging or redirecting rankcall's files:

* A folder that we make has mode 0700, whatever the umask. The mode of any other folder is left.
* A folder that was there already must be a folder (no symbolic link), belong to an owner that the
 caller trusts, and not be writable for others. Otherwise ``UnsafeFolderError`` says which rule
 broke.
* A new file is created with ``O_EXCL`` under a name that cannot be guessed; a file that is read
 is opened without following a link, and must be a regular file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, BinaryIO

from rankcall.errors import ExportError

_OPENED_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_ATTEMPTS = 8
_IS_LINK = "is a symbolic link, which rankcall does not follow here"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# A mapped page of these never waits for another host. Any other type, also one that is not listed
# yet, counts as remote. Recording then stays in memory.
_LOCAL = {"tmpfs", "ramfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "overlay"}


class UnsafeFolderError(PermissionError):
    """A folder, or a file in it, that another user can change; the text says which and why."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(errno.EPERM, f"{path} {reason}")


def clean(text: str) -> str:
    """Return a text from a file without characters that a terminal would act on."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def clean_lines(text: str) -> str:
    """Return a text of several lines without characters that a terminal would act on."""
    return "\n".join(clean(line) for line in text.split("\n"))


def reason(error: OSError) -> str:
    """Return what failed and where, in one line."""
    if isinstance(error, UnsafeFolderError) or error.filename is None:
        return str(error.strerror or error)
    return f"{error.filename}: {error.strerror}"


# --- folders ---


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
            _make_parents(path.parent)  # another process may remove them again: a bounded loop
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
        raise UnsafeFolderError(path, _IS_LINK)
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


def _make_parents(path: Path) -> None:
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


# --- files ---


def create_file(path: Path, mode: int | None = 0o600) -> int:
    """Create a file that must not exist, with exactly this mode; return its descriptor.

    ``mode`` None is what the umask leaves of 0666, as for any file that a user asks for.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o666 if mode is None else mode)
    try:
        if mode is not None and stat.S_IMODE(os.fstat(fd).st_mode) != mode:
            os.fchmod(fd, mode)
    except BaseException:
        os.close(fd)
        path.unlink(missing_ok=True)
        raise
    return fd


def open_file(path: Path) -> BinaryIO:
    """Open a regular file to read it. Raises ``UnsafeFolderError`` for a link, pipe or device."""
    try:
        fd = os.open(path, _OPENED_READ)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnsafeFolderError(path, _IS_LINK) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UnsafeFolderError(path, "is not a regular file")
    return open(fd, "rb")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read it, also behind a symbolic link; all else is an ``OSError``.

    A named pipe would hold its reader up until somebody writes.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(fd, "rb")


def append_line(path: Path, line: bytes) -> None:
    """Add a line to a file of mode 0600 in one write; a symbolic link is not followed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise UnsafeFolderError(path, "is not a regular file")
        os.write(fd, line)
    finally:
        os.close(fd)


def scratch_beside(target: Path) -> Path:
    """Return a hidden name beside ``target``; a link cannot be planted at a name that is random."""
    return target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}")


@contextlib.contextmanager
def replacing(target: Path, mode: int | None = 0o600) -> Iterator[BinaryIO]:
    """Write a file that gets its name when the block ends, and that is removed if it raises."""
    scratch = scratch_beside(target)
    with open(create_file(scratch, mode), "w+b") as out:
        try:
            yield out
            out.flush()
            scratch.replace(target)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def new_file(target: Path | IO[bytes]) -> Iterator[IO[bytes]]:
    """Open a file for a user's output; it gets its name when the block ends without an error.

    A pipe, a device or an open stream is written to directly.

    Raises:
        BrokenPipeError: The reader of a pipe has closed it.
        ExportError: The file cannot be written.
    """
    try:
        with _opened_for_output(target) as out:
            yield out
            out.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        name = target if isinstance(target, Path) else getattr(target, "name", "the output")
        reason = error.strerror or str(error)
        raise ExportError(f"{name}: cannot be written: {reason}") from error


def make_output_folder(path: Path) -> None:
    """Make a folder for a user's output, if it is missing; raise ``ExportError`` if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"{path}: cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def _opened_for_output(target: Path | IO[bytes]) -> Iterator[IO[bytes]]:
    if not isinstance(target, Path):
        yield target
        return
    if target.exists() and not target.is_file():
        with target.open("wb") as out:
            yield out
        return
    with replacing(target.resolve(), mode=None) as out:
        yield out


# --- file systems ---


def is_local(path: Path, mountinfo: str | None = None) -> bool:
    """Return whether a path is on a file system that does not depend on another host.

    ``mountinfo`` is the text of proc(5)'s mountinfo, for tests. False if it cannot be read.
    """
    return file_system(path, mountinfo) in _LOCAL


def check_local(folder: Path) -> None:
    """Raise ``UnsafeFolderError`` if a page of a file in a folder could wait for another host."""
    if not is_local(folder):
        kind = file_system(folder) or "unknown"
        raise UnsafeFolderError(folder, f"is on a file system that is not local ({kind})")


def file_system(path: Path, mountinfo: str | None = None) -> str:
    """Return the type of the file system that a path is on; empty if that is not known."""
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        except OSError:
            return ""
    wanted = os.path.realpath(path)
    best, kind = "", ""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if len(fields) < 5 or not rest[0]:
            continue
        mounted_at = _unescaped(fields[4])
        inside = wanted == mounted_at or wanted.startswith(mounted_at.rstrip("/") + "/")
        if inside and len(mounted_at) >= len(best):  # of two at one place the later hides the first
            best, kind = mounted_at, rest[0]
    return kind


def _unescaped(text: str) -> str:
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, char)
    return text
