"""What the reading commands share: opening a run, showing how far it is, telling what is wrong."""

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
        help="Seconds that a call may be in flight before it counts as hung; without it, or 0: "
        "as the job was started with, or 60.",
    ),
]
_SHOW_FROM = 32  # rings; fewer are read before a bar could be drawn


def open_run(path: Path | None) -> Run:
    """Move what ended processes left on this host into the run, then load it."""
    where = find_run(path)
    if where.is_dir():
        settle(where)
    with bar("reading names") as progress:
        return load(where, progress)


def output(path: Path) -> Path | IO[bytes]:
    """Return what to write to: ``-`` is stdout."""
    return sys.stdout.buffer if str(path) == "-" else path


def tell_problems(problems: Sequence[str]) -> None:
    """Print what could not be read, a line each on stderr, and exit with 1 where there is any."""
    for problem in problems:
        typer.echo(f"rankcall: problem: {clean(problem)}", err=True)
    if problems:
        raise typer.Exit(1)


@contextlib.contextmanager
def bar(what: str) -> Iterator[Progress]:
    """Draw a progress bar on stderr while a long load goes on; nothing without a terminal."""
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
