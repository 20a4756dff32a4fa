"""Extract an archive that any user may have made: ``unpack``.

Nothing in an archive is executed, only names that a run can have are extracted, and reading it is
limited in memory, in members, and in bytes on disk.
"""

from __future__ import annotations

import contextlib
import gzip
import lzma
import os
import re
import shutil
import struct
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, cast

import numpy as np

from rankcall.budget import Budget
from rankcall.errors import CorruptRunError
from rankcall.files import create_file, open_regular
from rankcall.ring.layout import HEADER_BYTES
from rankcall.run.archive import GZIP_MAGIC, NAME, ZIP_MAGIC, ZSTD_MAGIC

_MOST_MEMBERS = 1 << 19  # a run of 100,000 ranks has a ring and some stacks for each
_MOST_BYTES = 1 << 33  # of one member: twice the largest ring
_MOST_TOTAL = 1 << 37  # of all members; the free space of the temporary folder is another limit
_MOST_OF_FREE = 0.8  # other programs need room in the temporary folder, too
_MOST_ZIP_LIST = 1 << 28  # bytes of the list of members, which ``zipfile`` reads into memory
_ZIP_TAIL = 22 + (1 << 16)  # bytes that hold the end of a zip file's list
_MOST_NAME = 200  # characters of the name of a foreign file; its end tells the rank
_MOST_HEADER = 1 << 16  # of a member's extended header; our archives only have names there
_MOST_WINDOW = 1 << 25  # bytes that zstd may keep in memory; level 19 needs 8 MiB
# Of the data that is written. Zeros are not: a ring that is hardly used is 1 MiB of them, and zstd
# compresses 30,000 to 1 byte, so a run of many such rings would look like a decompression bomb.
# They become holes, which cost no disk; the time that they take has a limit of its own.
_MOST_RATIO, _RATIO_FROM = 10_000, 1 << 30
_PAGE = 4096  # bytes of the smallest hole
_PIECE = 1 << 20  # bytes that are copied at a time, whole pages


class _Refused(tarfile.ReadError):
    """Raised for content that an archive of a run never has."""


class _Member(tarfile.TarInfo):
    """A member whose headers are checked first, because ``tarfile`` reads them into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        """Decode a header block, and refuse types and sizes that our archives never have."""
        member = super().frombuf(buf, encoding, errors)
        if member.size < 0:
            raise _Refused("a member of negative size")
        if member.type in (tarfile.XGLTYPE, tarfile.GNUTYPE_SPARSE):
            raise _Refused("a global or a sparse header")
        extended = (
            tarfile.XHDTYPE,
            tarfile.SOLARIS_XHDTYPE,
            tarfile.GNUTYPE_LONGNAME,
            tarfile.GNUTYPE_LONGLINK,
        )
        if member.type in extended and member.size > _MOST_HEADER:
            raise _Refused(f"an extended header of {member.size:,} bytes")
        return member

    def _refuse_sparse(self, *_: object) -> None:
        raise _Refused("a sparse member")

    # tarfile would read the map of a sparse file, of any length, in each of its three formats.
    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_sparse


class _Limited:
    """Reads decompressed data up to the limits of size and time."""

    def __init__(self, data: IO[bytes], budget: Budget) -> None:
        self._data, self._budget = data, budget
        self._total = 0

    def read(self, size: int) -> bytes:
        data = self._data.read(size)
        self._total += len(data)
        if self._total > _MOST_TOTAL:
            raise _Refused(f"more than {_MOST_TOTAL >> 30:,} GiB")
        self._budget.check_time()
        return data


class _Disk:
    """Writes members to a folder, up to the limits of what an archive may take there."""

    def __init__(self, folder: Path, raw: IO[bytes], budget: Budget) -> None:
        self._raw, self._budget = raw, budget
        self._folder = folder.parent
        self._room = int(shutil.disk_usage(folder).free * _MOST_OF_FREE)
        self._written = 0

    def write(self, source: IO[bytes], out: IO[bytes]) -> None:
        """Copy a member into a new file. Its zeros become holes."""
        size = 0
        while piece := source.read(_PIECE):
            self._budget.check_time()
            for begin, end in _parts_with_data(piece):
                self._spend(end - begin)
                out.seek(size + begin)
                out.write(piece[begin:end])
            size += len(piece)
        out.truncate(size)

    def _spend(self, size: int) -> None:
        self._written += size
        if self._written > self._room:
            raise _Refused(f"more than {self._folder} has room for")
        if self._written > _RATIO_FROM and self._written > _MOST_RATIO * max(1, self._raw.tell()):
            raise _Refused(f"data that was compressed to less than 1 in {_MOST_RATIO:,}")


def _parts_with_data(piece: bytes) -> Iterator[tuple[int, int]]:
    """Yield where the parts of a piece begin and end that are not pages of zeros."""
    whole = len(piece) // _PAGE
    has_data = np.ones(whole + 2, bool)  # what is left of the last page counts as data
    has_data[0] = False
    pages = np.frombuffer(piece, "<u8", whole * _PAGE // 8).reshape(whole, _PAGE // 8)
    has_data[1:-1] = pages.any(axis=1)
    has_data[-1] = len(piece) > whole * _PAGE
    edges = np.flatnonzero(np.diff(has_data, append=False))
    for first, after in edges.reshape(-1, 2).tolist():
        yield first * _PAGE, min(after * _PAGE, len(piece))


def unpack(archive: Path, budget: Budget | None = None, *, dumps: bool = False) -> Path:
    """Extract an archive into a new temporary folder and return its path. The caller removes it.

    Args:
        archive: The file.
        budget: Of the run that the archive holds: its time is that for extracting, too.
        dumps: The archive holds files of other tools, which are extracted side by side; the folders
            that they were in become parts of their names.

    Raises:
        CorruptRunError: The file is not an archive of a run, is damaged, is larger than any run,
            does not fit into the temporary folder, or takes longer than the budget has time.
    """
    budget = budget or Budget()
    folder = Path(tempfile.mkdtemp(prefix="rankcall-"))
    try:
        with (
            open_regular(archive) as raw,
            budget.reading(archive, os.fstat(raw.fileno())),
            _members(raw, budget) as members,
        ):
            disk = _Disk(folder, raw, budget)
            naming = _flat_name if dumps else _name_in_run
            rings_or_dumps = _extract_all(members, folder, naming, disk)
        if not rings_or_dumps:
            raise CorruptRunError(f"{archive}: this archive holds no run")
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, _Refused):
            raise CorruptRunError(
                f"{archive}: not an archive of a run: it holds {error}"
            ) from error
        damaged = isinstance(error, _DAMAGES)
        if damaged or _is_zstd(error):
            raise CorruptRunError(
                f"{archive}: not an archive of a run, or damaged: {error}"
            ) from error
        raise
    return folder


# RuntimeError: a zip file is encrypted; NotImplementedError: it is compressed in a way that
# ``zipfile`` does not know.
_DAMAGES = (
    *(tarfile.TarError, EOFError, gzip.BadGzipFile, RecursionError, zipfile.BadZipFile),
    *(RuntimeError, NotImplementedError, lzma.LZMAError),
)


def _is_zstd(error: BaseException) -> bool:
    return (
        type(error).__module__.partition(".")[0] == "zstandard" or "zlib" in type(error).__module__
    )


class _Content(NamedTuple):
    """A member of an archive. ``name`` is empty if it is no regular file."""

    name: str
    size: int
    mtime: float
    open: Callable[[], IO[bytes] | None]


@contextlib.contextmanager
def _members(raw: BinaryIO, budget: Budget) -> Iterator[Iterable[_Content]]:
    magic = raw.read(4)
    raw.seek(0)
    if magic == ZIP_MAGIC:
        _check_zip_list(raw)
        with _damage_named():
            archive = zipfile.ZipFile(raw)
        with archive:
            _check_zip_sizes(archive.infolist(), os.fstat(raw.fileno()).st_size)
            yield map(partial(_zip_member, archive), archive.infolist())
        return
    with _plain(raw) as data:
        limited = cast(Any, _Limited(data, budget))
        with tarfile.open(fileobj=limited, mode="r|", tarinfo=_Member) as tar:
            yield _tar_members(tar)


def _tar_members(tar: tarfile.TarFile) -> Iterator[_Content]:
    while (member := tar.next()) is not None:
        cast(Any, tar).members = []  # a stream needs no list, and it would grow with the archive
        name = member.name if member.isreg() else ""
        yield _Content(name, member.size, member.mtime, partial(tar.extractfile, member))


def _zip_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> _Content:
    name = "" if member.filename.endswith("/") else member.filename
    try:
        mtime = time.mktime((*member.date_time, 0, 0, -1))  # zip files have local times
    except (ValueError, OverflowError):
        mtime = 0.0
    return _Content(name, member.file_size, mtime, partial(_open_in_zip, archive, member))


def _open_in_zip(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> IO[bytes]:
    with _damage_named():
        return archive.open(member)


@contextlib.contextmanager
def _damage_named() -> Iterator[None]:
    """Turn the errors of ``zipfile`` about impossible offsets and sizes into ``BadZipFile``."""
    try:
        yield
    except (OSError, ValueError, IndexError, OverflowError, struct.error) as error:
        raise zipfile.BadZipFile(str(error)) from error


def _check_zip_sizes(members: Iterable[zipfile.ZipInfo], size: int) -> None:
    """Refuse a zip file that is a decompression bomb, by what its list says of its members.

    Each member may be compressed as much as any, so a bomb lets its members share their data.
    """
    packed = sum(member.compress_size for member in members)
    unpacked = sum(member.file_size for member in members)
    if packed > size:
        raise _Refused("members that overlap")
    if unpacked > _RATIO_FROM and unpacked > _MOST_RATIO * size:
        raise _Refused(f"data that was compressed to less than 1 in {_MOST_RATIO:,}")


def _check_zip_list(raw: BinaryIO) -> None:
    """Refuse a zip file whose list of members is too large to be read into memory."""
    size = raw.seek(0, os.SEEK_END)
    raw.seek(max(0, size - _ZIP_TAIL))
    tail = raw.read()
    raw.seek(0)
    if b"PK\x06\x07" in tail:
        raise _Refused("more than 65,535 files, or 4 GiB, as a zip file: make a tar file of them")
    for match in re.finditer(rb"PK\x05\x06.{8}(.{4})", tail, re.DOTALL):
        if int.from_bytes(match[1], "little") > _MOST_ZIP_LIST:
            raise _Refused("a list of members that is too long")


@contextlib.contextmanager
def _plain(raw: IO[bytes]) -> Iterator[IO[bytes]]:
    magic = raw.read(4)
    raw.seek(0)
    if magic == ZSTD_MAGIC:
        import zstandard

        with zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW).stream_reader(
            raw, closefd=False
        ) as data:
            yield cast(IO[bytes], data)
    elif magic.startswith(GZIP_MAGIC):
        with gzip.GzipFile(fileobj=raw, mode="rb") as unzipped:
            yield cast(IO[bytes], unzipped)
    else:
        yield raw


Naming = Callable[[str], str]  # from a member's name to the name of its file; empty: skip it


def _name_in_run(member: str) -> str:
    inside = member.partition("/")[2]
    return inside if NAME.fullmatch(inside) else ""


def _flat_name(member: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "__", member.strip("./"))
    return name[-_MOST_NAME:].lstrip(".")


def _extract_all(members: Iterable[_Content], folder: Path, naming: Naming, disk: _Disk) -> int:
    """Extract the members that have a name, and return the number of rings or dumps."""
    rings = 0
    for count, member in enumerate(members, 1):
        if count > _MOST_MEMBERS:
            raise _Refused(f"more than {_MOST_MEMBERS:,} members")
        if member.size > _MOST_BYTES:
            raise _Refused(f"a member of {member.size:,} bytes")
        rings += _extract(member, folder, naming, disk)
    return rings


def _extract(member: _Content, folder: Path, naming: Naming, disk: _Disk) -> bool:
    """Extract a member if it gets a name; return whether it is a ring or a dump."""
    inside = naming(member.name)
    if inside.startswith("rings/") and member.size < HEADER_BYTES:
        return False  # a million empty files would take minutes
    source = member.open() if inside else None
    if source is None:
        return False
    target = folder / inside
    try:
        target.parent.mkdir(exist_ok=True, parents=True, mode=0o700)
        out = open(create_file(target), "wb")  # noqa: SIM115
    except (FileExistsError, NotADirectoryError):
        return False  # the archive has two members of that name
    with out:
        disk.write(source, out)
    if naming is _flat_name and 0 < member.mtime < 1 << 33:
        os.utime(target, (member.mtime, member.mtime))
    return naming is _flat_name or inside.startswith("rings/")
