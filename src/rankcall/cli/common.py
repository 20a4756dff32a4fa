"""What several commands share: options, messages, opening a run, and progress."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from rankcall.errors import RunNotFoundError
from rankcall.printable import clean
from rankcall.problems import Problem
from rankcall.run import opening
from rankcall.run.live_jobs import chosen_run
from rankcall.run.load import Progress, Run
from rankcall.run.paths import find_run

if TYPE_CHECKING:
    from rich.console import Console

    from rankcall.analysis.verdicts.verdict import Verdict


RunPath = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN",
        help="A run directory, an archive, a ring file, or Flight Recorder's dumps. Without it: "
        "the only live job of this host, or the latest run here.",
    ),
]
Attempt = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="N",
        help="Read one attempt only: a restart of the job, or a job that was recorded into the "
        "same directory.",
    ),
]
HangAfter = Annotated[
    float | None,
    typer.Option(
        envvar="RANKCALL_HANG_AFTER",
        min=0.0,
        metavar="SECONDS",
        help="Seconds that a call may be in flight before it counts as hung. Without it, or with "
        "0: the value that the job was started with, or 60.",
    ),
]
COMPILING = "compiling the native recorder, which takes about 20 s"
_WIDEST = 1 << 14  # columns; no line is as long
_SHOW_FROM = 32  # rings; fewer are read before a bar appears


def say(text: str) -> None:
    """Write one line to stderr. stdout belongs to the job, or to the command's result."""
    typer.echo(f"rankcall: {clean(text)}", err=True)


def open_run(path: Path | None, attempt: int | None = None, *, exits_only: bool = False) -> Run:
    """Settle and load a run, with a progress bar; ``exits_only``: see ``load``.

    If no run was named and a live job is taken that is not the latest run here, say so.
    """
    where = chosen_run(path)
    if path is None and where != _latest_here():
        say(f"reading {where}, the only live job of this host")
    with bar("reading names") as progress:
        return opening.open_run(where, attempt, progress, exits_only=exits_only)


def _latest_here() -> Path | None:
    try:
        return find_run(None)
    except RunNotFoundError:
        return None


def say_moved(old: str, new: str) -> None:
    """Say on stderr that an option has a new spelling. The old one works for one version."""
    say(f"{old} is now {new}; the old spelling works until rankcall 0.4")


def exit_with(verdict: Verdict) -> None:
    """Exit with 1 if a verdict has a finding that is a fault."""
    sys.stdout.flush()
    if any(finding.is_fault for finding in verdict.findings):
        raise typer.Exit(1)


def console_for_result(*, wraps: bool = True) -> Console:
    """Return a console on stdout.

    Args:
        wraps: Whether lines are wrapped also if stdout is a pipe or a file. Without it, they are
            wrapped on a terminal, or at COLUMNS: ``grep`` finds a path that is not cut in two.
    """
    from rich.console import Console

    whole = not wraps and not sys.stdout.isatty() and not os.environ.get("COLUMNS")
    return Console(highlight=False, width=_WIDEST if whole else None)


def output(path: Path) -> Path | IO[bytes]:
    """Return the file to write: the path, or stdout for ``-``."""
    return sys.stdout.buffer if str(path) == "-" else path


def report_problems(problems: Sequence[Problem]) -> None:
    """Print each problem as a line on stderr; exit with 1 if there is any."""
    for problem in problems:
        say(f"problem: {problem}")
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


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Show that something goes on, and for how long, if stderr is a terminal.

    For work that does not tell how far it is: a compiler, a copy, the reading of logs.
    """
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn("line"), TextColumn("{task.description}"), TimeElapsedColumn()
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task(clean(what), total=None)
        yield


def _follow(task: int, update: Callable[..., None]) -> Progress:
    def progress(done: int, total: int) -> None:
        update(task, completed=done, total=total, visible=total >= _SHOW_FROM)

    return progress
