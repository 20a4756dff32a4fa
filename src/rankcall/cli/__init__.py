"""The command line. Each subcommand is one file, which is loaded only if that command runs."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from rankcall import printable
from rankcall.background import is_lack_of_threads
from rankcall.cli.commands import COMMANDS
from rankcall.errors import RankcallError

__all__ = ["main"]

_USAGE, _INTERRUPTED = 2, 130
_HELP = {"help_option_names": ["-h", "--help"]}
# These clean up first. Of the others, clean does so itself, and doctor and build read no run.
_WORKING = (
    "run",
    "exec",
    "report",
    "diagnose",
    "export",
    "top",
    "serve",
    "collect",
    "explain-policy",
    "profile",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status. An error is one line on stderr.

    The status is 0 if the command is done, 1 if it is done but met problems (they are on stderr), 2
    if it failed, and 130 if it was interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        printable.always_writable(stream)
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
    except RuntimeError as error:
        if not is_lack_of_threads(error):
            raise
        return _fail(f"{error}: there are too many, or too little memory")
    except OSError as error:
        return _fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")


def _run(arguments: list[str]) -> int:
    # A shell that completes a line passes it in a variable.
    words = arguments or os.environ.get("COMP_WORDS", "").split()
    chosen = next((word for word in words if word in COMMANDS), None)
    if chosen in _WORKING and arguments and not {"-h", "--help"} & set(arguments):
        _clean_up()
    app = _application(chosen)
    if chosen == "run" and arguments:
        from rankcall.cli.torchrun import own_options_first

        script = arguments.index("run") + 1
        arguments[script:] = own_options_first(arguments[script:])
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
        unknown = getattr(error, "option_name", None)
        if chosen == "exec" and unknown:
            return _fail(_not_of_exec(unknown))
        return _fail(describe())
    return status if isinstance(status, int) else 0


def _not_of_exec(option: str) -> str:
    """Say where an option that ``exec`` does not know belongs."""
    return (
        f"exec has no option {option}: options of the command stand behind it, as in "
        f"'rankcall exec -- torchrun {option} ...'; rankcall run takes torchrun's own options"
    )


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
        cls=_Group,
        no_args_is_help=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings=_HELP,
        help="Record every torch.distributed collective, and say which rank is slow or stuck.",
        epilog="rankcall COMMAND -h has examples. RUN is a run directory or an archive of one.",
    )
    app.callback(invoke_without_command=True)(_without_command)
    for name, entry in COMMANDS.items():
        if name == chosen:
            module = importlib.import_module(f"rankcall.cli.{name.replace('-', '_')}")
            settings = {**_HELP, **getattr(module, "CONTEXT_SETTINGS", {})}
            app.command(name, cls=_Command, help=None, context_settings=settings)(module.command)
        else:
            app.command(name, help=entry.about)(_not_chosen)
    return app


class _Group(TyperGroup):
    """The program, whose help lists the commands by what they are for."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group of commands."""
        for group, entries in itertools.groupby(COMMANDS.items(), lambda item: item[1].group):
            with formatter.section(group):
                formatter.write_dl([(name, entry.about) for name, entry in entries])


class _Command(TyperCommand):
    """A command whose help has examples, and shows a positional argument by its name alone.

    Newer versions of typer add the Python type, such as ``<list[str]>``, also behind a metavar.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for parameter in self.params:
            if isinstance(parameter, TyperArgument) and parameter.metavar:
                # An attribute of the instance hides the method. Older versions of typer do not
                # call it.
                vars(parameter)["display_type_rich"] = _no_type

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples. A command line is never wrapped, so that it can be copied."""
        formatter.write("\nExamples:\n")
        for line, about in COMMANDS[self.name or ""].examples:
            formatter.write(f"  {line}\n      {about}\n")


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
