"""Write a run as a file for other tools: Parquet, CSV, JSON lines, or a Perfetto trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO

from rankcall.files import new_file
from rankcall.run.load import Progress, Run

__all__ = ["FORMATS", "export"]

Writer = Callable[[Run, IO[bytes], Progress | None], None]

# Format -> suffix of the file's name.
FORMATS = {
    "perfetto": "perfetto-trace",
    "parquet": "parquet",
    "jsonl": "jsonl",
    "csv": "csv",
}


def export(run: Run, to: str, target: Path | IO[bytes], progress: Progress | None = None) -> None:
    """Write all records of a run to a file, ring by ring.

    The run may be live, killed or copied. Records that cannot be read are left out and noted in
    ``Run.problems``. The memory needed is that of one ring; for several hosts, 24 bytes per record
    more while their clocks are compared.

    Args:
        run: The run.
        to: A name in ``FORMATS``.
        target: The file to write. A regular file gets its name once it is complete. Into a pipe
            or an open stream the bytes go directly.
        progress: Called with (rings written, all rings) after each ring.

    Raises:
        ValueError: The format is unknown.
        ExportFailed: The file cannot be written.
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
    from rankcall.export import table_files

    writers: dict[str, Writer] = {
        "parquet": table_files.write_parquet,
        "jsonl": table_files.write_jsonl,
        "csv": table_files.write_csv,
    }
    return writers[to]
