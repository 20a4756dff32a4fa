"""The first sentence of a report: which ranks make the others wait, if any do."""

from __future__ import annotations

from dataclasses import dataclass

from rankcall.analysis.timing.summary import Straggler, Summary
from rankcall.report._format import clean, percent, plural, time
from rankcall.run import format_ranks

# A straggler is named if it causes this share of all waiting, and one and a half times its
# fair part, and if waiting costs the ranks at least this share of the run.
_NAMED_SHARE = 0.2
_TIMES_FAIR = 1.5
_WORTH_IT = 0.01
_MOST_NAMED = 3


@dataclass(frozen=True)
class Headline:
    """``text`` names the cause, ``detail`` its cost. ``alarm``: the user should act on it."""

    text: str
    detail: str
    alarm: bool
    ranks: tuple[int, ...] = ()


def headline(summary: Summary) -> Headline:
    """Return the most important sentence about a run."""
    if not summary.collectives:
        return Headline(
            "No collectives were recorded.",
            "Either the job issued none, or recording was not armed in its workers.",
            False,
        )
    if summary.world_size == 1:
        return Headline("A world of one rank: there is nobody to wait for.", "", False)
    lost = _lost_share(summary)
    if summary.waiting_ms <= 0 or lost < _WORTH_IT:
        cost = f"Waiting cost each rank {percent(lost)} of the run."
        return Headline("No rank makes the others wait.", cost, False)
    named = _named(summary)
    if named:
        return _blame(summary, named)
    return _blame_host(summary) or Headline(
        f"The ranks wait for each other for {percent(lost)} of the run, "
        "and no one of them stands out.",
        f"First is {_who(summary.stragglers[0])} with {percent(summary.stragglers[0].share)} "
        f"of {time(summary.waiting_ms)} of waiting.",
        False,
    )


def _lost_share(summary: Summary) -> float:
    """Return the share of the run that a rank waits, on average."""
    ranks = max(1, len(summary.stragglers))
    return summary.waiting_ms / ranks / summary.duration_ms if summary.duration_ms else 0.0


def _named(summary: Summary) -> list[Straggler]:
    least = max(_NAMED_SHARE, _TIMES_FAIR / max(1, len(summary.stragglers)))
    return [each for each in summary.stragglers if each.share >= least][:_MOST_NAMED]


def _who(each: Straggler) -> str:
    return f"rank {each.rank} ({clean(each.host)})" if each.host else f"rank {each.rank}"


def _blame(summary: Summary, named: list[Straggler]) -> Headline:
    said = []
    for each in named:
        last = (
            f"came last in {percent(each.came_last / each.collectives)} of "
            f"{plural(each.collectives, 'collective')} and "
            if each.came_last
            else ""
        )
        said.append(
            f"{_who(each)} {last}caused {time(each.caused_wait_ms)} of waiting, "
            f"{percent(each.share)} of all."
        )
    text = " ".join(line[0].upper() + line[1:] for line in said)
    others = max(1, len(summary.stragglers) - len(named))
    each_ms = sum(one.caused_wait_ms for one in named) / others
    whom = "it" if len(named) == 1 else "them"
    detail = (
        f"Each other rank waited {time(each_ms)} for {whom} on average, "
        f"{percent(min(1.0, each_ms / summary.duration_ms))} of the run."
    )
    return Headline(text, detail, True, tuple(each.rank for each in named))


def _blame_host(summary: Summary) -> Headline | None:
    """Name a host whose ranks are late together."""
    by_host: dict[str, list[Straggler]] = {}
    for each in summary.stragglers:
        by_host.setdefault(each.host, []).append(each)
    host, ranks = max(by_host.items(), key=lambda item: sum(each.share for each in item[1]))
    share = sum(each.share for each in ranks)
    fair = len(ranks) / len(summary.stragglers)
    if len(by_host) < 2 or not host or share < max(0.5, _TIMES_FAIR * fair):
        return None
    numbers = tuple(sorted(each.rank for each in ranks))
    caused = sum(each.caused_wait_ms for each in ranks)
    return Headline(
        f"Host {clean(host)} is late as a whole: its {plural(len(ranks), 'rank')} "
        f"({format_ranks(numbers)}) caused {time(caused)} of waiting, {percent(share)} of all.",
        "Look at what they share: its network, its disk, its clock speed, its data.",
        True,
        numbers,
    )
