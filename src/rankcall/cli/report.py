"""``rankcall report``: read a run and say where the time between ranks went."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from rankcall.analysis.summary import Summary, summarise
from rankcall.report import json as json_report
from rankcall.report import terminal
from rankcall.report._format import clean
from rankcall.run import Progress, find_run, load, settle

_SHOW_FROM = 32  # rings; fewer are read before a bar could be drawn


def command(
    run: Annotated[
        Path | None,
        typer.Argument(help="A run directory or a ring file. Without it: the latest run here."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Report who came last, how long the others waited, and how fast the collectives were.

    Exits with 1 where some of the run could not be read: the report is then of the rest.
    """
    summary = read(run)
    if json:
        sys.stdout.write(json_report.render(summary))
    else:
        _print(summary)
    sys.stdout.flush()
    for problem in summary.problems:
        typer.echo(f"rankcall: problem: {clean(problem)}", err=True)
    if summary.problems:
        raise typer.Exit(1)


def read(path: Path | None) -> Summary:
    """Move what ended processes left on this host into the run, then read and analyse it."""
    where = find_run(path)
    if where.is_dir():
        settle(where)
    with _bar("reading names") as progress:
        run = load(where, progress)
    with _bar("reading records") as progress:
        return summarise(run, progress)


def _print(summary: Summary) -> None:
    from rich.console import Console

    if (sys.stdout.encoding or "").lower().replace("-", "") != "utf8":
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    console = Console(highlight=False)
    if console.is_terminal:
        terminal.show(summary, console)
    else:
        sys.stdout.write(terminal.render(summary, console.width))


@contextlib.contextmanager
def _bar(what: str) -> Iterator[Progress]:
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
