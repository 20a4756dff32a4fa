"""``rankcall diagnose``: which rank, in which collective, at which line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rankcall.analysis.diagnosis import Diagnosis, diagnose
from rankcall.analysis.find import HANG_AFTER_S
from rankcall.report import diagnosis, diagnosis_json
from rankcall.run import find_run, load, settle

__all__ = ["command"]


def command(
    run: Annotated[
        Path | None,
        typer.Argument(help="A run directory or a ring file. Without it: the latest run here."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the diagnosis as JSON.")] = False,
    hang_after: Annotated[
        float,
        typer.Option(
            envvar="RANKCALL_HANG_AFTER",
            min=0.0,
            help="Seconds that a call may be in flight before it counts as hung.",
        ),
    ] = HANG_AFTER_S,
) -> None:
    """Say which rank holds the others up, in which collective, called from which line.

    Reads a job that runs, one that is dead, or a copy. Exits with 0 where all is healthy, with 1
    where something was found.
    """
    found = read(run, hang_after)
    if json:
        sys.stdout.write(diagnosis_json.render(found))
    else:
        _print(found)
    sys.stdout.flush()
    if found.findings:
        raise typer.Exit(1)


def _print(found: Diagnosis) -> None:
    from rich.console import Console

    if (sys.stdout.encoding or "").lower().replace("-", "") != "utf8":
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    console = Console(highlight=False)
    if console.is_terminal:
        diagnosis.show(found, console)
    else:
        sys.stdout.write(diagnosis.render(found, console.width))


def read(path: Path | None, hang_after: float) -> Diagnosis:
    """Move what ended processes left on this host into the run, then read and diagnose it."""
    where = find_run(path)
    if where.is_dir():
        settle(where)
    return diagnose(load(where), hang_after)
