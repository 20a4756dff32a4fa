"""A file that appears when it is whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from rankcall.errors import ExportFailed
from rankcall.files import replacing


@contextlib.contextmanager
def new_file(target: Path | IO[bytes]) -> Iterator[IO[bytes]]:
    """Open a file that gets its name when the block ends, and goes away when it raises.

    What is no regular file (a pipe, a device, an open stream) is written to as it is. Raises
    ``ExportFailed`` where it cannot be written; a closed pipe stays ``BrokenPipeError``.
    """
    try:
        with _opened(target) as out:
            yield out
            out.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        name = target if isinstance(target, Path) else getattr(target, "name", "the output")
        reason = error.strerror or str(error)
        raise ExportFailed(f"{name}: cannot be written: {reason}") from error


@contextlib.contextmanager
def _opened(target: Path | IO[bytes]) -> Iterator[IO[bytes]]:
    if not isinstance(target, Path):
        yield target
        return
    if target.exists() and not target.is_file():
        with target.open("wb") as out:
            yield out
        return
    with replacing(target.resolve(), mode=None) as out:
        yield out
