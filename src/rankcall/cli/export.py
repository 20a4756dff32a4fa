"""``rankcall export``: write a run's records as a file for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankcall.cli.common import Attempt, RunPath, bar, open_run, output, report_problems
from rankcall.errors import RankcallError
from rankcall.export import FOLDERS, FORMATS, export
from rankcall.printable import clean
from rankcall.report.formatting import plural, size

_SUFFIXES = {**FORMATS, **FOLDERS}
_NAMES = ", ".join(_SUFFIXES)


def command(
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help=f"One of {_NAMES}.")],
    run: RunPath = None,
    attempt: Attempt = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="The file to write, or the folder if the format has a file for each rank; - is "
            "stdout. Without it: one named after the run, here.",
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="With flight-recorder: JSON instead of pickles.")
    ] = False,
) -> None:
    """Write all records of a run as a Perfetto trace, Parquet or JSON lines.

    Or write a file for each rank: Flight Recorder's dumps, or the traces of torch.profiler.

    The job may still run, or have been killed. Exits with 1 if part of the run could not be read;
    the file then has the rest.
    """
    if to not in _SUFFIXES:
        raise RankcallError(f"--to {clean(to)}: no such format; one of {_NAMES}")
    opened = open_run(run, attempt)
    path = file or Path(f"{opened.path.resolve().name}.{_SUFFIXES[to]}")
    if to in FOLDERS and str(path) == "-":
        raise RankcallError(f"--to {to} has a file for each rank: give -o the path of a folder")
    with bar(f"writing {to}") as progress:
        export(opened, to, path if to in FOLDERS else output(path), progress, as_json=json)
    if str(path) != "-":
        count = sum(opened.count(head)[0] for head in opened.heads)
        typer.echo(f"{path}: {plural(count, 'record')}, {size(_bytes(path))}")
    report_problems(opened.problems)


def _bytes(path: Path) -> int:
    """Return the size of a file, or of all files in a folder."""
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)
