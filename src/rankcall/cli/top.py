"""``rankcall top``: show the state of every rank, live."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Annotated

import typer

from rankcall.analysis.looks import look
from rankcall.analysis.verdicts.diagnosis import Diagnosis
from rankcall.cli.common import (
    Attempt,
    HangAfter,
    RunPath,
    console_for_result,
    exit_with,
    open_run,
)
from rankcall.cli.keys import LEAVE, keys
from rankcall.report import top
from rankcall.run.load import Run, load

__all__ = ["command"]


def command(
    run: RunPath = None,
    attempt: Attempt = None,
    hang_after: HangAfter = None,
    interval: Annotated[
        float, typer.Option(min=0.05, metavar="SECONDS", help="Seconds between two updates.")
    ] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Print the view once and exit.")] = False,
) -> None:
    """Show the state of every rank, until the job ends or you leave (q, Ctrl-C).

    Ranks at the same line share one row, so that thousands fit. If the output is not a terminal,
    the view is printed once. Exits as diagnose does: with 0 if the last update shows a healthy job,
    with 1 if it has findings.
    """
    opened = open_run(run, attempt)
    diagnosis = look(opened, hang_after)
    if once or not sys.stdout.isatty():
        _print(diagnosis)
    else:
        diagnosis = _follow(opened, attempt, hang_after, interval, diagnosis)
    exit_with(diagnosis)


def _print(diagnosis: Diagnosis) -> None:
    console = console_for_result()
    if console.is_terminal:
        console.print(top.view(diagnosis, console.width))
    else:
        sys.stdout.write(top.render(diagnosis, console.width))


def _follow(
    run: Run,
    attempt: int | None,
    hang_after: float | None,
    interval: float,
    diagnosis: Diagnosis,
) -> Diagnosis:
    """Redraw the view until the job ends or the user leaves; leave the last view on the screen.

    The run is loaded anew for each view, because ranks come and go. It is not settled again.
    """
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    live = Live(console=console, auto_refresh=False, screen=console.is_terminal)
    with keys() as left_within, live, contextlib.suppress(KeyboardInterrupt):
        while diagnosis.snapshot.live:
            live.update(top.view(diagnosis, console.width, LEAVE), refresh=True)
            began = time.monotonic()
            again = load(run.source)
            diagnosis = look(again if attempt is None else again.only(attempt), hang_after)
            if left_within(max(0.0, interval - (time.monotonic() - began))):
                break
    _print(diagnosis)
    return diagnosis
