"""``rankcall report``: read a run and report where the time between ranks went."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from rankcall.analysis.report_reading import read_page, read_report, stacks_at_stop
from rankcall.cli.common import (
    Attempt,
    RunPath,
    bar,
    console_for_result,
    open_run,
    output,
    report_problems,
    say_moved,
)
from rankcall.errors import RankcallError
from rankcall.files import new_file
from rankcall.problems import Problem
from rankcall.report import json as json_report
from rankcall.report import summary_text
from rankcall.report.formatting import size
from rankcall.run.load import Run

_PAGE = Path("report.html")
_FILE_WIDTH = 100  # columns of a text that goes into a file


class Format(str, Enum):
    """The forms of a report."""

    text = "text"
    html = "html"
    json = "json"


def command(
    run: RunPath = None,
    attempt: Attempt = None,
    to: Annotated[
        Format | None,
        typer.Option(help="The form; without it, html if the file's name ends so, or else text."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="The file to write; - is stdout. Without it: stdout, or report.html for html.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The same as --to json.")] = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", hidden=True)] = None,
) -> None:
    """Report which ranks came last, how long the others waited, and how fast the collectives were.

    An HTML report is one page without other files. Exits with 1 if part of the run could not be
    read; the report then covers the rest.
    """
    if html is not None:
        say_moved(f"--html {html}", f"-o {html}")
    wanted = {Format.json} if json else set()
    wanted |= {to} if to else set()
    wanted |= {Format.html} if html is not None else set()
    if len(wanted) > 1:
        raise RankcallError(f"{' and '.join(sorted(wanted))}: one form of the report at a time")
    target = html or file
    form = next(iter(wanted), Format.html if _is_page(target) else Format.text)
    opened = open_run(run, attempt)
    if form is Format.html:
        problems = _write_page(opened, target or _PAGE)
    else:
        problems = _write(opened, form, target)
    report_problems(problems)


def _is_page(target: Path | None) -> bool:
    return target is not None and target.suffix.lower() in (".html", ".htm")


def _write(run: Run, form: Format, target: Path | None) -> list[Problem]:
    """Write the report as text or JSON, and return the run's problems."""
    summary, findings = read_report(run, bar)
    stacks = stacks_at_stop(run, findings)
    to_stdout = target is None or str(target) == "-"
    if form is Format.json:
        text = json_report.render(summary, findings, stacks)
    elif to_stdout:
        console = console_for_result(wraps=False)
        if console.is_terminal:
            summary_text.show(summary, console, findings, stacks)
            return summary.problems
        text = summary_text.render(summary, console.width, findings, stacks)
    else:
        text = summary_text.render(summary, _FILE_WIDTH, findings, stacks)
    if target is None or to_stdout:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        with new_file(target) as out:
            out.write(text.encode("utf-8", "replace"))
        typer.echo(f"{target}: {size(target.stat().st_size)}")
    return summary.problems


def _write_page(run: Run, target: Path) -> list[Problem]:
    """Write the HTML report, print its path, and return the run's problems."""
    from rankcall.report.html import render

    details, diagnosis = read_page(run, bar)
    with new_file(output(target)) as out:
        out.write(render(details, diagnosis.findings, diagnosis.kept).encode("utf-8", "replace"))
    if str(target) != "-":
        typer.echo(f"{target}: {size(target.stat().st_size)}; open it in a browser")
    return details.summary.problems
