"""``rankcall diagnose``: name the rank, the collective and the source line behind a problem."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from rankcall.analysis.logs import diagnose_logs
from rankcall.analysis.verdicts import Diagnosis, diagnose, with_stacks
from rankcall.cli.common import LEAVE, HangAfter, console_for_result, keys
from rankcall.report import diagnosis_text
from rankcall.report.json import render_diagnosis
from rankcall.run.load import load
from rankcall.run.paths import find_run
from rankcall.run.settle import settle
from rankcall.run.stacks import request_stacks, stacks_of

__all__ = ["command"]

_WATCH_S = 2.0
_MOST_ASKED = 64  # ranks from which stacks are requested
_MOST_STACKS = 4096  # ranks


def command(
    run: Annotated[
        Path | None,
        typer.Argument(
            help="A run directory, an archive or a ring file, or a directory of Flight Recorder "
            "dumps; else the latest run."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the diagnosis as JSON.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Repeat every 2 s, until the job ends, q or Ctrl-C.")
    ] = False,
    stacks: Annotated[
        bool,
        typer.Option("--stacks", help="Show the stacks of this host's ranks, equal ones together."),
    ] = False,
    hang_after: HangAfter = None,
    log: Annotated[
        list[Path] | None,
        typer.Option(
            "--log",
            help="Read this log of the job instead, a folder of logs, or - for stdin; give it once "
            "for each log.",
        ),
    ] = None,
    more_logs: Annotated[list[Path] | None, typer.Argument(hidden=True)] = None,
) -> None:
    """Say which rank holds the others up, in which collective, called from which line.

    The job may still run or be dead, and the run may be a copy. Exits with 0 if the job is healthy,
    with 1 if there are findings, and with 2 if there is nothing to read.
    """
    if log:
        rest = [*([run] if run else []), *(more_logs or [])]
        _from_logs([*log, *rest], json)
        return
    if more_logs:
        raise typer.BadParameter("give one run, or logs after --log")
    result = read(run, hang_after)
    if watch:
        result = _watch(run, hang_after, result, json)
    else:
        dumped = stacks_of(find_run(run), _by_interest(result)) if stacks else {}
        _print(result, json, dumped)
        if stacks and not dumped and not json:
            _explain_no_stacks()
    sys.stdout.flush()
    if any(finding.is_fault for finding in result.findings):
        raise typer.Exit(1)


def _from_logs(paths: list[Path], json: bool) -> None:
    """Diagnose a job from its logs, and print the verdict."""
    result = diagnose_logs(paths)
    _print(result, json, {})
    sys.stdout.flush()
    if any(finding.is_fault for finding in result.findings):
        raise typer.Exit(1)


def read(path: Path | None, hang_after: float | None) -> Diagnosis:
    """Move the rings of this host's ended processes into the run, then diagnose the run.

    If ranks of this host are missing, or none makes progress, their stacks are requested.
    """
    where = find_run(path)
    if where.is_dir():
        settle(where)
    loaded = load(where)
    result = diagnose(loaded, hang_after or None)
    if not result.snapshot.live:
        return result
    wanted = set(_unexplained(result)[:_MOST_ASKED])
    asked = request_stacks(h.header for h in loaded.heads if h.header.rank in wanted)
    return with_stacks(loaded, result, asked)


def _unexplained(result: Diagnosis) -> list[int]:
    """Return the ranks that only their stacks can locate."""
    ranks: set[int] = set()
    for finding in result.findings:
        if finding.kind in ("missing", "no_progress"):
            ranks.update(finding.ranks)
        if finding.kind == "no_progress":
            ranks.update(finding.victims)
    return sorted(ranks)


def _print(result: Diagnosis, json: bool, dumped: dict[int, str]) -> None:
    """Print a diagnosis with the dumped stacks of some ranks."""
    if json:
        sys.stdout.write(render_diagnosis(result, dumped))
        return
    console = console_for_result()
    if console.is_terminal:
        diagnosis_text.show_diagnosis(result, console, dumped)
    else:
        sys.stdout.write(diagnosis_text.diagnosis_text(result, console.width, dumped))


def _by_interest(diagnosis: Diagnosis) -> list[int]:
    """Return the ranks: those that the findings name, one victim of each, then the others."""
    ranks: dict[int, None] = {}
    for finding in diagnosis.findings:
        ranks.update(dict.fromkeys(finding.ranks))
        ranks.update(dict.fromkeys(finding.victims[:1]))
    ranks.update((state.rank, None) for state in diagnosis.snapshot.ranks)
    return list(ranks)[:_MOST_STACKS]


def _explain_no_stacks() -> None:
    typer.echo(
        "rankcall: no stacks: the ranks run on other hosts, or have ended; or they are not watched "
        "(rankcall run, rankcall.watch.start) and py-spy is not installed here "
        "(pip install 'rankcall[stacks]')",
        err=True,
    )


def _watch(path: Path | None, hang_after: float | None, result: Diagnosis, json: bool) -> Diagnosis:
    """Diagnose repeatedly: update a terminal in place, otherwise print each change."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    if json or not console.is_terminal:
        return _watch_changes(path, hang_after, result, json)
    live = Live(console=console, auto_refresh=False, screen=True)
    with keys() as left_within, live, contextlib.suppress(KeyboardInterrupt):
        while result.snapshot.live:
            foot = Text(f"\n{LEAVE}", "dim")
            live.update(Group(diagnosis_text.body(result, console.width), foot), refresh=True)
            if left_within(_WATCH_S):
                break
            result = read(path, hang_after)
    _print(result, json, {})
    return result


def _watch_changes(
    path: Path | None, hang_after: float | None, result: Diagnosis, json: bool
) -> Diagnosis:
    printed: object = None
    try:
        while True:
            verdict = [
                (finding.kind, finding.ranks, finding.group, finding.seq)
                for finding in result.findings
            ]
            if verdict != printed:
                _print(result, json, {})
                sys.stdout.flush()
                printed = verdict
            if not result.snapshot.live:
                break
            time.sleep(_WATCH_S)
            result = read(path, hang_after)
    except KeyboardInterrupt:
        pass
    return result
