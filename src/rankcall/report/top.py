"""The live view: one calm screen with the verdict first, and then where the ranks are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rankcall.analysis.attempts import Attempts
from rankcall.analysis.snapshot import END_UNKNOWN, LEFT
from rankcall.analysis.verdicts.verdict import Verdict
from rankcall.analysis.verdicts.wording import duration
from rankcall.printable import clean
from rankcall.report.attempts_line import bar, in_words
from rankcall.report.fitting import cut
from rankcall.report.formatting import as_text, digits, percent, plural, wrapped
from rankcall.report.going import LONG
from rankcall.report.standing import named, world
from rankcall.report.top_choice import HELP, Choice
from rankcall.report.top_lines import Line, cells

_ROWS, _FEW_ROWS = 12, 4  # rows of ranks; fewer make room for a stack
_STYLES = {"": "dim", LEFT: "dim", END_UNKNOWN: "italic cyan"}


def render(verdict: Verdict, width: int = 80, attempts: Attempts | None = None) -> str:
    """Return the view as plain text."""
    return as_text(lambda console: console.print(view(verdict, width, attempts=attempts)), width)


def view(
    verdict: Verdict,
    width: int,
    note: str = "",
    choice: Choice | None = None,
    stack: Sequence[str] = (),
    attempts: Attempts | None = None,
) -> RenderableType:
    """Return the view as something to print.

    Args:
        verdict: What is known of the job.
        width: The columns of the terminal.
        note: A line at the foot.
        choice: The order, the filter and the row that the user chose.
        stack: The lines of the stack that the user wants to see.
        attempts: The attempts of the job. One alone is not shown.
    """
    choice = choice or Choice()
    parts: list[RenderableType] = [_head(verdict, width)]
    if attempts is not None and len(attempts.attempts) > 1:
        parts.append(Text(bar(attempts, width)))
        parts.append(Text(cut(in_words(attempts), width), "dim"))
    parts += [Text(), _verdict(verdict, width), Text()]
    if choice.help:
        parts += [Text(f"{keys.ljust(40)} {does}") for keys, does in HELP]
    else:
        parts += _rows(verdict, width, choice, _FEW_ROWS if stack else _ROWS)
        parts += [Text(), *(Text(cut(clean(line), width)) for line in stack)] if stack else []
    problems = verdict.problems
    if problems:
        text = clean(problems[0]) + (f" (and {len(problems) - 1:,} more)" if problems[1:] else "")
        parts += [Text(), Text(wrapped(text, width), "yellow")]
    if note:
        parts += [Text(), Text(cut(note, width), "dim")]
    return Group(*parts)


def _rows(verdict: Verdict, width: int, choice: Choice, most: int) -> Iterator[RenderableType]:
    """Yield the table of the rows around the chosen one, what is left out, and the filter."""
    lines = choice.lines(verdict)
    at = choice.at(lines)
    first = 0 if at is None else max(0, min(at - most // 2, len(lines) - most))
    shown = lines[first : first + most]
    chosen = None if at is None else at - first
    yield Padding(_table(verdict, shown, width - 2, choice, chosen), (0, 0, 0, 2))
    if len(lines) > len(shown):
        left = sum(len(line.places) for line in lines[:first] + lines[first + most :])
        where = plural(len(lines) - len(shown), "other row" if choice.apart else "other line")
        yield Padding(Text(f"and {plural(left, 'more rank')} at {where}", "dim"), (0, 0, 0, 2))
    if choice.typing or choice.only:
        yield Text()
        yield Text(cut(_filter(choice, lines), width), "bold")


def _filter(choice: Choice, lines: Sequence[Line]) -> str:
    ranks = plural(sum(len(line.places) for line in lines), "rank")
    text = f"only rows with: {clean(choice.only)}{'_' if choice.typing else ''}"
    return f"{text}  ({ranks}; {'enter keeps it, ' if choice.typing else ''}escape drops it)"


def _head(verdict: Verdict, width: int) -> RenderableType:
    steps = max((position.process.steps for position in verdict.ranks), default=0)
    facts = [f"step {steps:,}" if steps else ""]
    # The pace of a job says nothing once it hangs.
    if not verdict.stops and verdict.going is not None:
        job_pace = verdict.going.pace
        if job_pace.steps_per_s is not None:
            facts.append(f"{digits(job_pace.steps_per_s)} steps/s")
        elif job_pace.calls_per_s is not None:
            facts.append(f"{digits(job_pace.calls_per_s)} calls/s")
        if job_pace.share is not None:
            facts.append(f"{percent(job_pace.share)} communication")
    right = " · ".join(text for text in facts if text)
    name = clean(PurePath(verdict.run).name)
    left = f"{name} · {world(verdict)}"
    line = Table.grid(expand=True)
    line.add_column(justify="left", no_wrap=True)
    line.add_column(justify="right", no_wrap=True)
    line.width = width
    line.add_row(
        Text(cut(left, max(10, width - len(right) - 2)), "bold"),
        Text(right, "dim"),
    )
    return line


def _verdict(verdict: Verdict, width: int) -> RenderableType:
    if not verdict.findings:
        going = verdict.going
        words = "all ranks go on" if going and going.live else "the job has ended"
        silence = going.silence if going else None
        if silence is not None and silence.seconds >= LONG * verdict.hang_after:
            words = f"no rank has issued anything for {duration(silence.seconds)}"
        return Text.assemble(("● ", "green"), ("healthy", "bold green"), (f"  {words}", "dim"))
    first = verdict.findings[0]
    colour = "red" if first.stops else "yellow" if first.is_fault else "green"
    text = Text.assemble(("● ", colour), (first.kind, f"bold {colour}"))
    if first.confidence != "certain":
        text.append(f"  {first.confidence}", "dim")
    body = Text(wrapped(clean(first.summary), width - 2))
    parts: list[RenderableType] = [text, Padding(body, (0, 0, 0, 2))]
    if first.advice:
        advice = Text(wrapped(clean(first.advice), width - 2), "dim")
        parts.append(Padding(advice, (0, 0, 0, 2)))
    rest = verdict.findings[1:]
    if rest:
        names = ", ".join(f"{finding.kind} of {_culprits(finding.ranks)}" for finding in rest[:3])
        parts.append(Padding(Text(f"and {names}", "dim"), (0, 0, 0, 2)))
    return Group(*parts)


def _culprits(ranks: Sequence[int]) -> str:
    return named(ranks) if ranks else "nobody in particular"


def _table(
    verdict: Verdict, lines: Sequence[Line], width: int, choice: Choice, chosen: int | None
) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name, justify in (
        ("ranks", "left"),
        ("", "left"),
        ("state", "left"),
        ("call", "left"),
        ("line", "left"),
        ("for", "right"),
    ):
        folds = name == "line"
        mark = ("▲" if choice.backwards else "▼") if name and name == choice.order else ""
        table.add_column(
            name + mark,
            justify=justify,  # type: ignore[arg-type]
            no_wrap=not folds,
            overflow="fold" if folds else "ellipsis",
        )
    total = max(1, len(verdict.ranks))
    rows = [cells(verdict, line, total) for line in lines]
    fixed = sum(max((len(row[i]) for row in rows), default=0) for i in (0, 1, 2, 5)) + 10
    room = max(16, width - fixed)
    place = max((cell_len(row[4]) for row in rows), default=0)  # not cut: it folds
    call = max((len(row[3]) for row in rows), default=0)
    call = min(call, max(room - place, room // 2))
    for number, (line, row) in enumerate(zip(lines, rows, strict=True)):
        style = "bold red" if line.named else _STYLES.get(line.places[0].how, "")
        row[3] = cut(row[3], call)
        texts = [Text(clean(cell)) for cell in row]
        texts[1] = Text(row[1], "red" if line.named else "cyan")
        table.add_row(*texts, style=f"{style} reverse".strip() if number == chosen else style)
    return table
