"""``rankcall export``: write a run's records as a file for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankcall.cli._console import bar, open_run, output, report_problems
from rankcall.errors import RankcallError
from rankcall.export import FORMATS, export
from rankcall.files import clean
from rankcall.report.formatting import plural, size

_NAMES = ", ".join(FORMATS)


def command(
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help=f"One of {_NAMES}.")],
    run: Annotated[
        Path | None,
        typer.Argument(help="A run directory or a ring file. Without it: the latest run here."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="The file to write; - is stdout. Without it: a file named after the run, here.",
        ),
    ] = None,
) -> None:
    """Write all records of a run as a Perfetto trace, Parquet, JSON lines or CSV.

    The job may still run, or have been killed. Exits with 1 if part of the run could not be read;
    the file then has the rest.
    """
    if to not in FORMATS:
        raise RankcallError(f"--to {clean(to)}: no such format; one of {_NAMES}")
    opened = open_run(run)
    path = file or Path(f"{opened.path.resolve().name}.{FORMATS[to]}")
    with bar(f"writing {to}") as progress:
        export(opened, to, output(path), progress)
    if str(path) != "-":
        count = sum(opened.count(head)[0] for head in opened.heads)
        typer.echo(f"{path}: {plural(count, 'record')}, {size(path.stat().st_size)}")
    report_problems(opened.problems)
