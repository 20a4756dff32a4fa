"""Create, open and replace files in folders that other users can reach.

A new file is created with ``O_EXCL`` under a name that cannot be guessed. A file that is read is
opened without following a link, and must be a regular file. ``folders`` has the rules for the
folder that it is in.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

from rankcall.errors import ExportError
from rankcall.folders import IS_LINK, UnsafeFolderError

# O_NONBLOCK has no effect on regular files. Without it, opening a named pipe would wait until
# somebody writes into it.
_OPENED_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def create_file(path: Path, mode: int | None = 0o600) -> int:
    """Create a file that must not exist, with exactly this mode; return its descriptor.

    ``mode`` None is what the umask leaves of 0666, as for any file that a user asks for.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o666 if mode is None else mode)
    try:
        # The umask has taken bits away. The mode is set before the file has any content.
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
            raise UnsafeFolderError(path, IS_LINK) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UnsafeFolderError(path, "is not a regular file")
    return open(fd, "rb")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read it, also behind a symbolic link; all else is an ``OSError``.

    A named pipe would hold its reader up until somebody writes.
    """
    return open(descriptor_of_regular(path)[0], "rb")


def descriptor_of_regular(path: Path) -> tuple[int, os.stat_result]:
    """Open a file as ``open_regular`` does; return its descriptor and status.

    Of a thousand rings, Python's file objects would take a tenth of the time.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    except OSError:
        os.close(fd)
        raise
    return fd, status


def read_at_most(file: BinaryIO, most: int) -> bytes:
    """Return the content of a small file. Raises ``ValueError`` if it has more bytes than ``most``.

    The size is looked at first: a hole takes no disk, and fills memory like any other bytes.
    """
    size = os.fstat(file.fileno()).st_size
    if size > most:
        raise ValueError(f"it has {size:,} bytes, more than {most:,}")
    return file.read(most)


def append_line(path: Path, line: bytes) -> None:
    """Add a line to a file of mode 0600 in one write; a symbolic link is not followed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise UnsafeFolderError(path, "is not a regular file")
        # One write at the end of the file: lines of several processes do not mix.
        os.write(fd, line)
    finally:
        os.close(fd)


def scratch_beside(target: Path) -> Path:
    """Return a hidden name beside ``target``; a link cannot be planted at a name that is random."""
    # A name has at most 255 bytes: there is room for the number, also beside letters of two bytes.
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
        except BaseException:  # also Ctrl-C
            scratch.unlink(missing_ok=True)
            raise


def write_private(target: Path, content: bytes) -> None:
    """Write a file of mode 0600, whatever the umask. It gets its name when it is complete."""
    with replacing(target) as out:
        out.write(content)


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
    # A user's link stays a link, and the file that it leads to is replaced.
    with replacing(target.resolve(), mode=None) as out:
        yield out
