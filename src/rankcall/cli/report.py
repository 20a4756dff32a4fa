"""``rankcall report``: read a run and report where the time between ranks went."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rankcall._newfile import new_file
from rankcall.analysis.timing.summary import Summary, summarise
from rankcall.analysis.verdicts.finding import Finding
from rankcall.cli._reading import bar, open_run, output, report_problems
from rankcall.errors import RankcallError
from rankcall.report import json as json_report
from rankcall.report import terminal
from rankcall.report._format import size
from rankcall.run import Run


def command(
    run: Annotated[
        Path | None,
        typer.Argument(help="A run directory or a ring file. Without it: the latest run here."),
    ] = None,
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
        report_problems(_write_page(run, html))
        return
    opened = open_run(run)
    with bar("reading records") as progress:
        summary = summarise(opened, progress)
    if json:
        sys.stdout.write(json_report.render(summary))
    else:
        _print(summary, _what_stopped(opened, summary))
    sys.stdout.flush()
    report_problems(summary.problems)


def _what_stopped(run: Run, summary: Summary) -> Finding | None:
    """Return the finding that explains why a run stopped; None if it ended normally."""
    if all(row.closed for row in summary.ranks) and not any(
        row.unfinished for row in summary.collectives
    ):
        return None
    from rankcall.analysis.diagnosis import diagnose

    with bar("diagnosing") as progress:
        findings = diagnose(run, progress=progress).findings
    return findings[0] if findings and findings[0].stops else None


def _write_page(path: Path | None, target: Path) -> list[str]:
    """Write the HTML report, print its path, and return the run's problems."""
    from rankcall.analysis.details import detail
    from rankcall.analysis.diagnosis import diagnose
    from rankcall.report.html import render

    run = open_run(path)
    with bar("reading records") as progress:
        details = detail(run, progress)
    with bar("diagnosing") as progress:
        findings = diagnose(run, progress=progress).findings
    with new_file(output(target)) as out:
        out.write(render(details, findings).encode("utf-8", "replace"))
    if str(target) != "-":
        typer.echo(f"{target}: {size(target.stat().st_size)}; open it in a browser")
    return details.summary.problems


def _print(summary: Summary, stopped: Finding | None) -> None:
    from rich.console import Console

    if (sys.stdout.encoding or "").lower().replace("-", "") != "utf8":
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    console = Console(highlight=False)
    if console.is_terminal:
        terminal.show(summary, console, stopped)
    else:
        sys.stdout.write(terminal.render(summary, console.width, stopped))
