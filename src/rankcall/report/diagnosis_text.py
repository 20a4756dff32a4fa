"""A verdict for a terminal of 80 columns or more: the cause first, then where the ranks stand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path, PurePath

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.verdict import Kept, Verdict
from rankcall.analysis.verdicts.wording import duration
from rankcall.printable import clean
from rankcall.report.fitting import fitted
from rankcall.report.formatting import INDENT, as_text, plural, wrapped
from rankcall.report.going import healthy
from rankcall.report.stack_lines import stack_lines
from rankcall.report.standing import Row, named, ranks_cell, rows, since_cell, world

_DIAGNOSIS_ROWS = 16
_MOST_PROBLEMS = 4
_MOST_KEPT = 3


def diagnosis_text(
    verdict: Verdict, width: int = 80, stacks: Mapping[int, str] | None = None
) -> str:
    """Return the diagnosis as plain text, no line of it wider than ``width``.

    ``stacks`` are texts by rank.
    """
    return as_text(lambda console: show_diagnosis(verdict, console, stacks), width)


def show_diagnosis(
    verdict: Verdict, console: Console, stacks: Mapping[int, str] | None = None
) -> None:
    """Print the diagnosis; ``console`` decides on width and colour."""
    console.print(body(verdict, console.width))
    if stacks:
        title, *lines = stack_lines(stacks)
        console.print()
        console.print(Text(title, "bold"))
        for line in lines:
            console.print(Text(line, overflow="fold"))


def body(verdict: Verdict, width: int) -> RenderableType:
    """Return the diagnosis as something to print, ``width`` columns wide."""
    return Group(*_parts(verdict, width))


def _parts(verdict: Verdict, width: int) -> Iterator[RenderableType]:
    if not verdict.findings:
        yield Text(wrapped(healthy(verdict), width), "bold green")
    for number, finding in enumerate(verdict.findings):
        if number:
            yield Text()
        yield from _finding(finding, width, first=number == 0)
    if verdict.ranks:  # a log does not tell where they stand
        yield from _places(verdict, width)
    yield from _kept(verdict.kept[-_MOST_KEPT:], width)
    problems = verdict.problems
    if problems:
        yield Text()
        yield Text("What is not known", "bold")
        lines = [*problems[:_MOST_PROBLEMS]]
        if len(problems) > _MOST_PROBLEMS:
            lines.append(f"and {len(problems) - _MOST_PROBLEMS:,} more (--json has all)")
        for line in lines:
            text = wrapped(clean(line), width - INDENT)
            yield Padding(Text(text, "yellow"), (0, 0, 0, INDENT))


def _places(verdict: Verdict, width: int) -> Iterator[RenderableType]:
    """Yield the table of where the ranks stand."""
    stand = rows(verdict)
    yield Text()
    yield Text(f"Where the {world(verdict)} stand", "bold")
    yield Padding(_table(stand, width - INDENT), (0, 0, 0, INDENT))
    rest = stand[_DIAGNOSIS_ROWS:]
    if rest:
        left = sum(len(row.ranks) for row in rest)
        text = f"and {plural(left, 'more rank')} in {plural(len(rest), 'other place')}"
        yield Padding(Text(f"{text} (--json has all)", "dim"), (0, 0, 0, INDENT))


def _table(stand: Sequence[Row], room: int) -> RenderableType:
    cells = [
        [
            ranks_cell(row.ranks),
            row.state,
            row.where,
            row.line,
            since_cell(row),
        ]
        for row in stand[:_DIAGNOSIS_ROWS]
    ]
    marked = [number for number, row in enumerate(stand[:_DIAGNOSIS_ROWS]) if row.named]
    heads = ["ranks", "state", "call", "line", "since"]
    return fitted(heads, cells, room, names=4, paths=3, marked=marked)


def _kept(kept: Sequence[Kept], width: int) -> Iterator[RenderableType]:
    """Yield the verdicts of the job's own watcher, with the places of the stacks that it kept."""
    if kept:
        yield Text()
        yield Text("What the job's own watcher said", "bold")
    for entry in kept:
        epoch_s = entry.verdict.origin.epoch_ns / 1e9
        when = datetime.fromtimestamp(epoch_s).strftime("%Y-%m-%d %H:%M:%S")
        causes = "; ".join(
            f"{finding.kind}: {named(finding.ranks)}" if finding.ranks else finding.kind
            for finding in entry.verdict.findings
        )
        stacks = f" (with {plural(entry.stacks, 'stack')})" if entry.stacks else ""
        over = "" if entry.over_s is None else f", over after {duration(entry.over_s)}"
        place = _from_here(entry.place)
        text = wrapped(clean(f"{when}  {causes}{over}{stacks}, in {place}"), width - INDENT)
        yield Padding(Text(text), (0, 0, 0, INDENT))


def _from_here(path: str) -> str:
    """Write a path below the current directory without that directory's name."""
    here = Path.cwd()
    return str(PurePath(path).relative_to(here)) if PurePath(path).is_relative_to(here) else path


def _finding(finding: Finding, width: int, *, first: bool) -> Iterator[RenderableType]:
    style = "bold green" if not finding.is_fault else "bold red" if first else "bold"
    sure = "" if finding.confidence == "certain" else f" ({finding.confidence})"
    yield Text(wrapped(clean(f"{finding.kind}{sure}: {finding.summary}"), width), style)
    if finding.advice:
        yield Text(wrapped(clean(finding.advice), width))
    for line in finding.evidence:
        yield Padding(Text(wrapped(clean(line), width - INDENT), "dim"), (0, 0, 0, INDENT))
