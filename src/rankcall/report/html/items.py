"""The texts at the top of the page: the verdict, and the items to look at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from rankcall.analysis.details import Details
from rankcall.analysis.timing.lateness import LateLine
from rankcall.analysis.timing.summary import Summary, size_name
from rankcall.analysis.verdicts.finding import Finding, numbered
from rankcall.ranks import format_ranks
from rankcall.report.formatting import headline, line_names, percent, plural, time

MOST_CURVES = 240
_SLOW, _LEAST_PEERS, _LEAST_COUNT = 0.6, 3, 5
_MOST_OPS = 3
_WORTH_A_LINE = 0.1  # of the cost of one rank's late arrivals


@dataclass(frozen=True)
class Item:
    """One finding as the page shows it.

    ``tone``: ``alarm`` (act on it), ``note`` (know it) or ``gap`` (a reason to doubt the rest).
    """

    tone: str
    title: str
    text: str = ""
    where: str = ""  # file:line, as code


@dataclass(frozen=True)
class Verdict:
    """The first screen: one sentence and, if they apply, the ranks, the line and the cost."""

    title: str
    detail: str
    alarm: bool
    who: tuple[str, str] | None = None
    where: tuple[str, str, str] | None = None  # short, in words, and as it was recorded
    cost: tuple[str, str] | None = None


def verdict(details: Details, findings: Sequence[Finding] = ()) -> Verdict:
    """Return the cause that stopped the run, else the ranks that slow it, if any do."""
    if findings and findings[0].stops:
        return verdict_of_finding(findings[0])
    summary = details.summary
    first = headline(summary)
    if not first.alarm:
        return Verdict(first.text, first.detail, False)
    named = [each for each in summary.stragglers if each.rank in first.ranks]
    hosts = list(dict.fromkeys(each.host for each in named if each.host))
    ranks = plural(len(named), "rank").split(" ")[1] + f" {format_ranks(first.ranks)}"
    who = (ranks, "on " + ", ".join(hosts)) if hosts else (ranks, "")
    late = summary.late
    assert late is not None, "only stragglers alarm"
    others = max(1, len(summary.stragglers) - len(named))
    each_ms = sum(one.caused_wait_ms for one in named) / others
    cost = time(each_ms), f"{percent(late.cost)} of the run, lost by each other rank"
    makes = "makes" if len(named) == 1 else "make"
    on = f" on {hosts[0]}" if len(hosts) == 1 else ""
    title = f"{ranks[0].upper()}{ranks[1:]}{on} {makes} the others wait"
    where = _where(details, first.ranks)
    return Verdict(title, f"{first.text} {first.detail}", True, who, where, cost)


def verdict_of_finding(found: Finding) -> Verdict:
    """Return the verdict that one finding makes: the likeliest root cause of a hang."""
    who = None
    title = found.predicate
    if found.ranks:
        ranks = plural(len(found.ranks), "rank").split(" ")[1] + f" {format_ranks(found.ranks)}"
        who = ranks, "on " + ", ".join(found.hosts) if found.hosts else ""
        title = f"{ranks[0].upper()}{ranks[1:]} {title}"
    else:
        title = f"The ranks: {title}"
    where = None
    if found.call_site:
        call = f"{numbered(found.op, found.seq)} of group {found.group}" if found.op else ""
        where = (
            line_names(found.call_site, found.user_line),
            call,
            found.shown_line,
        )
    waiting = plural(len(found.victims), "rank") + " held up" if found.victims else ""
    cost = (time(found.since_s * 1e3), waiting) if found.since_s > 0 else None
    return Verdict(title, f"{found.summary} {found.advice}".strip(), True, who, where, cost)


def _where(details: Details, ranks: tuple[int, ...]) -> tuple[str, str, str] | None:
    lines = [line for line in details.late_lines if line.rank in ranks and line.site.line]
    if not lines:
        return None
    dearest = max(lines, key=lambda line: line.cost_ms)
    site = dearest.site
    return line_names(str(site), site.user_line), _before(dearest), site.shown


def _before(line: LateLine) -> str:
    function = line.site.own.function
    op = f"late to {line.op}" + (f" in {function}()" if function else "")
    if line.since is None or not line.since.line:
        return f"{op}: look at what it does before"
    if line.since == line.site:
        return f"{op}: look at what it does between one and the next"
    since = line_names(str(line.since), line.since.user_line)
    return f"{op}: look at what it does after {since}"


def items(details: Details, curves: list[Curve], findings: Sequence[Finding] = ()) -> list[Item]:
    """Return the items to look at: findings, then high costs, then gaps in the evidence."""
    return [*map(item_of_finding, findings), *_late(details), *_slow(curves), *_gaps(details)]


def item_of_finding(finding: Finding) -> Item:
    """Return a finding with its evidence and advice."""
    sure = "" if finding.confidence == "certain" else f" ({finding.confidence})"
    words = [*(f"{each.rstrip('.')}." for each in finding.evidence), finding.advice]
    return Item("alarm", finding.summary + sure, " ".join(filter(None, words)), finding.shown_line)


def _late(details: Details) -> Iterator[Item]:
    shares = {each.rank: each for each in details.summary.stragglers}
    named = headline(details.summary).ranks
    for line in details.late_lines:
        if line.rank not in named or line.share < _WORTH_A_LINE:
            continue
        host = shares[line.rank].host
        yield Item(
            "alarm",
            f"rank {line.rank}{f' ({host})' if host else ''} is {_before(line)}",
            f"Last {plural(line.times, 'time')} there: {time(line.cost_ms)} of waiting by all "
            f"the others together, {percent(line.share)} of what it cost by being last.",
            line.site.shown if line.site.line else "",
        )


def _slow(curves: list[Curve]) -> Iterator[Item]:
    for found in below_peers(curves):
        yield Item(
            "note",
            f"{found.op} in group {found.group} reaches {percent(found.ratio)} of its peers' "
            "bandwidth",
            f"{found.busbw:.3g} GB/s at {found.size}, where {plural(found.peers, 'other')} "
            f"reach {found.expected:.3g} GB/s (median).",
        )


def _gaps(details: Details) -> Iterator[Item]:
    summary = details.summary
    unfinished = sum(row.unfinished for row in summary.collectives)
    if unfinished:
        which = [f"{row.op} in group {row.group}" for row in summary.collectives if row.unfinished]
        more = f" and {len(which) - _MOST_OPS:,} more kinds" if len(which) > _MOST_OPS else ""
        yield Item(
            "note",
            f"{plural(unfinished, 'op')} never finished on any rank",
            f"{'; '.join(which[:_MOST_OPS])}{more}.",
        )
    if summary.missing_ranks:
        yield Item(
            "gap",
            f"no records of rank {format_ranks(summary.missing_ranks)}",
            "Bandwidth, waiting and traffic are of the others only.",
        )
    if summary.dropped:
        yield Item(
            "gap",
            f"{plural(summary.dropped, 'record')} had been overwritten before this was read",
            "The figures are of what was left; a larger RANKCALL_CAPACITY keeps more.",
        )
    apart = [clock.host for clock in summary.hosts if not clock.linked]
    if apart:
        yield Item(
            "gap",
            f"the clock of {', '.join(apart)} could not be compared with the others",
            "No collective links it to them: lateness across these hosts is not to be trusted.",
        )
    live = [row.rank for row in summary.ranks if not row.closed]
    if live:
        yield Item("gap", f"rank {format_ranks(live)}: still running, or killed")
    for problem in summary.problems:
        if "no ring for rank" not in problem:
            yield Item("gap", problem)


@dataclass(frozen=True)
class Point:
    """One size bucket: busbw in GB/s, from so many collectives."""

    bucket: int
    busbw: float
    count: int


@dataclass
class Curve:
    """One op in one group, by size. ``peers``: the median of other curves, if there are any.

    Peers are the same op in other groups of any size: busbw does not depend on the group's size
    while the same links carry it. Without such groups they are the group's other ops, and
    without those all others of the run.
    """

    op: str
    group: str
    points: list[Point]
    total_ms: float
    peers: list[Point] = field(default_factory=list)
    peers_are: str = ""
    same_op: bool = True  # the peers are the same op in other groups


@dataclass(frozen=True)
class BelowPeers:
    """A curve that stays far below its peers at one size."""

    op: str
    group: str
    size: str
    busbw: float
    expected: float
    peers: int
    ratio: float


def curves(summary: Summary) -> list[Curve]:
    """Return the curves, those that took most time first. Ops without bandwidth have no curve."""
    found: dict[tuple[str, str], Curve] = {}
    for row in summary.collectives:
        if row.busbw_gbps is None or row.busbw_gbps <= 0 or row.op == "send":
            continue
        curve = found.setdefault((row.op, row.group), Curve(row.op, row.group, [], 0.0))
        curve.points.append(Point(row.bucket, row.busbw_gbps, row.count))
        curve.total_ms += row.total_ms
    kept = sorted(found.values(), key=lambda curve: -curve.total_ms)[:MOST_CURVES]
    for curve in kept:
        curve.points.sort(key=lambda point: point.bucket)
    for curve in kept:
        _add_peers(curve, kept)
    return kept


def _add_peers(curve: Curve, kept: Sequence[Curve]) -> None:
    others = [each for each in kept if each is not curve]
    same = [each for each in others if each.op == curve.op]
    curve.peers_are, curve.same_op = f"{curve.op} in other groups", bool(same)
    if not same:
        same = [each for each in others if each.group == curve.group]
        curve.peers_are = f"other ops in group {curve.group}"
    if not same:
        same, curve.peers_are = others, "all other ops and groups"
    by_size: dict[int, list[Point]] = {}
    for each in same:
        for point in each.points:
            by_size.setdefault(point.bucket, []).append(point)
    curve.peers = [
        Point(bucket, median(point.busbw for point in points), len(points))
        for bucket, points in sorted(by_size.items())
    ]


def below_peers(found: Sequence[Curve]) -> list[BelowPeers]:
    """Find groups whose op is much slower than the same op elsewhere, at the size that shows most.

    At least three peers have to agree, each measured often enough.
    """
    slow = []
    for curve in found:
        if not curve.same_op:
            continue
        expected = {point.bucket: point for point in curve.peers}
        for point in curve.points:
            peers = expected.get(point.bucket)
            if peers is None or peers.count < _LEAST_PEERS or point.count < _LEAST_COUNT:
                continue
            ratio = point.busbw / peers.busbw
            if ratio < _SLOW:
                size = size_name(point.bucket)
                slow.append(
                    BelowPeers(
                        curve.op, curve.group, size, point.busbw, peers.busbw, peers.count, ratio
                    )
                )
    return sorted(slow, key=lambda each: each.ratio)[:3]
