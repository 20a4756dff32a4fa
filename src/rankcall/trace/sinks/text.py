"""One JSON object per line, on stdout or in a file that is rotated by size."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path
from typing import TextIO

from rankcall.folders import make_folder
from rankcall.trace.descriptions import Descriptions
from rankcall.trace.sinks.optional import load_polars
from rankcall.trace.sinks.protocols import Origin

_MIB = 1 << 20


class Stdout:
    """Prints the descriptions that this rank has to print; docs/guides/trace.md has the rule.

    ``stream`` is the file to print to; the default is the ``sys.stdout`` of that moment.
    """

    sink_name = "stdout"

    def __init__(self, stream: TextIO | None = None) -> None:
        load_polars()
        self._stream = stream

    def open(self, origin: Origin) -> None:
        """Do nothing."""

    def write(self, descriptions: Descriptions) -> None:
        """Print whole lines in one call."""
        printed = descriptions.only(descriptions.columns["prints"])
        if len(printed):
            stream = self._stream or sys.stdout
            stream.write(printed.lines().decode())
            stream.flush()

    def close(self) -> None:
        """Do nothing: the stream belongs to the user."""


class JsonLines:
    """Writes every description of this rank to a file, one JSON object per line.

    A line is written completely or not at all.

    Args:
        path: The file. It may contain ``{rank}``, ``{host}`` and ``{attempt}``; without ``{rank}``
            each rank's file gets ``.rank-N`` before its suffix. The default is a file in ``trace/``
            in the run directory, or in the working directory if there is no run directory.
        max_mib: The size at which the file is renamed to ``NAME.1``, the one before it to
            ``NAME.2``, and so on.
        keep: How many renamed files to keep.

    Raises:
        ValueError: ``max_mib`` is not positive, or ``keep`` is negative.
    """

    sink_name = "jsonl"

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, max_mib: float = 64, keep: int = 4
    ) -> None:
        if not max_mib > 0:
            raise ValueError(f"max_mib must be more than 0; got {max_mib}")
        if keep < 0:
            raise ValueError(f"keep must be 0 or more; got {keep}")
        load_polars()
        self._asked = None if path is None else Path(path)
        self._max_bytes = max(1, int(max_mib * _MIB))
        self._keep = keep
        self._fd = -1
        # The batch whose writing failed, and how many bytes of it are written.
        self._written: tuple[Descriptions | None, int] = (None, 0)
        self.path: Path | None = None

    def open(self, origin: Origin) -> None:
        """Make the folder and open the file for appending."""
        self.path = place(self._asked, "jsonl", origin)
        if not self.path.parent.is_dir():
            make_folder(self.path.parent, private=False)
        self._fd = self._opened()

    def write(self, descriptions: Descriptions) -> None:
        """Append the lines. If that fails, remove the incomplete line; the caller tries again."""
        data = memoryview(descriptions.lines())
        batch, done = self._written
        done = done if batch is descriptions else 0
        while done < len(data):
            self._written = descriptions, done
            if self._fd < 0:
                self._fd = self._opened()
            size = os.fstat(self._fd).st_size
            part = _whole_lines(data[done:], self._max_bytes - size, fresh=size == 0)
            if len(part):
                self._append(part)
                done += len(part)
            else:
                self._rotate()
        self._written = None, 0

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _append(self, data: memoryview) -> None:
        before = os.fstat(self._fd).st_size
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError as error:
            error.filename = str(self.path)
            with contextlib.suppress(OSError):  # a pipe or a device cannot be truncated
                os.ftruncate(self._fd, before)
            raise

    def _opened(self) -> int:
        assert self.path is not None
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _rotate(self) -> None:
        assert self.path is not None
        self.close()
        for number in range(self._keep, 0, -1):
            older = Path(f"{self.path}.{number}")
            newer = Path(f"{self.path}.{number - 1}") if number > 1 else self.path
            if newer.exists():
                newer.replace(older)
        self.path.unlink(missing_ok=True)


def _whole_lines(data: memoryview, room: int, fresh: bool) -> memoryview:
    """Return as many lines as there is room for, but at least one if the file is ``fresh``."""
    if len(data) <= room:
        return data
    cut = bytes(data[: max(room, 0)]).rfind(b"\n") + 1
    if not cut and fresh:
        cut = bytes(data).find(b"\n") + 1
    return data[:cut]


def place(asked: Path | None, suffix: str, origin: Origin) -> Path:
    """Return the path of this rank's file, from the user's pattern or in the run directory."""
    host = re.sub(r"[^A-Za-z0-9_.-]+", "_", origin.host)
    if asked is None:
        name = f"rank-{origin.rank:05d}.attempt-{origin.attempt}.{suffix}"
        return (origin.run_dir or Path()) / "trace" / name
    text = str(asked)
    if "{rank}" not in text:
        asked = asked.with_name(f"{asked.stem}.rank-{origin.rank}{asked.suffix}")
        text = str(asked)
    for name, value in (("rank", origin.rank), ("attempt", origin.attempt), ("host", host)):
        text = text.replace(f"{{{name}}}", str(value))
    return Path(text)
