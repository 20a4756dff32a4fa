"""One file that holds a run: written by ``rankcall collect``, read wherever a run is read.

A tar file, compressed as its name says (``.tar.zst``, ``.tar.gz``, ``.tgz``, ``.tar``)::

    <run>/run.json                     of the first place that has one
    <run>/rings/*.ring                 every rank's, moved or live
    <run>/exits/*.jsonl                how workers ended
    <run>/states/<host>.<boot>.json    what living processes were doing when it was collected
    <run>/hangs/*/...                  the watcher's verdicts, with stacks

Nothing of it is executed, and nothing is extracted under a name of the archive's own choosing.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

from rankcall._hangs import HANGS
from rankcall.errors import CorruptRun
from rankcall.processes import EXITS, STATES

SUFFIXES = (".tar.zst", ".tar.gz", ".tgz", ".tar")
FOLDERS = ("rings", EXITS, STATES)  # without folders in them, unlike HANGS
_META = "run.json"
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NAME = re.compile(
    rf"{re.escape(_META)}|(?:{'|'.join(FOLDERS)})/{_PART}|{HANGS}/{_PART}(?:/{_PART}){{0,2}}"
)
_ZSTD_MAGIC, _GZIP_MAGIC = b"\x28\xb5\x2f\xfd", b"\x1f\x8b"
_MOST_MEMBERS = 1 << 21
_MOST_BYTES = 1 << 33  # of one member: twice the largest ring


def is_archive(path: Path) -> bool:
    """Tell by its first bytes, or its name, whether a file is an archive of a run."""
    if path.name.endswith(SUFFIXES):
        return True
    try:
        with path.open("rb") as file:
            return file.read(4).startswith((_ZSTD_MAGIC, _GZIP_MAGIC))
    except OSError:
        return False


def check_name(path: Path) -> None:
    """Raise ``ValueError`` where a name does not say how to compress."""
    if not path.name.endswith(SUFFIXES):
        raise ValueError(f"{path}: an archive's name ends with one of {', '.join(SUFFIXES)}")


def pack(files: Sequence[tuple[str, Path]], target: Path, name: str) -> list[str]:
    """Write an archive of files, each given with its name inside a run; never half a file.

    Returns the names of those that could not be read; of several files with one name the first is
    taken. Raises ``OSError`` where the archive cannot be written.
    """
    check_name(target)
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    left, seen = [], set()
    try:
        with _compressed(scratch, target.name) as out, _tar(out) as tar:
            for inside, path in files:
                if inside in seen or not _NAME.fullmatch(inside):
                    continue
                try:
                    _add(tar, f"{name}/{inside}", path)
                    seen.add(inside)
                except FileNotFoundError:
                    left.append(inside)  # it vanished meanwhile
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)
    return left


def _tar(out: IO[bytes]) -> tarfile.TarFile:
    return tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT)


def _add(tar: tarfile.TarFile, name: str, path: Path) -> None:
    """Add a file as it is now: one that grows meanwhile is cut, one that shrinks is filled."""
    with path.open("rb") as file:
        about = os.fstat(file.fileno())
        info = tarfile.TarInfo(name)
        info.size, info.mtime, info.mode = about.st_size, int(about.st_mtime), 0o600
        tar.addfile(info, cast(Any, _Exactly(file, info.size)))


class _Exactly:
    """Reads so many bytes of a file, whatever becomes of it."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self._left = file, size

    def read(self, size: int) -> bytes:
        data = self._file.read(min(size, self._left)).ljust(min(size, self._left), b"\0")
        self._left -= len(data)
        return data


@contextlib.contextmanager
def _compressed(path: Path, name: str) -> Iterator[IO[bytes]]:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as raw:
        if name.endswith(".zst"):
            import zstandard

            with zstandard.ZstdCompressor(level=3).stream_writer(raw, closefd=False) as out:
                yield cast(IO[bytes], out)
        elif name.endswith(".tar"):
            yield raw
        else:
            with gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=4, mtime=0) as out:
                yield cast(IO[bytes], out)


def unpack(archive: Path) -> Path:
    """Extract an archive into a new temporary folder, and return it; the caller removes it.

    Raises ``CorruptRun`` where the file is no archive of a run, or is damaged.
    """
    folder = Path(tempfile.mkdtemp(prefix="rankcall-"))
    try:
        with archive.open("rb") as raw, _plain(raw) as data:
            with tarfile.open(fileobj=data, mode="r|") as tar:
                found = sum(_extract(tar, member, folder) for member in _members(tar, archive))
        if not found:
            raise CorruptRun(f"{archive}: an archive with no run in it")
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, (tarfile.TarError, EOFError, gzip.BadGzipFile)) or _is_zstd(error):
            raise CorruptRun(f"{archive}: not an archive of a run, or damaged: {error}") from error
        raise
    return folder


def _is_zstd(error: BaseException) -> bool:
    return (
        type(error).__module__.partition(".")[0] == "zstandard" or "zlib" in type(error).__module__
    )


@contextlib.contextmanager
def _plain(raw: IO[bytes]) -> Iterator[IO[bytes]]:
    magic = raw.read(4)
    raw.seek(0)
    if magic == _ZSTD_MAGIC:
        import zstandard

        with zstandard.ZstdDecompressor().stream_reader(raw, closefd=False) as data:
            yield cast(IO[bytes], data)
    elif magic.startswith(_GZIP_MAGIC):
        with gzip.GzipFile(fileobj=raw, mode="rb") as unzipped:
            yield cast(IO[bytes], unzipped)
    else:
        yield raw


def _members(tar: tarfile.TarFile, archive: Path) -> Iterator[tarfile.TarInfo]:
    for number, member in enumerate(tar):
        if number >= _MOST_MEMBERS or member.size > _MOST_BYTES:
            raise CorruptRun(f"{archive}: no run is that large")
        yield member


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> bool:
    """Write a member whose name a run can have; tell whether it was a ring."""
    inside = member.name.partition("/")[2]
    if not member.isreg() or not _NAME.fullmatch(inside):
        return False
    target = folder / inside
    source = tar.extractfile(member)
    if source is None:
        return False
    try:
        target.parent.mkdir(exist_ok=True, parents=True, mode=0o700)
        out = open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")  # noqa: SIM115
    except (FileExistsError, NotADirectoryError):
        return False  # a second one of that name
    with out:
        shutil.copyfileobj(source, out, 1 << 20)
    return inside.startswith("rings/")
