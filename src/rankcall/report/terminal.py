"""A summary or a diagnosis for a terminal of 80 columns or more."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path, PurePath

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rankcall.analysis.run_tables import SiteRow, StepShare
from rankcall.analysis.snapshot import RankPosition, pace, rank_positions, unfinished
from rankcall.analysis.summary import Straggler, Summary, size_name
from rankcall.analysis.verdicts import Diagnosis, Kept
from rankcall.analysis.verdicts.evidence import patience
from rankcall.analysis.verdicts.finding import Finding, duration, numbered
from rankcall.analysis.verdicts.no_progress import silence_of
from rankcall.process import clean
from rankcall.record import format_ranks
from rankcall.report.formatting import (
    Headline,
    as_text,
    cut,
    digits,
    fitted,
    headline,
    line_names,
    listed,
    percent,
    plural,
    rate,
    size,
    time,
    wrapped,
)
from rankcall.run.outcomes import RankSummary, total_by_rank
from rankcall.run.stacks import StackClass, stack_classes, telling_frames

# A diagnosis for a terminal of 80 columns or more: the cause first, then where the ranks stand.


_DIAGNOSIS_ROWS = 16
_INDENT = 2
_RANKS_WIDE = 22
_MOST_PROBLEMS = 4
_MOST_KEPT = 3
_STACK_LINES, _MOST_CLASSES, _LEAST_FRAMES = 20, 6, 2
LONG = 0.1  # of the age at which a call counts as hung


def diagnosis_text(
    diagnosis: Diagnosis, width: int = 80, stacks: Mapping[int, str] | None = None
) -> str:
    """Return the diagnosis as plain text, no line of it wider than ``width``.

    ``stacks`` are texts by rank.
    """
    return as_text(lambda console: show_diagnosis(diagnosis, console, stacks), width)


def show_diagnosis(
    diagnosis: Diagnosis, console: Console, stacks: Mapping[int, str] | None = None
) -> None:
    """Print the diagnosis; ``console`` decides on width and colour."""
    console.print(body(diagnosis, console.width))
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


def body(diagnosis: Diagnosis, width: int) -> RenderableType:
    """Return the diagnosis as something to print, ``width`` columns wide."""
    return Group(*_parts(diagnosis, width))


def _parts(diagnosis: Diagnosis, width: int) -> Iterator[RenderableType]:
    if not diagnosis.findings:
        yield Text(wrapped(healthy(diagnosis), width), "bold green")
    for number, finding in enumerate(diagnosis.findings):
        if number:
            yield Text()
        yield from _finding(finding, width, first=number == 0)
    if diagnosis.snapshot.ranks:  # a log does not tell where they stand
        yield from _places(diagnosis, width)
    yield from _kept(diagnosis.kept[-_MOST_KEPT:], width)
    problems = diagnosis.snapshot.problems
    if problems:
        yield Text()
        yield Text("What is not known", "bold")
        lines = [*problems[:_MOST_PROBLEMS]]
        if len(problems) > _MOST_PROBLEMS:
            lines.append(f"and {len(problems) - _MOST_PROBLEMS:,} more (--json has all)")
        for line in lines:
            text = wrapped(clean(line), width - _INDENT)
            yield Padding(Text(text, "yellow"), (0, 0, 0, _INDENT))


def _places(diagnosis: Diagnosis, width: int) -> Iterator[RenderableType]:
    """Yield the table of where the ranks stand."""
    stand = rows(diagnosis)
    yield Text()
    yield Text(f"Where the {world(diagnosis)} stand", "bold")
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
    for verdict in kept:
        when = datetime.fromtimestamp(verdict.epoch_ns / 1e9).strftime("%Y-%m-%d %H:%M:%S")
        causes = "; ".join(
            f"{kind}: {named(ranks)}" if ranks else kind for kind, ranks in verdict.causes
        )
        stacks = f" (with {plural(verdict.stacks, 'stack')})" if verdict.stacks else ""
        over = "" if verdict.over_s is None else f", over after {duration(verdict.over_s)}"
        place = _from_here(verdict.place)
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


def healthy(diagnosis: Diagnosis) -> str:
    """Say that nothing is wrong, how fast the job goes, or how it ended."""
    snapshot = diagnosis.snapshot
    ranks = [state for state in snapshot.ranks if not state.blind]
    job_pace = pace(snapshot)
    speed = ""
    if job_pace.steps_per_s is not None:
        speed = f", {digits(job_pace.steps_per_s)} steps/s"
    elif job_pace.calls_per_s is not None:
        speed = f", {digits(job_pace.calls_per_s)} calls/s"
    if job_pace.share is not None:
        speed += f", {percent(job_pace.share)} of the time in communication"
    if snapshot.live:
        silence = silence_of(snapshot, diagnosis.hang_after)
        if silence is not None and silence.seconds >= LONG * diagnosis.hang_after:
            return (
                f"nothing found yet: no rank has issued anything for {duration(silence.seconds)}; "
                f"that counts as no progress from {duration(silence.allowed_s)} on."
            )
        going = plural(len(ranks), "rank goes", "ranks go")
        return f"healthy: {going} on{speed}.{_longest(diagnosis)}"
    ended = sum(state.exit == 0 or (state.exit is None and state.closed) for state in ranks)
    ended_by_launcher = sum(state.ended_by_launcher for state in ranks)
    more = (
        f" {plural(ended_by_launcher, 'was', 'were')} ended by the launcher."
        if ended_by_launcher
        else ""
    )
    unknown = sum(
        state.exit is None and not (state.closed or state.ended_by_launcher) for state in ranks
    )
    if unknown:
        pronoun = "it" if unknown == 1 else "they"
        more += f" Of {plural(unknown, 'rank')} nobody noted how {pronoun} ended."
    whole = plural(len(snapshot.ranks), "rank")
    return f"healthy: {ended:,} of {whole} ended well{speed}.{more}"


def _longest(diagnosis: Diagnosis) -> str:
    """Write when the call that has been in flight longest will count as hung.

    A user who asks because the job stands still must not only read that it goes on.
    """
    snapshot = diagnosis.snapshot
    ages = np.where(unfinished(snapshot.calls), snapshot.calls["age_s"], -np.inf)
    if not len(ages) or ages.max() < LONG * diagnosis.hang_after:
        return ""
    allowed = float(patience(snapshot, diagnosis.hang_after)[ages.argmax()])
    lasts = f" The longest call has been in flight for {duration(float(ages.max()))}"
    if allowed == math.inf:
        return f"{lasts}: its rank declared to take long (rankcall.expect)."
    more = "" if allowed <= diagnosis.hang_after else ", more in the first step or for long steps"
    option = f"(--hang-after {diagnosis.hang_after:g}{more})"
    return f"{lasts}; it counts as hung from {duration(allowed)} on {option}."


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


def rows(diagnosis: Diagnosis) -> list[Row]:
    """Group the ranks by their position: culprits first, then the ranks that wait longest.

    Groups of the same size count as one position: 128 tensor-parallel groups that all do the same
    take one row.
    """
    culprits = {rank for finding in diagnosis.findings for rank in finding.ranks}
    sizes = {
        label: len(group.ranks)
        for label, group in zip(diagnosis.snapshot.labels, diagnosis.snapshot.groups, strict=True)
    }
    alike: dict[tuple[object, ...], list[RankPosition]] = {}
    for place in rank_positions(diagnosis.snapshot):
        key = (
            place.rank in culprits,
            place.shown_state,
            place.in_call,
            place.failed,
            place.op,
            place.seq,
            place.call_site,
            place.user_line,
            sizes.get(place.group),
        )
        alike.setdefault(key, []).append(place)
    table_rows = [_row(places, culprits, sizes) for places in alike.values()]
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


def _row(alike: Sequence[RankPosition], culprits: set[int], sizes: dict[str, int]) -> Row:
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


def world(diagnosis: Diagnosis) -> str:
    """Name the size of a job: ``8 ranks on 2 hosts``."""
    ranks = diagnosis.snapshot.ranks
    hosts = {state.host for state in ranks if state.host}
    where = f" on {plural(len(hosts), 'host')}" if hosts else ""
    return f"{plural(len(ranks), 'rank')}{where}"


_ROWS, _SITES, _RANKS, _GROUPS = 20, 8, 8, 4
_FEW = 4  # ranks that are listed however little they matter
_BARS = "▁▂▃▄▅▆▇█"
_WIDE = 100  # columns from which on there is room for more
_SOURCE = 40  # columns for a source line
_MORE = "Where each rank stands: rankcall diagnose."
_LABEL = 9


def render(summary: Summary, width: int = 80, findings: Sequence[Finding] = ()) -> str:
    """Return the report as plain text, no line of it wider than ``width``."""
    return as_text(lambda console: show(summary, console, findings), width)


def show(summary: Summary, console: Console, findings: Sequence[Finding] = ()) -> None:
    """Print the report; ``console`` decides on width and colour.

    ``findings`` say why the run stopped, or why its results are wrong. The first is printed first.
    """
    first = headline(summary)
    if findings:
        likeliest = findings[0]
        console.print(Text(wrapped(clean(likeliest.summary), console.width), "bold red"))
        console.print(Text(wrapped(clean(f"{likeliest.advice} {_MORE}".strip()), console.width)))
        if len(findings) > 1:
            console.print(Text(f"There {_are(len(findings) - 1)} beside it.", "dim"))
        console.print()
        ended = all(row.closed for row in summary.ranks)
        if not ended or any(row.unfinished for row in summary.collectives):
            console.print(Text("Until then", "bold"))
    text = wrapped(first.text, console.width)
    console.print(Text(text, "bold red" if first.alarm else "bold green"))
    if first.detail:
        console.print(Text(wrapped(first.detail, console.width)))
    for title, body in _sections(summary, first, console.width - _INDENT):
        console.print()
        console.print(Text(title, "bold"))
        console.print(Padding(body, (0, 0, 0, _INDENT)))


def _are(count: int) -> str:
    return "is 1 more finding" if count == 1 else f"are {count:,} more findings"


def _sections(summary: Summary, first: Headline, room: int) -> Iterator[tuple[str, RenderableType]]:
    yield "What ran where", _facts(summary, room)
    if not summary.collectives:
        return
    yield "By op, group and size (a member's time; bandwidth in GB/s)", _collectives(summary, room)
    if len(summary.stragglers) > 1:
        yield "Who kept the others waiting", _stragglers(summary, first.ranks, room)
    uneven = [total for total in total_by_rank(summary.joins) if total.shadowed or total.replayed]
    if uneven:
        yield "Uneven inputs (Join): steps without a batch of one's own", _joins(uneven, room)
    yield "Slowest call sites (a rank's time)", _sites(summary, room)
    if summary.comm_share is not None:
        yield "Time in communication", _comm_share(summary, room)


def _more(body: Table, left: int, what: str) -> RenderableType:
    """Say how much of a long list is not shown."""
    if left <= 0:
        return body
    return Group(body, Text(f"and {plural(left, 'more ' + what)} (--json has all)", "dim"))


def _facts(summary: Summary, room: int) -> RenderableType:
    lines = [
        Text.assemble((name.ljust(_LABEL), "dim"), cut(clean(text), room - _LABEL))
        for name, text in _fact_lines(summary, room - _LABEL)
    ]
    return Text("\n").join(lines)


def _fact_lines(summary: Summary, room: int) -> Iterator[tuple[str, str]]:
    yield "run", PurePath(summary.path).name
    numbers = {row.rank for row in summary.ranks}
    hosts = list(dict.fromkeys(row.host for row in summary.ranks))
    world = "" if not summary.missing_ranks else f" of {summary.world_size:,}"
    start = f"{len(numbers):,}{world} on {plural(len(hosts), 'host')}: "
    yield "ranks", start + listed(hosts, room - len(start))
    if summary.missing_ranks:
        yield "missing", f"no records of rank {format_ranks(summary.missing_ranks)}"
    for group in summary.groups[:_GROUPS]:
        known = group.group
        details = ", ".join(text for text in (known.description, known.backend) if text)
        where = ", across hosts" if group.cross_host else ""
        start = f"{group.label} ({details}): {plural(len(known.ranks), 'rank')}{where}: "
        yield "group", start + cut(format_ranks(known.ranks), max(8, room - len(start)))
    if len(summary.groups) > _GROUPS:
        yield "", f"and {len(summary.groups) - _GROUPS:,} more groups"
    yield "time", _when(summary)
    yield "capture", _capture(summary)


def _when(summary: Summary) -> str:
    steps = max((row.steps for row in summary.ranks), default=0)
    parts = [time(summary.duration_ms), plural(steps, "step") if steps else "no optimizer steps"]
    attempts = len({row.attempt for row in summary.ranks})
    if attempts > 1:
        parts.append(plural(attempts, "attempt"))
    if summary.started_epoch_ns is not None:
        try:
            moment = datetime.fromtimestamp(summary.started_epoch_ns / 1e9, timezone.utc)
            parts.append(f"from {moment:%Y-%m-%d %H:%M:%S} UTC")
        except (OverflowError, ValueError, OSError):
            parts.append("at an impossible date")
    return ", ".join(parts)


def _capture(summary: Summary) -> str:
    captures = "/".join(sorted({row.capture for row in summary.ranks}))
    torch = summary.about.get("torch")
    lost = f"{summary.dropped:,} dropped" if summary.dropped else "none dropped"
    live = sum(not row.closed for row in summary.ranks)
    return (
        f"{captures}{f', torch {torch}' if isinstance(torch, str) else ''}; "
        f"{plural(summary.records, 'record')}, {lost}"
        + (f"; {plural(live, 'rank')} still running or killed" if live else "")
    )


def _collectives(summary: Summary, room: int) -> RenderableType:
    heads = (
        "op",
        "group",
        "size",
        "count",
        "bytes",
        "total",
        "median",
        "p95",
        "algbw",
        "busbw",
        "wait",
    )
    rows = [
        (
            row.op,
            row.group,
            size_name(row.bucket),
            f"{row.count:,}",
            size(row.bytes),
            time(row.total_ms),
            time(row.median_ms),
            time(row.p95_ms),
            rate(row.algbw_gbps),
            rate(row.busbw_gbps),
            percent(row.waiting_share),
        )
        for row in summary.collectives[:_ROWS]
    ]
    table = fitted(heads, rows, room, names=2)
    return _more(table, len(summary.collectives) - _ROWS, "row")


def _stragglers(summary: Summary, named: Sequence[int], room: int) -> RenderableType:
    wide = room >= _WIDE
    heads = ["rank", "host", "came last", "by", "caused waiting", "share"]
    shown = [
        straggler
        for place, straggler in enumerate(summary.stragglers[:_RANKS])
        if place < _FEW or straggler.share >= 0.01
    ]
    table = fitted(
        [*heads, "waited itself", ""] if wide else [*heads, ""],
        [_straggler(straggler, wide) for straggler in shown],
        room,
        names=2,
        marked=[place for place, straggler in enumerate(shown) if straggler.rank in named],
    )
    return _more(table, len(summary.stragglers) - len(shown), "rank")


def _straggler(straggler: Straggler, wide: bool) -> list[str]:
    last = percent(straggler.came_last / straggler.collectives) if straggler.collectives else "-"
    cells = [
        str(straggler.rank),
        straggler.host,
        last,
        time(straggler.late_by_ms),
        time(straggler.caused_wait_ms),
        percent(straggler.share),
    ]
    return [
        *cells,
        *([time(straggler.suffered_wait_ms)] if wide else []),
        "█" * round(10 * straggler.share),
    ]


def _joins(uneven: Sequence[RankSummary], room: int) -> RenderableType:
    heads = ("rank", "batches", "shadowed", "replayed", "time")
    shown = sorted(uneven, key=lambda total: -total.extra_s)[:_RANKS]
    rows = [
        (
            str(total.rank),
            f"{total.batches:,}",
            f"{total.shadowed:,}",
            f"{total.replayed:,}",
            time(total.extra_s * 1e3),
        )
        for total in shown
    ]
    return _more(fitted(heads, rows, room, names=1), len(uneven) - len(shown), "rank")


def _sites(summary: Summary, room: int) -> RenderableType:
    """Return the time by call site, with the source line if there is room for it."""
    shown = summary.call_sites[:_SITES]
    source = room >= _WIDE and any(row.code for row in shown)
    heads = (
        "call site",
        "function",
        "op",
        *(["source"] * source),
        "calls",
        "total",
        "median",
        "worst",
    )
    rows = [
        (
            _where(row),
            row.site.own.function,
            row.op,
            *([cut(clean(row.code), _SOURCE)] * source),
            f"{row.most_calls:,}",
            time(row.total_ms),
            time(row.median_ms),
            time(row.worst_ms),
        )
        for row in shown
    ]
    table = fitted(heads, rows, room, names=3 + source, paths=0)
    return _more(table, len(summary.call_sites) - _SITES, "call site")


def _where(row: SiteRow) -> str:
    """Write a line; a framework's beside it has no folder, because a table cuts paths in front."""
    site = row.site
    if site.user is not None:
        return f"{site.user} ({PurePath(str(site)).name})"
    return str(site) if site.line else "(not known)"


def _comm_share(summary: Summary, room: int) -> RenderableType:
    shares = sorted(
        (row.comm_share, row.rank) for row in summary.ranks if row.comm_share is not None
    )
    lines = [f"{percent(summary.comm_share)} of the run (median rank)"]
    if len(shares) > 1:
        (low, least), (high, most) = shares[0], shares[-1]
        lines[0] += f"; least {percent(low)} (rank {least}), most {percent(high)} (rank {most})"
    if summary.steps:
        slow = max(summary.steps, key=lambda step: step.ms)
        middle = sorted(step.share for step in summary.steps)[len(summary.steps) // 2]
        lines.append(
            f"{percent(middle)} of a step (median); "
            f"{percent(slow.share)} of the longest, step {slow.step:,}: {time(slow.ms)}"
        )
        count = plural(len(summary.steps), "step")
        lines.append(f"{spark(summary.steps, room - len(count) - 2)}  {count}")
    return Text("\n".join(lines))


def spark(steps: Sequence[StepShare], most: int) -> str:
    """Draw each step's share as a bar; many steps share one (their mean)."""
    count = max(1, min(len(steps), most))
    edges = [len(steps) * i // count for i in range(count + 1)]
    means = [sum(step.share for step in steps[a:b]) / (b - a) for a, b in pairwise(edges)]
    return "".join(_BARS[min(7, max(0, int(mean * 8)))] for mean in means)
