"""Notice when logs that are still written get lines that may be about a failure.

Only new bytes are searched, and nothing of them is kept: whoever follows logs reads them whole once
they have news. A log may be rotated meanwhile: it gets another name, which is looked for beside the
new file. It may also be truncated, which loses what it had.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rankcall.imports.logs.reading import Search, logs_of
from rankcall.imports.logs.sources import markers
from rankcall.printable import clean

_MOST_AT_ONCE = 1 << 24  # bytes of a log in one look; the rest is read in the next ones
_LONGEST_REST = 1 << 20  # bytes of a line whose end has not been written
_MOST_SIBLINGS = 10_000  # files beside a rotated log that are looked at

FileId = tuple[int, int]  # device and inode


@dataclass
class _Place:
    """How far one log has been searched."""

    file: FileId
    offset: int = 0
    rest: bytes = b""  # the beginning of a line whose end is not there yet


@dataclass
class Growth:
    """The logs of a job that goes on.

    Attributes:
        sources: Files and folders. One that does not exist yet is waited for.
        problems: What was lost, by the name of the log.
    """

    sources: Sequence[Path]
    problems: dict[str, str] = field(default_factory=dict)
    _places: dict[Path, _Place] = field(default_factory=dict)
    _rotated: dict[FileId, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Prepare the search for the words of the known messages."""
        self._search = Search(markers())

    @property
    def paths(self) -> list[Path]:
        """All logs that exist, older ones of a rotated log first."""
        rotated = [path for path in self._rotated.values() if path.exists()]
        return [*rotated, *(log.path for log in logs_of(self.sources) if log.path.exists())]

    def has_news(self) -> bool:
        """Search what was written since the last call; return whether a marker is in it."""
        old = set(self._rotated.values())
        paths = [log.path for log in logs_of(self.sources) if log.path not in old]
        return sum(self._look(path) for path in paths) > 0  # each of them is looked at

    def _look(self, path: Path) -> bool:
        try:
            # A FIFO would block, and could be read only once.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return False
            place = self._place_of(path, (status.st_dev, status.st_ino), status.st_size)
            file.seek(place.offset)
            block = file.read(_MOST_AT_ONCE)
        place.offset += len(block)
        lines, end, rest = (place.rest + block).rpartition(b"\n")
        place.rest = rest[-_LONGEST_REST:]
        return bool(self._search.hits(lines + end)) if end else False

    def _place_of(self, path: Path, file: FileId, size: int) -> _Place:
        """Return how far a log has been searched; it may be another file than at the last look."""
        place = self._places.get(path)
        if place is None:
            self._places[path] = place = _Place(file)
        elif place.file != file:
            older = _file_beside(path, place.file)
            if older is None:
                self._lost(path, "was replaced")
            else:
                self._rotated[place.file] = older
            self._places[path] = place = _Place(file)
        elif size < place.offset:
            self._lost(path, "was truncated")
            self._places[path] = place = _Place(file)
        return place

    def _lost(self, path: Path, how: str) -> None:
        name = clean(path.name)
        text = f"{name}: {how} while it was followed: what it said before that is not read"
        self.problems[name] = text


def _file_beside(path: Path, file: FileId) -> Path | None:
    """Return the file beside a log that has an inode: a rotated log; None if it is gone."""
    try:
        with os.scandir(path.parent) as entries:
            for entry, _ in zip(entries, range(_MOST_SIBLINGS), strict=False):
                if entry.inode() == file[1] and entry.stat().st_dev == file[0]:
                    return Path(entry.path)
    except OSError:
        pass
    return None
