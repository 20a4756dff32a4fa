"""The command line. Each subcommand is one file, which is loaded only if that command runs."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand

from rankcall import printable
from rankcall.errors import RankcallError

__all__ = ["main"]

_USAGE, _INTERRUPTED = 2, 130
_COMMANDS = {
    "run": "Run a script as torchrun does, and record every collective of every rank.",
    "exec": "Run any command, and record every rank that it starts.",
    "report": "Report which ranks came last, which waited, and how fast the collectives were.",
    "diagnose": "Say which rank holds the others up, in which call, from which line.",
    "export": "Write a run's records for Perfetto, as Parquet or JSON lines.",
    "ps": "List the jobs that run on this host.",
    "top": "Show the state of every rank, live.",
    "serve": "Serve a live page of a job, which everyone who has the link can read.",
    "mcp": "Let an assistant read runs, over the MCP protocol.",
    "collect": "Put a run that is spread over nodes into one file.",
    "clean": "Free the memory that the records of killed jobs take on this host.",
    "doctor": "Say whether recording will work here.",
    "build": "Build the native recorder and RPC agent ahead of time.",
}
# These clean up first. Of the others, clean does so itself, and doctor and build read no run.
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
    from rankcall.run.clean_up import clean_up

    for line in clean_up():
        print(f"rankcall: {printable.clean(line)}", file=sys.stderr)


def _fail(message: str) -> int:
    line = printable.clean(" ".join(message.split()))
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
            app.command(name, cls=_Command, help=None, context_settings=settings)(module.command)
        else:
            app.command(name, help=about)(_not_chosen)
    return app


class _Command(TyperCommand):
    """A command whose help shows a positional argument by its name alone.

    Newer versions of typer add the Python type, such as ``<list[str]>``, also behind a metavar.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for parameter in self.params:
            if isinstance(parameter, TyperArgument) and parameter.metavar:
                # An attribute of the instance hides the method. Older versions of typer do not
                # call it.
                vars(parameter)["display_type_rich"] = _no_type


def _no_type(ctx: object) -> None:
    """Stand in for the method that names the type of an argument."""


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
