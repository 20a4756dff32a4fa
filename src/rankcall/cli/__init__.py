"""The command line. Each subcommand is one file, which is loaded only if that command runs."""

from __future__ import annotations

import contextlib
import importlib
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

from rankcall import process
from rankcall.errors import RankcallError
from rankcall.run import find_run
from rankcall.run.load import Progress, Run, load
from rankcall.run.settle import settle

if TYPE_CHECKING:
    from rich.console import Console


__all__ = ["main"]

_USAGE, _INTERRUPTED = 2, 130
_COMMANDS = {
    "run": "Run a script as torchrun does, and record every collective of every rank.",
    "exec": "Run any command, and record every rank that it starts.",
    "report": "Report which ranks came last, which waited, and how fast the collectives were.",
    "diagnose": "Say which rank holds the others up, in which call, from which line.",
    "export": "Write a run's records for Perfetto, as Parquet, JSON lines or CSV.",
    "top": "Show the state of every rank, live.",
    "serve": "Show every rank of a job on a page, to all who have the link.",
    "collect": "Put a run that is spread over nodes into one file.",
    "clean": "Free the memory that the records of killed jobs take on this host.",
    "doctor": "Say whether recording will work here.",
    "build": "Build the native recorder and RPC agent ahead of time.",
}
_WORKING = ("run", "exec", "report", "diagnose", "export", "top", "serve", "collect")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status. An error is one line on stderr.

    The status is 0 if the command is done, 1 if it is done but met problems (they are on stderr), 2
    if it failed, and 130 if it was interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except RankcallError as error:
        return _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader of the pipe has closed it. Python's own flush at exit must not fail either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")


def _run(arguments: list[str]) -> int:
    chosen = next((argument for argument in arguments if argument in _COMMANDS), None)
    if chosen in _WORKING and "--help" not in arguments:
        _clean_up()
    app = _application(chosen)
    try:
        status = app(arguments, prog_name="rankcall", standalone_mode=False)
    except typer.Exit as end:
        return int(end.exit_code)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):
            raise end.__context__ from None  # typer's own exit status would be 1
        raise
    except Exception as error:
        # typer raises its own usage errors, which have no public base. All have format_message.
        describe = getattr(error, "format_message", None)
        if describe is None:
            raise
        return _fail(describe())
    return status if isinstance(status, int) else 0


def _clean_up() -> None:
    """Free the memory of jobs that were killed more than a day ago."""
    from rankcall.run.settle import clean_up

    for line in clean_up():
        print(f"rankcall: {process.clean(line)}", file=sys.stderr)


def _fail(message: str) -> int:
    line = process.clean(" ".join(message.split()))
    print(f"rankcall: error: {line}", file=sys.stderr)
    return _USAGE


def _application(chosen: str | None) -> typer.Typer:
    """Make the application, with the code of the chosen command and the names of the others."""
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        help="Record every torch.distributed collective, and say which rank is slow or stuck.",
    )
    app.callback(invoke_without_command=True)(_without_command)
    for name, about in _COMMANDS.items():
        if name == chosen:
            module = importlib.import_module(f"rankcall.cli.{name}")
            settings = getattr(module, "CONTEXT_SETTINGS", None)
            app.command(name, help=None, context_settings=settings)(module.command)
        else:
            app.command(name, help=about)(_not_chosen)
    return app


def _without_command(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        from importlib.metadata import PackageNotFoundError
        from importlib.metadata import version as installed

        try:
            typer.echo(f"rankcall {installed('rankcall')}")
        except PackageNotFoundError:
            typer.echo("rankcall (not installed)")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _not_chosen() -> None:
    """Stand in the list of commands for a command whose code is not loaded."""
    raise AssertionError("only the chosen command runs")


# What several commands share: messages, opening a run, progress, and the keys of a live view.


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
    typer.echo(f"rankcall: {process.clean(text)}", err=True)


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


def report_problems(problems: Sequence[str]) -> None:
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
