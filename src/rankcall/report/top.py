"""The live view: one calm screen with the verdict first, and then where the ranks are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rankcall.analysis.snapshot import END_UNKNOWN, LEFT, RankPosition
from rankcall.analysis.verdicts.verdict import Verdict
from rankcall.analysis.verdicts.wording import duration, numbered
from rankcall.printable import clean
from rankcall.report.fitting import cut
from rankcall.report.formatting import as_text, digits, percent, plural, wrapped
from rankcall.report.going import LONG
from rankcall.report.standing import line_cell, named, no_call, ranks_cell, with_verb, world

_ROWS = 12
_BAR = 12
_STYLES = {"": "dim", LEFT: "dim", END_UNKNOWN: "italic cyan"}
_FILL = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉", "█")


@dataclass(frozen=True)
class Line:
    """Ranks that are at the same line, in the same op; their sequence numbers may differ."""

    places: tuple[RankPosition, ...]
    named: bool

    @property
    def longest(self) -> float:
        """For how long the first of them has been there, s."""
        return max(place.age_s for place in self.places)


def render(verdict: Verdict, width: int = 80) -> str:
    """Return the view as plain text."""
    return as_text(lambda console: console.print(view(verdict, width)), width)


def view(verdict: Verdict, width: int, note: str = "") -> RenderableType:
    """Return the view as something to print; ``note`` stands at its foot."""
    lines = lines_of(verdict)
    parts: list[RenderableType] = [
        _head(verdict, width),
        Text(),
        _verdict(verdict, width),
        Text(),
        Padding(_table(verdict, lines[:_ROWS], width - 2), (0, 0, 0, 2)),
    ]
    if len(lines) > _ROWS:
        left = sum(len(line.places) for line in lines[_ROWS:])
        more = f"and {plural(left, 'more rank')} at {plural(len(lines) - _ROWS, 'other line')}"
        parts.append(Padding(Text(more, "dim"), (0, 0, 0, 2)))
    problems = verdict.problems
    if problems:
        text = clean(problems[0]) + (f" (and {len(problems) - 1:,} more)" if problems[1:] else "")
        parts += [Text(), Text(wrapped(text, width), "yellow")]
    if note:
        parts += [Text(), Text(cut(note, width), "dim")]
    return Group(*parts)


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


def lines_of(verdict: Verdict) -> list[Line]:
    """Put ranks at the same line together: culprits first, then the many, then the few."""
    culprits = verdict.culprits
    alike: dict[tuple[object, ...], list[RankPosition]] = {}
    for place in verdict.ranks:
        # While all ranks go on, "between two calls" and "in the next one" are one row.
        moving = not verdict.findings
        key = (
            place.rank in culprits,
            place.shown_state,
            place.how if place.failed or not moving else "",
            place.op,
            place.call_site,
            place.user_line,
            verdict.stands_at(place),
        )
        alike.setdefault(key, []).append(place)
    lines = [Line(tuple(places), places[0].rank in culprits) for places in alike.values()]
    return sorted(lines, key=lambda line: (not line.named, -len(line.places), line.places[0].rank))


def _table(verdict: Verdict, lines: Sequence[Line], width: int) -> RenderableType:
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
        table.add_column(
            name,
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
    for line, row in zip(lines, rows, strict=True):
        style = "bold red" if line.named else _STYLES.get(line.places[0].how, "")
        row[3] = cut(row[3], call)
        texts = [Text(clean(cell)) for cell in row]
        texts[1] = Text(row[1], "red" if line.named else "cyan")
        table.add_row(*texts, style=style)
    return table


def cells(verdict: Verdict, line: Line, total: int) -> list[str]:
    """Return a row: ranks, a bar, the state, the call, the line, and for how long."""
    first, moving = line.places[0], not verdict.findings
    seqs = sorted({place.seq for place in line.places})
    name = numbered(first.op, seqs[0])
    if len(seqs) > 1:
        name = f"{first.op} #{seqs[0]}–{seqs[-1]}"
    if not first.op:
        call = no_call(first)
    elif moving and not first.failed:
        call = name
    else:
        call = with_verb(first.how, name)
    ages = "" if not first.op or (moving and line.longest < 1) else duration(line.longest)
    return [
        ranks_cell([place.rank for place in line.places]),
        bar(len(line.places) / total),
        first.shown_state,
        call,
        line_cell(verdict, first),
        ages,
    ]


def bar(share: float) -> str:
    """Draw a share as a bar of at most twelve columns; a share above 0 is always visible."""
    eighths = max(1, round(share * _BAR * 8)) if share > 0 else 0
    return _FILL[8] * (eighths // 8) + _FILL[eighths % 8]
