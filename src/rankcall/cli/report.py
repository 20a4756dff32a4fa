"""``rankcall report``: read a run and report where the time between ranks went."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rankcall.analysis.run_snapshot import SnapshotBuilder
from rankcall.analysis.summary import Summary, summarise
from rankcall.analysis.verdicts import diagnose, find, judge
from rankcall.analysis.verdicts.finding import Finding
from rankcall.cli.common import Attempt, bar, console_for_result, open_run, output, report_problems
from rankcall.errors import RankcallError
from rankcall.files import new_file
from rankcall.problems import Problem
from rankcall.report import json as json_report
from rankcall.report import summary_text
from rankcall.report.formatting import size
from rankcall.run.load import Run


def command(
    run: Annotated[
        Path | None,
        typer.Argument(help="A run directory or a ring file. Without it: the latest run here."),
    ] = None,
    attempt: Attempt = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", help="Write the report as one HTML page without other files."
        ),
    ] = None,
) -> None:
    """Report which ranks came last, how long the others waited, and how fast the collectives were.

    Exits with 1 if part of the run could not be read; the report then covers the rest.
    """
    if html is not None:
        if json:
            raise RankcallError("--json and --html: one of them")
        report_problems(_write_page(run, html, attempt))
        return
    opened = open_run(run, attempt)
    summary, findings = _read(opened)
    if json:
        sys.stdout.write(json_report.render(summary, findings))
    else:
        _print(summary, findings)
    sys.stdout.flush()
    report_problems(summary.problems)


def _read(run: Run) -> tuple[Summary, list[Finding]]:
    """Return the summary of a run, and the findings that explain why it stopped, if it did.

    If all processes have closed their rings and all collectives have ended, the run most likely
    ended normally. The findings are then those that made its results wrong. They come from the same
    reading of the rings.
    """
    builder = SnapshotBuilder(run)
    with bar("reading records") as progress:
        summary = summarise(run, progress, builder.add)
    closed = all(head.header.closed_ns for head in run.heads)
    if closed and any(row.unfinished for row in summary.collectives):
        with bar("diagnosing") as progress:
            findings = diagnose(run, progress=progress).findings
    elif closed:
        findings = find(builder.finish())
    else:
        findings = judge(run, builder.finish()).findings
    return summary, [finding for finding in findings if finding.stops]


def _write_page(path: Path | None, target: Path, attempt: int | None) -> list[Problem]:
    """Write the HTML report, print its path, and return the run's problems."""
    from rankcall.analysis.details import detail
    from rankcall.report.html import render

    run = open_run(path, attempt)
    builder = SnapshotBuilder(run)
    with bar("reading records") as progress:
        details = detail(run, progress, builder.add)
    findings = judge(run, builder.finish()).findings
    with new_file(output(target)) as out:
        out.write(render(details, findings).encode("utf-8", "replace"))
    if str(target) != "-":
        typer.echo(f"{target}: {size(target.stat().st_size)}; open it in a browser")
    return details.summary.problems


def _print(summary: Summary, findings: list[Finding]) -> None:
    console = console_for_result()
    if console.is_terminal:
        summary_text.show(summary, console, findings)
    else:
        sys.stdout.write(summary_text.render(summary, console.width, findings))
