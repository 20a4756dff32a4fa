"""A diagnosis for a terminal of 80 columns or more: the cause first, then where the ranks stand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePath

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from rankcall.analysis.snapshot import RankPosition
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.verdict import Kept, Lasting, Verdict
from rankcall.analysis.verdicts.wording import duration, numbered
from rankcall.printable import clean
from rankcall.ranks import format_ranks
from rankcall.report.formatting import (
    as_text,
    digits,
    fitted,
    line_names,
    percent,
    plural,
    wrapped,
)
from rankcall.run.stack_classes import StackClass, stack_classes, telling_frames

_DIAGNOSIS_ROWS = 16
_INDENT = 2
_RANKS_WIDE = 22
_MOST_PROBLEMS = 4
_MOST_KEPT = 3
_STACK_LINES, _MOST_CLASSES, _LEAST_FRAMES = 20, 6, 2
LONG = 0.1  # of the age at which a call counts as hung


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


def stack_lines(stacks: Mapping[int, str]) -> list[str]:
    """Return the stacks as lines: a title, then the ranks with equal stacks, fewest ranks first.

    Of three classes there are at most 20 lines. Each class has the newest calls first, and as many
    of them as fit; the user's own calls are kept longest.
    """
    classes = stack_classes(stacks)
    shown = classes[:_MOST_CLASSES]
    most = max(_LEAST_FRAMES, (_STACK_LINES - 1 - 2 * len(shown)) // max(1, len(shown)))
    lines = [f"Stacks of {plural(len(stacks), 'rank')}, equal ones together"]
    for stack_class in shown:
        lines += _class_lines(stack_class, most)
    if classes[_MOST_CLASSES:]:
        left = sum(len(stack_class.ranks) for stack_class in classes[_MOST_CLASSES:])
        more = plural(len(classes) - _MOST_CLASSES, "other stack")
        lines.append(f"and {plural(left, 'more rank')} with {more} (--json has all)")
    return [clean(line) for line in lines]


def _class_lines(alike: StackClass, most: int) -> Iterator[str]:
    count = plural(len(alike.ranks), "rank")
    name = (
        f"rank {alike.ranks[0]}"
        if len(alike.ranks) == 1
        else f"{count}: {shortened_ranks(alike.ranks)}"
    )
    yield f"{' ' * _INDENT}{name}"
    frames = telling_frames(alike.frames, most)
    for frame in frames:
        where = f"{PurePath(frame.file).name}:{frame.line}" if frame.line else frame.file
        yield f"{' ' * 2 * _INDENT}{frame.name}  {where}"
    if not frames:
        yield f"{' ' * 2 * _INDENT}{' '.join(alike.text.split())}"
    if len(alike.frames) > len(frames):
        yield f"{' ' * 2 * _INDENT}and {plural(len(alike.frames) - len(frames), 'more call')}"


def shortened_ranks(ranks: Sequence[int]) -> str:
    """Write ranks, the last ones left out if there are too many."""
    text = format_ranks(ranks)
    return (
        text if len(text) <= 2 * _RANKS_WIDE else text[: 2 * _RANKS_WIDE].rpartition(",")[0] + ",…"
    )


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
            text = wrapped(clean(line), width - _INDENT)
            yield Padding(Text(text, "yellow"), (0, 0, 0, _INDENT))


def _places(verdict: Verdict, width: int) -> Iterator[RenderableType]:
    """Yield the table of where the ranks stand."""
    stand = rows(verdict)
    yield Text()
    yield Text(f"Where the {world(verdict)} stand", "bold")
    yield Padding(_table(stand, width - _INDENT), (0, 0, 0, _INDENT))
    rest = stand[_DIAGNOSIS_ROWS:]
    if rest:
        left = sum(len(row.ranks) for row in rest)
        text = f"and {plural(left, 'more rank')} in {plural(len(rest), 'other place')}"
        yield Padding(Text(f"{text} (--json has all)", "dim"), (0, 0, 0, _INDENT))


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
        text = wrapped(clean(f"{when}  {causes}{over}{stacks}, in {place}"), width - _INDENT)
        yield Padding(Text(text), (0, 0, 0, _INDENT))


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
        yield Padding(Text(wrapped(clean(line), width - _INDENT), "dim"), (0, 0, 0, _INDENT))


def healthy(verdict: Verdict) -> str:
    """Say that nothing is wrong, how fast the job goes, or how it ended."""
    going = verdict.going
    if going is None:
        return "healthy"
    processes = [position.process for position in verdict.ranks if not position.blind]
    speed = ""
    if going.pace.steps_per_s is not None:
        speed = f", {digits(going.pace.steps_per_s)} steps/s"
    elif going.pace.calls_per_s is not None:
        speed = f", {digits(going.pace.calls_per_s)} calls/s"
    if going.pace.share is not None:
        speed += f", {percent(going.pace.share)} of the time in communication"
    if going.live:
        silence = going.silence
        if silence is not None and silence.seconds >= LONG * verdict.hang_after:
            return (
                f"nothing found yet: no rank has issued anything for {duration(silence.seconds)}; "
                f"that counts as no progress from {duration(silence.allowed_s)} on."
            )
        ranks = plural(len(processes), "rank goes", "ranks go")
        return f"healthy: {ranks} on{speed}.{_longest(going.longest, verdict.hang_after)}"
    ended = sum(state.exit == 0 or (state.exit is None and state.closed) for state in processes)
    ended_by_launcher = sum(state.ended_by_launcher for state in processes)
    more = (
        f" {plural(ended_by_launcher, 'was', 'were')} ended by the launcher."
        if ended_by_launcher
        else ""
    )
    unknown = sum(
        state.exit is None and not (state.closed or state.ended_by_launcher) for state in processes
    )
    if unknown:
        pronoun = "it" if unknown == 1 else "they"
        more += f" Of {plural(unknown, 'rank')} nobody noted how {pronoun} ended."
    whole = plural(len(verdict.ranks), "rank")
    return f"healthy: {ended:,} of {whole} ended well{speed}.{more}"


def _longest(call: Lasting | None, hang_after: float) -> str:
    """Write when the call that has been in flight longest will count as hung.

    A user who asks because the job stands still must not only read that it goes on.
    """
    if call is None or call.seconds < LONG * hang_after:
        return ""
    lasts = f" The longest call has been in flight for {duration(call.seconds)}"
    if call.allowed_s == math.inf:
        return f"{lasts}: its rank declared to take long (rankcall.expect)."
    more = "" if call.allowed_s <= hang_after else ", more in the first step or for long steps"
    option = f"(--hang-after {hang_after:g}{more})"
    return f"{lasts}; it counts as hung from {duration(call.allowed_s)} on {option}."


@dataclass(frozen=True)
class Row:
    """Ranks that stand in the same place."""

    ranks: tuple[int, ...]
    state: str
    where: str
    line: str
    least_s: float
    most_s: float
    named: bool  # a culprit
    waiting: bool


def rows(verdict: Verdict) -> list[Row]:
    """Group the ranks by their position: culprits first, then the ranks that wait longest.

    Groups of the same size count as one position: 128 tensor-parallel groups that all do the same
    take one row.
    """
    culprits = verdict.culprits
    alike: dict[tuple[object, ...], list[RankPosition]] = {}
    for place in verdict.ranks:
        key = (
            place.rank in culprits,
            place.shown_state,
            place.in_call,
            place.failed,
            place.op,
            place.seq,
            place.call_site,
            place.user_line,
            place.group_size,
        )
        alike.setdefault(key, []).append(place)
    table_rows = [_row(places, culprits) for places in alike.values()]
    return sorted(
        table_rows,
        key=lambda row: (
            not row.named,
            row.ranks if row.named else (),
            not row.waiting,
            -row.most_s,
            row.ranks,
        ),
    )


def _row(alike: Sequence[RankPosition], culprits: set[int]) -> Row:
    first = alike[0]
    labels = {place.group for place in alike}
    where = "no records" if first.blind else "nothing yet"
    if first.op:
        verb = "failed in" if first.failed else "in" if first.in_call else "left"
        group = f"group {first.group}" if len(labels) == 1 else f"{len(labels):,} groups"
        where = f"{verb} {numbered(first.op, first.seq)}, {group}"
    ages = [place.age_s for place in alike]
    return Row(
        tuple(place.rank for place in alike),
        first.shown_state,
        where,
        line_names(first.call_site, first.user_line),
        min(ages),
        max(ages),
        first.rank in culprits,
        first.in_call,
    )


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


def ranks_cell(ranks: Sequence[int]) -> str:
    """Write ranks, or their number if they do not fit."""
    text = format_ranks(ranks)
    return text if len(text) <= _RANKS_WIDE else plural(len(ranks), "rank")


def named(ranks: Sequence[int]) -> str:
    """Name ranks in a sentence: ``rank 2``, ``ranks 1,3``, ``1,023 ranks``."""
    text = ranks_cell(ranks)
    return text if text.endswith("s") else f"rank{'' if len(ranks) == 1 else 's'} {text}"


def since_cell(row: Row) -> str:
    """Write how long ranks have been in (or out of) their call."""
    if row.where in ("nothing yet", "no records"):
        return "-"
    least, most = f"{digits(row.least_s)} s", f"{digits(row.most_s)} s"
    if least == most or row.most_s < 10 * max(row.least_s, 0.01):
        return most
    return f"{least}–{most}"


def world(verdict: Verdict) -> str:
    """Name the size of a job: ``8 ranks on 2 hosts``."""
    hosts = {position.process.host for position in verdict.ranks if position.process.host}
    where = f" on {plural(len(hosts), 'host')}" if hosts else ""
    return f"{plural(len(verdict.ranks), 'rank')}{where}"
