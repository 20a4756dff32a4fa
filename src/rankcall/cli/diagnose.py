"""``rankcall diagnose``: which rank, in which collective, at which line."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from rankcall.analysis.diagnosis import Diagnosis, diagnose
from rankcall.cli._keys import LEAVE, keys
from rankcall.cli._reading import HangAfter
from rankcall.cli._stacks import of_interest, take
from rankcall.report import diagnosis
from rankcall.report.json import render_diagnosis
from rankcall.run import load
from rankcall.rundir import find_run, settle

__all__ = ["command"]

_WATCH_S = 2.0


def command(
    run: Annotated[
        Path | None,
        typer.Argument(help="A run directory, an archive or a ring file; else the latest run."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the diagnosis as JSON.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Look again every 2 s, until the job ends, q or Ctrl-C.")
    ] = False,
    stacks: Annotated[
        bool,
        typer.Option("--stacks", help="Show the stacks of who is named, and of one who waits."),
    ] = False,
    hang_after: HangAfter = None,
) -> None:
    """Say which rank holds the others up, in which collective, called from which line.

    Reads a job that runs, one that is dead, or a copy. Exits with 0 where all is healthy, with 1
    where something was found, with 2 where there is nothing to read.
    """
    found = read(run, hang_after)
    if watch:
        found = _watch(run, hang_after, found, json)
    else:
        _say(found, json, take(find_run(run), of_interest(found)) if stacks else {}, stacks)
    sys.stdout.flush()
    if found.findings:
        raise typer.Exit(1)


def read(path: Path | None, hang_after: float | None) -> Diagnosis:
    """Move what ended processes left on this host into the run, then read and diagnose it."""
    where = find_run(path)
    if where.is_dir():
        settle(where)
    return diagnose(load(where), hang_after or None)


def _say(found: Diagnosis, json: bool, dumped: dict[int, str], asked: bool) -> None:
    if json:
        sys.stdout.write(render_diagnosis(found, dumped))
        return
    from rich.console import Console

    if (sys.stdout.encoding or "").lower().replace("-", "") != "utf8":
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    console = Console(highlight=False)
    if console.is_terminal:
        diagnosis.show(found, console, dumped)
    else:
        sys.stdout.write(diagnosis.render(found, console.width, dumped))
    if asked and not dumped:
        typer.echo(
            "rankcall: no stacks: the ranks run elsewhere, or have ended; or they are not watched "
            "(rankcall run, rankcall.watch.start) and py-spy is not installed here "
            "(pip install 'rankcall[stacks]')",
            err=True,
        )


def _watch(path: Path | None, hang_after: float | None, found: Diagnosis, json: bool) -> Diagnosis:
    """Look again and again; print anew what has changed, on a terminal in place."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    if json or not console.is_terminal:
        return _watch_changes(path, hang_after, found, json)
    live = Live(console=console, auto_refresh=False, screen=True)
    with keys() as left_within, live, contextlib.suppress(KeyboardInterrupt):
        while found.snapshot.live:
            foot = Text(f"\n{LEAVE}", "dim")
            live.update(Group(diagnosis.body(found, console.width), foot), refresh=True)
            if left_within(_WATCH_S):
                break
            found = read(path, hang_after)
    _say(found, json, {}, asked=False)
    return found


def _watch_changes(
    path: Path | None, hang_after: float | None, found: Diagnosis, json: bool
) -> Diagnosis:
    said: object = None
    try:
        while True:
            verdict = [(each.kind, each.ranks, each.group, each.seq) for each in found.findings]
            if verdict != said:
                _say(found, json, {}, asked=False)
                sys.stdout.flush()
                said = verdict
            if not found.snapshot.live:
                break
            time.sleep(_WATCH_S)
            found = read(path, hang_after)
    except KeyboardInterrupt:
        pass
    return found
