"""The formats by name, and the file that is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO

from rankcall._newfile import new_file
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
    with new_file(target) as out:
        write(run, out, progress)


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
