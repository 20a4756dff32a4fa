"""``rankcall diagnose``: name the rank, the collective and the source line behind a problem."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from rankcall.analysis.logs import diagnose_logs
from rankcall.analysis.logs.following import follow_logs
from rankcall.analysis.looks import by_interest, diagnose_asking
from rankcall.analysis.snapshot import ALIVE, telling_threads
from rankcall.analysis.verdicts.facts import Relation
from rankcall.analysis.verdicts.verdict import Verdict
from rankcall.cli.common import (
    Attempt,
    HangAfter,
    bar,
    console_for_result,
    exit_with,
    open_run,
    say,
    working,
)
from rankcall.imports.logs.reading import STDIN, is_log
from rankcall.imports.node import ask_node
from rankcall.process import host_name
from rankcall.report import diagnosis_text
from rankcall.report.json import render_verdict
from rankcall.run.stacks import stacks_of

__all__ = ["command"]

_MOST_STACKS = 4096  # ranks
_ABOUT_DEVICES = (
    Relation.NOT_STARTED,
    Relation.STARTED_NOWHERE,
    Relation.START_UNKNOWN,
    Relation.STUCK_TRANSFER,
)
_DAY_S = 24 * 3600.0
_AS_IN = "write it as in --log FILE --follow 600"


def _seconds(text: str) -> float:
    """Return how long to follow logs."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < math.inf:
        raise typer.BadParameter(f"not a number of seconds: {text!r}; {_AS_IN}")
    return seconds


def command(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN",
            help="A run directory, an archive, a ring file, Flight Recorder's dumps, or a log. "
            "Without it: the only live job of this host, or the latest run here. With --log: "
            "further logs.",
        ),
    ] = None,
    attempt: Attempt = None,
    json: Annotated[bool, typer.Option("--json", help="Print the diagnosis as JSON.")] = False,
    stacks: Annotated[
        bool,
        typer.Option("--stacks", help="Show the stacks of this host's ranks, equal ones together."),
    ] = False,
    hang_after: HangAfter = None,
    node: Annotated[
        bool,
        typer.Option(
            "--node",
            help="Show what the kernel of this node reported in the last day (Xid, lack of memory, "
            "lost links), if it may be read, of which devices NVML reports trouble, and what the "
            "kubelet, the raylet and docker say of processes that failed. The verdict does not "
            "rest on it. If a running job hangs on a device of this node, what there is to tell is "
            "shown without asking.",
        ),
    ] = False,
    log: Annotated[
        list[Path] | None,
        typer.Option(
            "--log",
            metavar="FILE",
            help="Read this log of the job instead, a folder of logs, or - for stdin; give it once "
            "for each log.",
        ),
    ] = None,
    follow: Annotated[
        float | None,
        typer.Option(
            "--follow",
            parser=_seconds,
            metavar="SECONDS",
            help="With --log, of files that are still written: wait until they say why the job "
            "failed, for at most so many seconds.",
        ),
    ] = None,
) -> None:
    """Say which rank holds the others up, in which collective, called from which line.

    The job may still run or be dead, and the run may be a copy. Exits with 0 if the job is healthy,
    with 1 if there are findings, and with 2 if there is nothing to read. To follow a job, use top.
    """
    places = runs or []
    if not log and places and all(place == STDIN or is_log(place) for place in places):
        log, places = places, []
        say(f"reading {', '.join(map(str, log[:3]))} as a log, as with --log")
    swallowed = next((path for path in log or [] if path.name.startswith("--")), None)
    if swallowed is not None and not swallowed.exists():
        raise typer.BadParameter(f"--log needs a file, and {swallowed} is none: {_AS_IN}")
    if follow is not None and (not log or STDIN in [*log, *places]):
        raise typer.BadParameter("--follow needs the files of --log; write a stream to one first")
    if log:
        logs = [*log, *places]
        with working("reading logs"):
            result = diagnose_logs(logs) if follow is None else follow_logs(logs, follow)
        _print(result, json, {}, asks_node=node)
        exit_with(result)
        return
    if len(places) > 1:
        raise typer.BadParameter("give one run, or logs after --log")
    run = open_run(places[0] if places else None, attempt, exits_only=True)
    with bar("reading records") as progress:
        result = diagnose_asking(run, hang_after, progress)
    dumped = (
        stacks_of(run, by_interest(result, _MOST_STACKS), telling_threads(result.snapshot))
        if stacks
        else {}
    )
    _print(result, json, dumped, asks_node=node)
    if stacks and not dumped and not json:
        say(
            "no stacks: the ranks run on other hosts, or have ended; or they are not watched "
            "(rankcall run, rankcall.watch.start) and py-spy is not installed here "
            "(pip install 'rankcall[stacks]')"
        )
    exit_with(result)


def _print(result: Verdict, json: bool, dumped: dict[int, str], *, asks_node: bool) -> None:
    """Print a verdict with the dumped stacks of some ranks, and with what this node knows."""
    about_device = _is_about_device_here(result)
    since = time.time() - _DAY_S
    node = ask_node(since, containers=asks_node) if asks_node or about_device else None
    if node is not None and not (asks_node or node.is_news):
        node = None
    if json:
        sys.stdout.write(render_verdict(result, dumped, node))
        return
    console = console_for_result(wraps=False)
    if console.is_terminal:
        diagnosis_text.show_diagnosis(result, console, dumped)
    else:
        sys.stdout.write(diagnosis_text.diagnosis_text(result, console.width, dumped))
    if node is not None:
        sys.stdout.write(f"\n{node.text()}\n")


def _is_about_device_here(verdict: Verdict) -> bool:
    """Tell whether a running job hangs, as the verdict says, on a device of this node."""
    return (
        verdict.stops
        and any(position.process.host == host_name() for position in verdict.ranks)
        and any(position.process.state == ALIVE for position in verdict.ranks)
        and any(fact.relation in _ABOUT_DEVICES for fact in verdict.findings[0].facts)
    )
