"""The end of what each rank wrote to stderr, as its launcher kept it in the run directory.

::

   stderr/rank-00003.restart-0.node-a.4711.stderr    one file for each rank that was started

A file is a header and a ring of bytes: however much a rank writes, only the newest 256 KiB are
kept. Rank, host and the time of the start are in the name and in the header, because the launcher
makes the file before the rank's process exists. The ranks' words can hold secrets, so what leaves
the run directory goes through ``redaction``.
"""

from __future__ import annotations

import os
import re
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from rankcall.files import create_file, open_file
from rankcall.folders import run_folder
from rankcall.run.paths import files_in
from rankcall.run.redaction import redact_text

STDERR, SUFFIX = "stderr", ".stderr"
KEPT = 256 << 10  # bytes of a rank's stderr
_MAGIC = b"RCSTDERR"
_HEADER = struct.Struct("<8sQQ")  # the magic, the start in epoch ns, and how much was ever written
_NAME = re.compile(r"rank-(\d{5,7})\.restart-\d{1,9}\.([A-Za-z0-9_-]+)\.\d{1,10}\.stderr")


class TailFile:
    """Keeps the newest bytes of a stream in a file. Made by the launcher, before the rank starts.

    Args:
        folder: An existing folder.
        rank: The rank that writes the stream.
        restart: How often torchrun had restarted the ranks before.
        host: The name of this host.

    Raises:
        OSError: The file cannot be made.
    """

    def __init__(self, folder: Path, rank: int, restart: int, host: str) -> None:
        self.path = folder / _name_of(rank, restart, host, os.getpid())
        self._started, self._written = time.time_ns(), 0
        self._fd = create_file(self.path)
        self._write_header()

    def write(self, data: bytes) -> None:
        """Append bytes. Raises ``OSError``, for example if the disk is full."""
        self._written += len(data)
        kept = data[-KEPT:]
        at = (self._written - len(kept)) % KEPT
        first = kept[: KEPT - at]
        os.pwrite(self._fd, first, _HEADER.size + at)
        if len(first) < len(kept):
            os.pwrite(self._fd, kept[len(first) :], _HEADER.size)
        self._write_header()

    def close(self) -> None:
        """Close the file. Nothing can be written afterwards."""
        os.close(self._fd)

    def _write_header(self) -> None:
        os.pwrite(self._fd, _HEADER.pack(_MAGIC, self._started, self._written), 0)


class Tail(NamedTuple):
    """The end of the stderr of one process. ``host`` is as it stands in names of files."""

    rank: int
    host: str
    started_ns: int  # epoch; the process began a moment later
    path: Path

    def text(self) -> str:
        """Return what was kept, from the first whole line on; empty if it cannot be read."""
        return _read(self.path)[1]


def tails_of(run_dir: Path, ranks: Iterable[int]) -> list[Tail]:
    """Return the tails of some ranks, the newest first. Files that are no tails are left out."""
    wanted, tails = set(ranks), []
    for path in files_in(run_dir / STDERR, SUFFIX) if wanted else ():
        match = _NAME.fullmatch(path.name)
        if match and int(match[1]) in wanted:
            started_ns = _started(path)
            if started_ns:
                tails.append(Tail(int(match[1]), match[2], started_ns, path))
    return sorted(tails, key=lambda tail: -tail.started_ns)


def name_in_tails(host: str) -> str:
    """Return a host's name as it stands in the names of tails."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", host) or "_"


def redacted(path: Path) -> bytes:
    """Return a tail without secrets, in the format of its file. Raises ``OSError``."""
    started, text = _read(path)
    lines = "".join(redact_text(line) for line in _lines(text))
    raw = lines.encode()[-KEPT:]
    return _HEADER.pack(_MAGIC, started, len(raw)) + raw


def take_tails(folder: Path, run_dir: Path) -> None:
    """Copy tails that a launcher kept elsewhere into the run. Raises ``OSError``."""
    for path in files_in(folder, SUFFIX):
        with open_file(path) as file:
            content = file.read(_HEADER.size + KEPT)
        target = run_folder(run_dir, STDERR) / path.name
        if not target.exists():
            with open(create_file(target), "wb") as out:
                out.write(content)


def _name_of(rank: int, restart: int, host: str, pid: int) -> str:
    return f"rank-{rank:05d}.restart-{restart}.{name_in_tails(host)}.{pid}{SUFFIX}"


def _started(path: Path) -> int:
    """Return the time in a tail's header; 0 if it is no tail."""
    try:
        with open_file(path) as file:
            magic, started, _ = _HEADER.unpack(file.read(_HEADER.size))
    except (OSError, struct.error):
        return 0
    return int(started) if magic == _MAGIC else 0


def _read(path: Path) -> tuple[int, str]:
    """Return the time of the start, and the kept text; 0 and "" if it cannot be read."""
    try:
        with open_file(path) as file:
            magic, started, written = _HEADER.unpack(file.read(_HEADER.size))
            ring = file.read(KEPT)
    except (OSError, struct.error):
        return 0, ""
    if magic != _MAGIC:
        return 0, ""
    if written > len(ring):
        at = written % KEPT
        ring = ring[at:] + ring[:at]
        # The first line is not whole, and a character may be cut.
        ring = ring.partition(b"\n")[2] or ring
    else:
        ring = ring[:written]
    return int(started), ring.decode("utf-8", "replace")


def _lines(text: str) -> Iterator[str]:
    return iter(text.splitlines(keepends=True))
