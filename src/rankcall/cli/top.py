"""``rankcall top``: where every rank stands, live."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from rankcall.analysis.diagnosis import Diagnosis, judge
from rankcall.analysis.state.run_snapshot import snapshot_of_run
from rankcall.cli._keys import LEAVE, keys
from rankcall.cli._reading import HangAfter
from rankcall.report import top
from rankcall.run import load
from rankcall.rundir import find_run

__all__ = ["command"]

_NEWEST = 1024  # records of each ring that are looked at
_WINDOW = 1 << 16  # calls kept, of all ranks together


def command(
    run: Annotated[
        Path | None,
        typer.Argument(help="A run directory. Without it: the latest run here."),
    ] = None,
    hang_after: HangAfter = None,
    interval: Annotated[
        float, typer.Option(min=0.05, help="Seconds from one look to the next.")
    ] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Print one look and exit.")] = False,
) -> None:
    """Show where every rank stands, until the job ends or you leave (q, Ctrl-C).

    Ranks at the same line are one row, so that thousands fit. Exits as diagnose does: 0 where all
    is healthy, 1 where something was found at last.
    """
    where = find_run(run)
    found = look(where, hang_after)
    if once:
        _print(found)
    else:
        found = _follow(where, hang_after, interval, found)
    sys.stdout.flush()
    if found.findings:
        raise typer.Exit(1)


def look(where: Path, hang_after: float | None) -> Diagnosis:
    """Read the newest records of every rank and judge them."""
    run = load(where)
    window = max(32, min(256, _WINDOW // max(1, len(run.heads))))
    snapshot = snapshot_of_run(run, window=window, newest=_NEWEST)
    return judge(run, snapshot, hang_after or None)


def _print(found: Diagnosis) -> None:
    from rich.console import Console

    if (sys.stdout.encoding or "").lower().replace("-", "") != "utf8":
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(top.view(found, console.width))
    else:
        sys.stdout.write(top.render(found, console.width))


def _follow(where: Path, hang_after: float | None, interval: float, found: Diagnosis) -> Diagnosis:
    """Draw anew until the job has ended or somebody has seen enough; leave the last look there."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    live = Live(console=console, auto_refresh=False, screen=console.is_terminal)
    with keys() as left_within, live, contextlib.suppress(KeyboardInterrupt):
        while found.snapshot.live:
            live.update(top.view(found, console.width, LEAVE), refresh=True)
            began = time.monotonic()
            found = look(where, hang_after)
            if left_within(max(0.0, interval - (time.monotonic() - began))):
                break
    _print(found)
    return found
