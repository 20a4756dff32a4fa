"""The first screen of the page in words: the verdict, and the items to look at; no markup."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rankcall.analysis.collectives import DIFFERS, OP_NAMES
from rankcall.analysis.details import Details
from rankcall.analysis.late_lines import LateLine
from rankcall.analysis.verdicts.facts import Fact, Relation
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.wording import begin_sentence, numbered
from rankcall.problems import ProblemKind, texts, without
from rankcall.ranks import with_noun
from rankcall.report.formatting import gap_text, line_names, percent, plural, time
from rankcall.report.headline import headline
from rankcall.report.html.curves import Curve, below_peers

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
    sure: str = ""  # how sure the finding is, unless it is certain


@dataclass(frozen=True)
class FirstScreen:
    """What the page begins with: one sentence and, if they apply, ranks, line and cost."""

    title: str
    detail: str
    alarm: bool
    who: tuple[str, str] | None = None
    # Lines: short, in words, and as they were recorded. First the culprits', then the others'.
    where: tuple[str, str, str] | None = None
    waiting: tuple[str, str, str] | None = None
    cost: tuple[str, str] | None = None


def verdict(details: Details, findings: Sequence[Finding] = ()) -> FirstScreen:
    """Return the cause that stopped the run, else the ranks that slow it, if any do."""
    if findings and findings[0].stops:
        return verdict_of_finding(findings[0])
    summary = details.summary
    first = headline(summary)
    if not first.alarm:
        return FirstScreen(first.text.removesuffix("."), first.detail, False)
    named = [straggler for straggler in summary.stragglers if straggler.rank in first.ranks]
    hosts = list(dict.fromkeys(straggler.host for straggler in named if straggler.host))
    ranks = with_noun(first.ranks)
    culprits = (ranks, "on " + ", ".join(hosts)) if hosts else (ranks, "")
    late = summary.late
    assert late is not None, "only stragglers alarm"
    others = max(1, len(summary.stragglers) - len(named))
    each_ms = sum(late.caused_s) * 1e3 / others
    cost = time(each_ms), f"{percent(late.cost)} of the run, lost by each other rank"
    makes = "makes" if len(named) == 1 else "make"
    on = f" on {hosts[0]}" if len(hosts) == 1 else ""
    title = f"{begin_sentence(ranks)}{on} {makes} the others wait"
    where = _where(details, findings, first.ranks)
    return FirstScreen(title, f"{first.text} {first.detail}", True, culprits, where, cost=cost)


def verdict_of_finding(finding: Finding) -> FirstScreen:
    """Return the verdict that one finding makes: the likeliest root cause of a hang."""
    culprits = None
    if finding.ranks:
        ranks = with_noun(finding.ranks)
        culprits = ranks, "on " + ", ".join(finding.hosts) if finding.hosts else ""
    where = waiting = None
    if finding.call_site:
        call = f"{numbered(finding.op, finding.seq)} of group {finding.group}" if finding.op else ""
        waiting = line_names(finding.call_site, finding.user_line), call, finding.shown_line
    if not (finding.ranks and finding.victims and finding.stops) or _wait_themselves(finding):
        where, waiting = waiting, None  # nobody else waits there
    place = finding.culprit_place
    if place is not None:
        where = _short(finding.culprit_line), _doing(place), finding.culprit_line
    details, cost = f"{finding.summary} {finding.advice}".strip(), _cost(finding)
    return FirstScreen(title_of(finding), details, True, culprits, where, waiting, cost)


def _wait_themselves(finding: Finding) -> bool:
    """Return whether the named ranks are in a finding's call, as those of a circle are."""
    return any(
        fact.relation is Relation.WAITS_FOR
        and fact.ranks is not None
        and set(finding.ranks).issuperset(fact.ranks.numbers)
        for fact in finding.facts
    )


def _cost(finding: Finding) -> tuple[str, str] | None:
    """Return how long others are held up, or what ranks that come late cost each of them."""
    if finding.since_s <= 0:
        return None
    share, whole = _makes_wait(finding), time(finding.since_s * 1e3)
    if share is not None:
        lost = time(share * finding.since_s * 1e3)
        return lost, f"{percent(share)} of {whole}, lost by each other rank"
    return whole, plural(len(finding.victims), "rank") + " held up" if finding.victims else ""


def _makes_wait(finding: Finding) -> float | None:
    """Return in which part of its time each other rank waits for the ranks of a finding."""
    for fact in finding.facts:
        if fact.relation is Relation.MAKES_WAIT and fact.number is not None:
            return fact.number / 100
    return None


def title_of(finding: Finding) -> str:
    """Write a finding in a few words: ``Rank 2 died``."""
    issued = [fact for fact in finding.facts if fact.relation is Relation.ISSUED]
    sides = [(fact.ranks, fact.call) for fact in issued if fact.ranks and fact.call]
    if len(sides) == 2 and sides[0][1].op != sides[1][1].op:
        (mine, call), (theirs, other) = sides
        return (
            f"{begin_sentence(with_noun(mine.numbers))} called {call.op} where "
            f"{with_noun(theirs.numbers)} called {other.op}"
        )
    return finding.predicate.title(finding.ranks)


def _doing(place: Fact) -> str:
    """Write what a culprit does at its line: its call, or the function that it is in."""
    if place.call is not None:
        return numbered(place.call.op, place.call.seq)
    function = place.value("function")
    return f"in {function}()" if function.isidentifier() else ""


def _short(line: str) -> str:
    """Write a line, or a user's line and a framework's, without their folders."""
    user, _, framework = line.removesuffix(")").partition(" (through ")
    return line_names(framework or user, user if framework else "")


def _where(
    details: Details, findings: Sequence[Finding], ranks: tuple[int, ...]
) -> tuple[str, str, str] | None:
    """Return the line at which ranks come late: the one that a diagnosis names, if there is one."""
    lines = [line for line in details.late_lines if line.rank in ranks and line.site.line]
    for finding in findings:
        if finding.ranks == ranks and finding.call_site and _makes_wait(finding) is not None:
            lines = [line for line in lines if line.site.shown == finding.shown_line]
            if not lines:
                return verdict_of_finding(finding).where
    if not lines:
        return None
    dearest = max(lines, key=lambda line: line.cost_ms)
    site = dearest.site
    return line_names(str(site), site.user_line), _before(dearest), site.shown


def _before(line: LateLine) -> str:
    function = line.site.own.function
    op = f"late to {line.op}" + (f" in {function}()" if function else "")
    if line.since is None or not line.since.line:
        return f"{op}: look at what it does before that"
    if line.since == line.site:
        return f"{op}: look at what it does between one and the next"
    since = line_names(str(line.since), line.since.user_line)
    return f"{op}: look at what it does after {since}"


def items(details: Details, curves: list[Curve], findings: Sequence[Finding] = ()) -> list[Item]:
    """Return the items to look at: findings, then high costs, then gaps in the evidence."""
    # A run that was stopped has no normal ends: the finding says why, and of whom.
    stopped = any(finding.stops for finding in findings)
    gaps = _gaps(details, ends=not stopped)
    late = [*_late(details), *_between(details)]
    return [*map(item_of_finding, findings), *late, *_slow(curves), *gaps]


def item_of_finding(finding: Finding) -> Item:
    """Return a finding with its evidence and advice."""
    sure = "" if finding.confidence == "certain" else finding.confidence
    evidence = "; ".join(line.rstrip(".") for line in finding.evidence)
    words = " ".join(filter(None, (evidence and f"{evidence}.", finding.advice)))
    where = finding.culprit_line or finding.shown_line
    return Item("alarm", finding.summary, words, where, sure)


def _late(details: Details) -> Iterator[Item]:
    shares = {straggler.rank: straggler for straggler in details.summary.stragglers}
    named = headline(details.summary).ranks
    for line in details.late_lines:
        if line.rank not in named or line.share < _WORTH_A_LINE:
            continue
        host = shares[line.rank].host
        yield Item(
            "alarm",
            f"Rank {line.rank}{f' ({host})' if host else ''} is {_before(line)}",
            f"Last {plural(line.times, 'time')} there: {time(line.cost_ms)} of waiting by all "
            f"the others together, {percent(line.share)} of what it cost by being last.",
            line.site.shown if line.site.line else "",
        )


def _between(details: Details) -> Iterator[Item]:
    """Yield where ranks that keep the others waiting spend their time."""
    for gap in details.summary.gaps:
        spent = f"{time(gap.total_ms)} in all, in no call"
        usual = f"; other ranks: {time(gap.usual_ms)} (median)" if gap.usual_ms is not None else ""
        where = f"{gap.after.shown} … {gap.before.shown}"
        title = begin_sentence(gap_text(gap).partition(";")[0])
        yield Item("note", title, f"{spent}{usual}.", where)


def _slow(curves: list[Curve]) -> Iterator[Item]:
    for slow in below_peers(curves):
        yield Item(
            "note",
            f"{slow.op} in group {slow.group} reaches {percent(slow.ratio)} of its peers' "
            "bandwidth",
            f"{slow.busbw:.3g} GB/s at {slow.size}, where {plural(slow.peers, 'other')} "
            f"reach {slow.expected:.3g} GB/s (median).",
        )


def _gaps(details: Details, *, ends: bool) -> Iterator[Item]:
    summary = details.summary
    unfinished = sum(row.unfinished for row in summary.collectives)
    if unfinished:
        which = [
            f"{'ops that differ' if row.op == OP_NAMES[DIFFERS] else row.op} in group {row.group}"
            for row in summary.collectives
            if row.unfinished
        ]
        more = f" and {len(which) - _MOST_OPS:,} more kinds" if len(which) > _MOST_OPS else ""
        yield Item(
            "note",
            f"{plural(unfinished, 'op')} never finished on any rank",
            f"{'; '.join(which[:_MOST_OPS])}{more}.",
        )
    if summary.missing_ranks:
        yield Item(
            "gap",
            f"No records of {with_noun(summary.missing_ranks)}",
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
            f"The clock of {', '.join(apart)} could not be compared with the others",
            "No collective links it to them: lateness across these hosts is not to be trusted.",
        )
    live = [row.rank for row in summary.ranks if not row.closed]
    if live and ends:
        yield Item(
            "gap",
            f"No normal end of {with_noun(live)}",
            "They still run, or ended without closing their records, as by a signal."
            if len(live) > 1
            else "It still runs, or ended without closing its records, as by a signal.",
        )
    for text in texts(without(summary.problems, ProblemKind.MISSING_RANKS)):
        yield Item("gap", text)
