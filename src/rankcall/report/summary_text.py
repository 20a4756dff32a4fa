"""A summary or a diagnosis for a terminal of 80 columns or more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import PurePath

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from rankcall.analysis.call_sites import SiteRow
from rankcall.analysis.recoveries import PHASES, Carried
from rankcall.analysis.run_tables import StepShare
from rankcall.analysis.summary import LateArrivals, Summary, size_name
from rankcall.analysis.verdicts.finding import Finding
from rankcall.printable import clean
from rankcall.ranks import format_ranks, with_noun
from rankcall.report.attempts_line import bar, in_words
from rankcall.report.fitting import cut, fitted, listed
from rankcall.report.formatting import (
    INDENT,
    as_text,
    gap_text,
    percent,
    plural,
    rate,
    size,
    time,
    wrapped,
)
from rankcall.report.headline import Headline, headline
from rankcall.report.node_checks import lines_of
from rankcall.report.stack_lines import stack_lines
from rankcall.report.time_sources import times_of_ops
from rankcall.run.joins import RankSummary, total_by_rank

_ROWS, _SITES, _RANKS, _GROUPS = 20, 8, 8, 4
_FEW = 4  # ranks that are listed however little they matter
_BARS = "▁▂▃▄▅▆▇█"
_WIDE = 100  # columns from which on there is room for more
_SOURCE = 40  # columns for a source line
_MORE = "Where each rank stands: rankcall diagnose."
_LABEL = 9


def render(
    summary: Summary,
    width: int = 80,
    findings: Sequence[Finding] = (),
    stacks: Mapping[int, str] | None = None,
) -> str:
    """Return the report as plain text, no line of it wider than ``width``."""
    return as_text(lambda console: show(summary, console, findings, stacks), width)


def show(
    summary: Summary,
    console: Console,
    findings: Sequence[Finding] = (),
    stacks: Mapping[int, str] | None = None,
) -> None:
    """Print the report; ``console`` decides on width and colour.

    ``findings`` say why the run stopped, or why its results are wrong. The first is printed first,
    and then the ``stacks``, by rank, that the job's own watcher kept beside its verdict.
    """
    first = headline(summary)
    if findings:
        likeliest = findings[0]
        console.print(Text(wrapped(clean(likeliest.summary), console.width), "bold red"))
        console.print(Text(wrapped(clean(f"{likeliest.advice} {_MORE}".strip()), console.width)))
        if len(findings) > 1:
            console.print(Text(f"There {_are(len(findings) - 1)} beside it.", "dim"))
        _print_stacks(stacks or {}, console)
        console.print()
        ended = all(row.closed for row in summary.ranks)
        if not ended or any(row.unfinished for row in summary.collectives):
            console.print(Text("Until then", "bold"))
    text = wrapped(first.text, console.width)
    console.print(Text(text, "bold red" if first.alarm else "bold green"))
    if first.detail:
        console.print(Text(wrapped(first.detail, console.width)))
    stopped = any(finding.stops for finding in findings)
    for title, body in _sections(summary, first, console.width - INDENT, stopped=stopped):
        console.print()
        console.print(Text(title, "bold"))
        console.print(Padding(body, (0, 0, 0, INDENT)))


def _print_stacks(stacks: Mapping[int, str], console: Console) -> None:
    if not stacks:
        return
    title, *lines = stack_lines(stacks)
    console.print()
    console.print(Text(f"{title}, when the job's own watcher looked", "bold"))
    for line in lines:
        console.print(Text(line, overflow="fold"))


def _are(count: int) -> str:
    return "is 1 more finding" if count == 1 else f"are {count:,} more findings"


def _sections(
    summary: Summary, first: Headline, room: int, *, stopped: bool
) -> Iterator[tuple[str, RenderableType]]:
    yield "What ran where", _facts(summary, room, stopped=stopped)
    attempts = summary.carried.attempts
    if len(attempts.attempts) > 1:
        line = Text(f"{bar(attempts, room)}\n{cut(in_words(attempts), room)}")
        yield "All attempts (pale: nothing went on)", line
    if summary.carried.recoveries:
        yield "Recoveries, and where the time of each went", _recoveries(summary.carried, room)
    if summary.carried.checked:
        lines = lines_of(summary.carried.checked)
        text = "\n".join(wrapped(line, room) for line in lines[:_ROWS])
        shown = _more(Text(text), len(lines) - _ROWS, "line")
        yield "How the nodes were when they were checked", shown
    if not summary.collectives:
        return
    yield (
        "By op, group and size (the busiest rank's time; bandwidth in GB/s)",
        _collectives(summary, room),
    )
    if len(summary.stragglers) > 1 and summary.sources.is_waiting_known:
        yield "Who kept the others waiting", _stragglers(summary, first.ranks, room)
    elif len(summary.stragglers) > 1:
        yield "Issue skew: whose host issued last (its device may be early)", _skew(summary, room)
    uneven = [total for total in total_by_rank(summary.joins) if total.shadowed or total.replayed]
    if uneven:
        yield "Uneven inputs (Join): steps without a batch of one's own", _joins(uneven, room)
    yield "Slowest call sites (the busiest rank's time)", _sites(summary, room)
    if summary.comm_share is not None:
        yield "Time in communication", _comm_share(summary, room)


def _more(body: RenderableType, left: int, what: str) -> RenderableType:
    """Say how much of a long list is not shown."""
    if left <= 0:
        return body
    return Group(body, Text(f"and {plural(left, 'more ' + what)} (--json has all)", "dim"))


def _facts(summary: Summary, room: int, *, stopped: bool) -> RenderableType:
    lines = [
        Text.assemble((name.ljust(_LABEL), "dim"), cut(clean(text), room - _LABEL))
        for name, text in _fact_lines(summary, room - _LABEL, stopped=stopped)
    ]
    return Text("\n").join(lines)


def _fact_lines(summary: Summary, room: int, *, stopped: bool) -> Iterator[tuple[str, str]]:
    yield "run", PurePath(summary.path).name
    numbers = {row.rank for row in summary.ranks}
    hosts = list(dict.fromkeys(row.host for row in summary.ranks))
    world = "" if not summary.missing_ranks else f" of {summary.world_size:,}"
    start = f"{len(numbers):,}{world} on {plural(len(hosts), 'host')}: "
    yield "ranks", start + listed(hosts, room - len(start))
    if summary.missing_ranks:
        yield "missing", f"no records of {with_noun(summary.missing_ranks)}"
    for group in summary.groups[:_GROUPS]:
        known = group.group
        details = ", ".join(text for text in (known.description, known.backend) if text)
        where = ", across hosts" if group.cross_host else ""
        start = f"{group.label} ({details}): {plural(len(known.ranks), 'rank')}{where}: "
        yield "group", start + cut(format_ranks(known.ranks), max(8, room - len(start)))
    if len(summary.groups) > _GROUPS:
        yield "", f"and {len(summary.groups) - _GROUPS:,} more groups"
    yield "time", _when(summary)
    if source := times_of_ops(summary.sources):
        yield "times", source
    yield "capture", _capture(summary, stopped=stopped)


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


def _capture(summary: Summary, *, stopped: bool) -> str:
    captures = "/".join(sorted({row.capture for row in summary.ranks}))
    torch = summary.about.get("torch")
    lost = f"{summary.dropped:,} dropped" if summary.dropped else "none dropped"
    # A run that was stopped has no normal ends: the finding above says why, and of whom.
    live = 0 if stopped else sum(not row.closed for row in summary.ranks)
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
        if place < _FEW or (straggler.share or 0.0) >= 0.01
    ]
    table = fitted(
        [*heads, "waited itself", ""] if wide else [*heads, ""],
        [_straggler(straggler, wide) for straggler in shown],
        room,
        names=2,
        marked=[place for place, straggler in enumerate(shown) if straggler.rank in named],
    )
    body = _more(table, len(summary.stragglers) - len(shown), "rank")
    if not summary.gaps:
        return body
    lines = [wrapped(clean(gap_text(gap)), room) for gap in summary.gaps]
    return Group(body, Text("In no call (median):", "dim"), Text("\n".join(lines)))


def _straggler(straggler: LateArrivals, wide: bool) -> list[str]:
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
        "█" * round(10 * (straggler.share or 0.0)),
    ]


def _skew(summary: Summary, room: int) -> RenderableType:
    shown = sorted(summary.stragglers, key=lambda straggler: -straggler.issued_last)[:_RANKS]
    rows = [
        (
            str(straggler.rank),
            straggler.host,
            percent(straggler.issued_last / straggler.issued) if straggler.issued else "-",
            time(straggler.issued_late_by_ms),
        )
        for straggler in shown
    ]
    table = fitted(("rank", "host", "issued last", "by"), rows, room, names=2)
    return _more(table, len(summary.stragglers) - len(shown), "rank")


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


def _recoveries(carried: Carried, room: int) -> RenderableType:
    """Return the recoveries, the newest last, and the share of time that brought the job on."""
    heads = ("after", "step", *PHASES, "in all")
    shown = carried.recoveries[-_ROWS:]
    rows = [
        (
            clean(recovery.end.signature.kind),
            f"{recovery.end.step:,}" if recovery.end.step >= 0 else "-",
            *(_seconds(seconds) for seconds in recovery.phases_s),
            _seconds(recovery.down_s),
        )
        for recovery in shown
    ]
    notes = []
    if len(shown) < len(carried.recoveries):
        notes.append(f"{len(carried.recoveries) - len(shown):,} earlier ones: --json has all.")
    if carried.goodput is not None:
        notes.append(f"{percent(carried.goodput)} of the job's time brought it forward (goodput).")
    table = fitted(heads, rows, room, names=1)
    return Group(table, *(Text(note, "dim") for note in notes))


def _seconds(seconds: float | None) -> str:
    return time(None if seconds is None else seconds * 1e3)


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
    lines = [f"{percent(summary.comm_share)} of all ranks' time"]
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
