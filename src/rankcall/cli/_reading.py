"""Helpers of the commands that read runs: open a run, show progress, report problems."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Annotated

import typer

from rankcall.report._format import clean
from rankcall.run import Progress, Run, load
from rankcall.rundir import find_run, settle

HangAfter = Annotated[
    float | None,
    typer.Option(
        envvar="RANKCALL_HANG_AFTER",
        min=0.0,
        help="Seconds that a call may be in flight before it counts as hung. Without it, or with "
        "0: the value that the job was started with, or 60.",
    ),
]
_SHOW_FROM = 32  # rings; fewer are read before a bar appears


def open_run(path: Path | None) -> Run:
    """Move the rings of this host's ended processes into the run, then load the run."""
    where = find_run(path)
    if where.is_dir():
        settle(where)
    with bar("reading names") as progress:
        return load(where, progress)


def output(path: Path) -> Path | IO[bytes]:
    """Return the file to write: the path, or stdout for ``-``."""
    return sys.stdout.buffer if str(path) == "-" else path


def report_problems(problems: Sequence[str]) -> None:
    """Print each problem as a line on stderr; exit with 1 if there is any."""
    for problem in problems:
        typer.echo(f"rankcall: problem: {clean(problem)}", err=True)
    if problems:
        raise typer.Exit(1)


@contextlib.contextmanager
def bar(what: str) -> Iterator[Progress]:
    """Draw a progress bar on stderr during a long load, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        yield _follow(bar.add_task(what, total=None, visible=False), bar.update)


def _follow(task: int, update: Callable[..., None]) -> Progress:
    def progress(done: int, total: int) -> None:
        update(task, completed=done, total=total, visible=total >= _SHOW_FROM)

    return progress
