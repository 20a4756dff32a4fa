"""``rankcall top``: show the state of every rank, live."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Annotated

import typer

from rankcall.analysis.attempts import Attempts, attempts_of
from rankcall.analysis.looks import look
from rankcall.analysis.snapshot import telling_threads
from rankcall.analysis.verdicts.diagnosis import Diagnosis
from rankcall.cli.common import (
    Attempt,
    HangAfter,
    RunPath,
    console_for_result,
    exit_with,
    open_run,
)
from rankcall.cli.keys import LEAVE, QUIT, keys
from rankcall.report import top
from rankcall.report.stack_lines import stack_lines
from rankcall.report.top_choice import Choice
from rankcall.run.load import Run, load
from rankcall.run.stacks import stacks_of

__all__ = ["command"]

_NOTE = f"{LEAVE} · h: keys"
_NO_STACK = (
    "rank {}: no stack. It runs on another host, has ended, is stopped, or is not watched "
    "(rankcall run) and py-spy is not installed here."
)


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
    the view is printed once. On a terminal, h shows the keys: choose a row, show its stack, sort,
    filter, and one row for each rank. Exits as diagnose does: with 0 if the last update shows a
    healthy job, with 1 if it has findings.
    """
    opened = open_run(run, attempt)
    diagnosis = look(opened, hang_after)
    if once or not sys.stdout.isatty():
        _print(opened, diagnosis)
    else:
        diagnosis = _follow(opened, attempt, hang_after, interval, diagnosis)
    exit_with(diagnosis)


def _print(run: Run, diagnosis: Diagnosis) -> None:
    console, attempts = console_for_result(), _attempts(run, diagnosis)
    if console.is_terminal:
        console.print(top.view(diagnosis, console.width, attempts=attempts))
    else:
        sys.stdout.write(top.render(diagnosis, console.width, attempts))


def _attempts(run: Run, diagnosis: Diagnosis) -> Attempts:
    """Return the attempts of the job until now, or until its last sign of life."""
    signs = [head.header.last_sign_epoch_ns for head in run.heads]
    return attempts_of(
        run.path, time.time_ns() if diagnosis.snapshot.live else max(signs, default=0)
    )


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
    choice, stack = Choice(), Stack()
    with keys() as pressed_within, live, contextlib.suppress(KeyboardInterrupt):
        while diagnosis.snapshot.live:
            began = time.monotonic()
            while True:
                lines = stack.lines(run, diagnosis, choice)
                shown = top.view(
                    diagnosis,
                    console.width,
                    _NOTE,
                    choice,
                    lines,
                    _attempts(run, diagnosis),
                )
                live.update(shown, refresh=True)
                pressed = pressed_within(max(0.0, interval - (time.monotonic() - began)))
                for key in pressed:
                    if key in (QUIT, "Q") and not choice.typing:
                        raise KeyboardInterrupt
                    choice = choice.press(key, diagnosis)
                if not pressed and time.monotonic() - began >= interval:
                    break
            again = load(run.source)
            run = again if attempt is None else again.only(attempt)
            diagnosis = look(run, hang_after)
    _print(run, diagnosis)
    return diagnosis


class Stack:
    """The stack of the rank that the user chose, asked for once: the rank gets a signal for it."""

    def __init__(self) -> None:
        self._rank: int | None = None
        self._lines: list[str] = []

    def lines(self, run: Run, diagnosis: Diagnosis, choice: Choice) -> list[str]:
        """Return the lines to show; none if the user wants no stack."""
        if not choice.stack or choice.rank is None:
            self._rank, self._lines = None, []
        elif choice.rank != self._rank:
            self._rank = choice.rank
            others = telling_threads(diagnosis.snapshot)
            stacks = stacks_of(run, [choice.rank], others)
            self._lines = stack_lines(stacks)[1:] if stacks else [_NO_STACK.format(choice.rank)]
        return self._lines
