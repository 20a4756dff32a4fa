"""``rankcall top``: show the state of every rank, live."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from rankcall.analysis.run_snapshot import snapshot_of_run
from rankcall.analysis.verdicts import Diagnosis, judge
from rankcall.cli.common import LEAVE, HangAfter, console_for_result, keys
from rankcall.report import top
from rankcall.run.load import load
from rankcall.run.paths import find_run

__all__ = ["command"]

_NEWEST = 1024  # records read from the end of each ring
_WINDOW = 1 << 16  # calls kept of all ranks together


def command(
    run: Annotated[
        Path | None,
        typer.Argument(help="A run directory. Without it: the latest run here."),
    ] = None,
    hang_after: HangAfter = None,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between two updates.")] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Print the view once and exit.")] = False,
) -> None:
    """Show the state of every rank, until the job ends or you leave (q, Ctrl-C).

    Ranks at the same line share one row, so that thousands fit. If the output is not a terminal,
    the view is printed once. Exits as diagnose does: with 0 if the last update shows a healthy job,
    with 1 if it has findings.
    """
    run_dir = find_run(run)
    diagnosis = look(run_dir, hang_after)
    if once or not sys.stdout.isatty():
        _print(diagnosis)
    else:
        diagnosis = _follow(run_dir, hang_after, interval, diagnosis)
    sys.stdout.flush()
    if any(finding.is_fault for finding in diagnosis.findings):
        raise typer.Exit(1)


def look(run_dir: Path, hang_after: float | None) -> Diagnosis:
    """Read the newest records of every rank and judge them."""
    run = load(run_dir)
    window = max(32, min(256, _WINDOW // max(1, len(run.heads))))
    snapshot = snapshot_of_run(run, window=window, newest=_NEWEST)
    return judge(run, snapshot, hang_after or None)


def _print(diagnosis: Diagnosis) -> None:
    console = console_for_result()
    if console.is_terminal:
        console.print(top.view(diagnosis, console.width))
    else:
        sys.stdout.write(top.render(diagnosis, console.width))


def _follow(
    run_dir: Path, hang_after: float | None, interval: float, diagnosis: Diagnosis
) -> Diagnosis:
    """Redraw the view until the job ends or the user leaves; leave the last view on the screen."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    live = Live(console=console, auto_refresh=False, screen=console.is_terminal)
    with keys() as left_within, live, contextlib.suppress(KeyboardInterrupt):
        while diagnosis.snapshot.live:
            live.update(top.view(diagnosis, console.width, LEAVE), refresh=True)
            began = time.monotonic()
            diagnosis = look(run_dir, hang_after)
            if left_within(max(0.0, interval - (time.monotonic() - began))):
                break
    _print(diagnosis)
    return diagnosis
