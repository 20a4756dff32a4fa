"""What several commands share: messages, opening a run, progress, and the keys of a live view."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from rankcall import files
from rankcall.problems import Problem
from rankcall.run.load import Progress, Run, load
from rankcall.run.paths import find_run
from rankcall.run.settle import settle

if TYPE_CHECKING:
    from rich.console import Console


HangAfter = Annotated[
    float | None,
    typer.Option(
        envvar="RANKCALL_HANG_AFTER",
        min=0.0,
        help="Seconds that a call may be in flight before it counts as hung. Without it, or with "
        "0: the value that the job was started with, or 60.",
    ),
]
LEAVE = "q or Ctrl-C leaves; the job goes on"
_QUITS = frozenset(b"qQ")
_SHOW_FROM = 32  # rings; fewer are read before a bar appears


def say(text: str) -> None:
    """Write one line to stderr. stdout belongs to the job, or to the command's result."""
    typer.echo(f"rankcall: {files.clean(text)}", err=True)


Attempt = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Read one attempt only: a restart of the job, or a job that was recorded into the "
        "same directory.",
    ),
]


def open_run(path: Path | None, attempt: int | None = None) -> Run:
    """Move the rings of this host's ended processes into the run, then load the run.

    With ``attempt``, the run has only the rings of that attempt.
    """
    where = find_run(path)
    if where.is_dir():
        settle(where)
    with bar("reading names") as progress:
        run = load(where, progress)
    return run if attempt is None else run.only(attempt)


def console_for_result() -> Console:
    """Return a console on stdout. Characters that stdout cannot encode are replaced."""
    from rich.console import Console

    if (sys.stdout.encoding or "").lower().replace("-", "") != "utf8":
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    return Console(highlight=False)


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


def _follow(task: int, update: Callable[..., None]) -> Progress:
    def progress(done: int, total: int) -> None:
        update(task, completed=done, total=total, visible=total >= _SHOW_FROM)

    return progress


# --- the keys of a live view ---


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits some seconds, and returns whether the user pressed ``q``.

    If this process may use a terminal, the block reads keys at once and does not echo them. At the
    end it restores the terminal. Without a terminal the function only waits.
    """
    try:
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
        in_foreground = os.tcgetpgrp(fd) == os.getpgrp()
    except (OSError, ValueError, AttributeError, termios.error):
        in_foreground = False
    if not in_foreground:  # a background process that changes the terminal is stopped
        yield _sleeps
        return
    try:
        tty.setcbreak(fd)
        yield lambda seconds: _pressed(fd, seconds)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _sleeps(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _pressed(fd: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
        typed = os.read(fd, 64)
        if not typed or not _QUITS.isdisjoint(typed):  # no bytes: the terminal is gone
            return True
    return False
