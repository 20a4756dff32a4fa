"""An archive: one file that holds a run. ``pack`` writes it, for ``rankcall collect``.

It is a tar file, compressed as its name says (``.tar.zst``, ``.tar.gz``, ``.tgz``, ``.tar``)::

    <run>/run.json                     from the first run directory that has one, without secrets
    <run>/rings/*.ring                 every rank's ring, moved or live
    <run>/exits/*.jsonl                how workers ended
    <run>/states/<host>.<boot>.json    what living processes were doing when it was collected
    <run>/stderr/*.stderr              the end of what ranks wrote to stderr, without secrets
    <run>/hangs/*/...                  the watcher's verdicts, with stacks

It may also be a zip file of the same files, or of other tools' dumps. ``unpack`` reads all of them.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from rankcall.errors import CorruptRunError
from rankcall.files import open_file, open_regular, replacing
from rankcall.folders import UnsafeFolderError
from rankcall.ring.layout import HEADER_BYTES, offset_of, parse_header
from rankcall.run.exits import EXITS, STATES
from rankcall.run.paths import HANGS
from rankcall.run.recoveries import RECOVERIES
from rankcall.run.stderr_tails import STDERR

SUFFIXES = (".tar.zst", ".tar.gz", ".tgz", ".tar")
# They hold only files; HANGS also holds folders.
FOLDERS = ("rings", EXITS, STATES, STDERR, RECOVERIES)
_META = "run.json"
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
NAME = re.compile(
    rf"{re.escape(_META)}|(?:{'|'.join(FOLDERS)})/{_PART}|{HANGS}/{_PART}(?:/{_PART}){{0,2}}"
)
ZSTD_MAGIC, GZIP_MAGIC, ZIP_MAGIC = b"\x28\xb5\x2f\xfd", b"\x1f\x8b", b"PK\x03\x04"


def is_archive(path: Path) -> bool:
    """Return whether a file is an archive of a run, by its name or its first bytes."""
    if path.name.endswith(SUFFIXES):
        return True
    try:
        with open_regular(path) as file:
            return file.read(4).startswith((ZSTD_MAGIC, GZIP_MAGIC, ZIP_MAGIC))
    except OSError:
        return False


def check_name(path: Path) -> None:
    """Raise ``ValueError`` if the name's ending is not that of an archive."""
    if not path.name.endswith(SUFFIXES):
        raise ValueError(f"{path}: an archive's name ends with one of {', '.join(SUFFIXES)}")


def pack(files: Sequence[tuple[str, Path]], target: Path, name: str) -> list[str]:
    """Write an archive. It gets its name when it is complete.

    Only regular files are packed, because a link may lead to a file that the user did not mean to
    send. The unused end of a ring is left out.

    Args:
        files: The files, each with its name inside the run. Of several with one name, the first
            counts.
        target: The archive.
        name: The name of the run, which all members' names begin with.

    Returns:
        A line for each file that was left out, with the reason.

    Raises:
        OSError: The archive cannot be written.
    """
    check_name(target)
    left_out: list[str] = []
    seen: set[str] = set()
    with replacing(target) as scratch:
        with _compressed(scratch, target.name) as out, _tar(out) as tar:
            for inside, path in files:
                if inside in seen:
                    continue
                if not NAME.fullmatch(inside):
                    left_out.append(f"{inside}: a run has no file of that name")
                    continue
                try:
                    _add(tar, f"{name}/{inside}", path)
                    seen.add(inside)
                except FileNotFoundError:
                    left_out.append(f"{inside}: it was removed meanwhile")
                except UnsafeFolderError as error:
                    left_out.append(f"{inside}: {error.strerror}")
    return left_out


def _tar(out: IO[bytes]) -> tarfile.TarFile:
    return tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT)


def _add(tar: tarfile.TarFile, name: str, path: Path) -> None:
    """Add a file with its present size, even if it grows or shrinks meanwhile."""
    with open_file(path) as file:
        status = os.fstat(file.fileno())
        info = tarfile.TarInfo(name)
        info.size, info.mtime, info.mode = status.st_size, int(status.st_mtime), 0o600
        head = b""
        if path.name.endswith(".ring"):
            head, info.size = _used(file, info.size)
        tar.addfile(info, cast(Any, _Exactly(file, head, info.size)))


def _used(ring: IO[bytes], size: int) -> tuple[bytes, int]:
    """Return the ring's header and its size without the unused end."""
    raw = ring.read(HEADER_BYTES)
    try:
        used = parse_header(raw, "").used_bytes
    except CorruptRunError:
        return raw, size
    if used >= size:
        return raw, size
    at = offset_of("file_bytes")
    return raw[:at] + used.to_bytes(8, "little") + raw[at + 8 :], used


class _Exactly:
    """Reads exactly ``size`` bytes: ``head``, then the file, then zeros if the file is shorter."""

    def __init__(self, file: IO[bytes], head: bytes, size: int) -> None:
        self._file, self._head, self._left = file, head, size

    def read(self, size: int) -> bytes:
        wanted = min(size, self._left)
        data, self._head = self._head[:wanted], self._head[wanted:]
        data += self._file.read(wanted - len(data))
        self._left -= wanted
        return data.ljust(wanted, b"\0")


@contextlib.contextmanager
def _compressed(raw: BinaryIO, name: str) -> Iterator[IO[bytes]]:
    if name.endswith(".zst"):
        import zstandard

        with zstandard.ZstdCompressor(level=3).stream_writer(raw, closefd=False) as out:
            yield cast(IO[bytes], out)
    elif name.endswith(".tar"):
        yield raw
    else:
        with gzip.GzipFile("", fileobj=raw, mode="wb", compresslevel=4, mtime=0) as out:
            yield cast(IO[bytes], out)
