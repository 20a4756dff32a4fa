"""The formats by name, and the file that is written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from rankcall.errors import ExportFailed
from rankcall.run import Progress, Run

Writer = Callable[[Run, IO[bytes], Progress | None], None]

# Name -> the end of a file's name.
FORMATS = {
    "perfetto": "perfetto-trace",
    "parquet": "parquet",
    "jsonl": "jsonl",
    "csv": "csv",
}


def export(run: Run, to: str, target: Path | IO[bytes], progress: Progress | None = None) -> None:
    """Write all records of a run to a file, ring by ring.

    ``to`` is one of ``FORMATS``. Works on a live, killed or copied run; what cannot be read is
    left out and noted in ``Run.problems``. A file appears under its name when it is whole; what
    is no regular file (a pipe, an open stream) is written to as it is. Memory: one ring, and for
    several hosts 24 bytes a record while their clocks are compared. ``progress``: (rings
    written, rings in all). Raises ``ValueError`` for a format that there is not,
    ``ExportFailed`` where the file cannot be written.
    """
    if to not in FORMATS:
        raise ValueError(f"no format {to!r}: one of {', '.join(FORMATS)}")
    write = _writer(to)
    try:
        with _opened(target) as out:
            write(run, out, progress)
            out.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        name = target if isinstance(target, Path) else getattr(target, "name", "the output")
        reason = error.strerror or str(error)
        raise ExportFailed(f"{name}: cannot be written: {reason}") from error


def _writer(to: str) -> Writer:
    if to == "perfetto":
        from rankcall.export.perfetto import write_perfetto

        return write_perfetto
    from rankcall.export import tables

    writers: dict[str, Writer] = {
        "parquet": tables.write_parquet,
        "jsonl": tables.write_jsonl,
        "csv": tables.write_csv,
    }
    return writers[to]


@contextlib.contextmanager
def _opened(target: Path | IO[bytes]) -> Iterator[IO[bytes]]:
    """Open a file that gets its name when it is whole, and goes away when it is not."""
    if not isinstance(target, Path):
        yield target
        return
    if target.exists() and not target.is_file():
        with target.open("wb") as out:
            yield out
        return
    target = target.resolve()
    scratch = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with scratch.open("xb") as out:
            yield out
        scratch.replace(target)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
