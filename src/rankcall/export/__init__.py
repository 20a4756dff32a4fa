"""Write a run for other tools.

As one file: Parquet, JSON lines, or a Perfetto trace. As a folder with one file for each rank:
Flight Recorder's dumps, or the traces of torch.profiler.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO

from rankcall.export.tables import write_jsonl, write_parquet
from rankcall.files import new_file
from rankcall.run.load import Progress, Run

__all__ = ["FOLDERS", "FORMATS", "export"]

Writer = Callable[[Run, IO[bytes], Progress | None], None]

# Format -> suffix of the file's name.
FORMATS = {
    "perfetto": "perfetto-trace",
    "parquet": "parquet",
    "jsonl": "jsonl",
}
# The same for formats that have a file for each rank, in a folder.
FOLDERS = {"flight-recorder": "dumps", "kineto": "traces"}


def export(
    run: Run,
    to: str,
    target: Path | IO[bytes],
    progress: Progress | None = None,
    *,
    as_json: bool = False,
) -> None:
    """Write all records of a run to a file, or to a folder with a file for each rank, ring by ring.

    The run may be live, killed or copied. Records that cannot be read are left out and noted in
    ``Run.problems``. The memory needed is that of one ring; for several hosts, 24 bytes per record
    more while their clocks are compared.

    Args:
        run: The run.
        to: A name in ``FORMATS`` or ``FOLDERS``.
        target: The file to write. A regular file gets its name once it is complete. Into a pipe
            or an open stream the bytes go directly. Flight Recorder's dumps and the traces of
            torch.profiler need the path of a folder.
        progress: Called with (rings written, all rings) after each ring.
        as_json: Write Flight Recorder's dumps as JSON, and not as pickles.

    Raises:
        ValueError: The format is unknown, or it needs the path of a folder.
        ExportError: The file cannot be written.
    """
    if to not in FORMATS and to not in FOLDERS:
        raise ValueError(f"no format {to!r}: one of {', '.join([*FORMATS, *FOLDERS])}")
    if to in FOLDERS:
        if not isinstance(target, Path):
            raise ValueError(f"{to} has a file for each rank: give the path of a folder")
        _export_folder(run, to, target, progress, as_json)
        return
    write = _writer(to)
    with new_file(target) as out:
        write(run, out, progress)


def _export_folder(
    run: Run, to: str, folder: Path, progress: Progress | None, as_json: bool
) -> None:
    if to == "kineto":
        from rankcall.export.kineto import write_kineto

        write_kineto(run, folder, progress)
    else:
        from rankcall.export.flight_recorder import write_dumps

        write_dumps(run, folder, progress, as_json=as_json)


def _writer(to: str) -> Writer:
    if to == "perfetto":
        from rankcall.export.perfetto import write_perfetto

        return write_perfetto

    writers: dict[str, Writer] = {
        "parquet": write_parquet,
        "jsonl": write_jsonl,
    }
    return writers[to]
