"""The first sentence of a report: which ranks make the others wait, if any do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rankcall.analysis.stragglers import Stragglers
from rankcall.analysis.summary import LateArrivals, Summary
from rankcall.analysis.verdicts.reasons import advice_for
from rankcall.analysis.verdicts.sentences import reasons
from rankcall.analysis.verdicts.wording import begin_sentence
from rankcall.printable import clean
from rankcall.ranks import format_ranks
from rankcall.report.formatting import percent, plural, time

_MOST_NAMED = 3  # ranks, one by one
_MOST_OF_IT = 0.5  # of all waiting
_WORTH_IT = 0.01  # of the run: less waiting is not worth a sentence


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
        return Headline("A world of one rank: no other rank has to wait.", "", False)
    if not summary.sources.is_waiting_known:
        return Headline(
            "How long the ranks wait for each other is not known.",
            "The ops run on devices, later than the hosts issue them. With "
            "RANKCALL_DEVICE_TIMES=1, the devices' own times are recorded.",
            False,
        )
    lost = summary.waiting_share
    if summary.late is not None:
        return _blame(summary, summary.late)
    if summary.waiting_ms <= 0 or lost < _WORTH_IT:
        cost = f"Waiting cost each rank {percent(lost)} of the run."
        sources = summary.sources
        if sources.unknown > sources.host + sources.device:  # most ops may hide any waiting
            return Headline(
                "No rank is known to make the others wait.",
                f"{plural(sources.unknown, 'op')} ran on devices at times that are not known. With "
                "RANKCALL_DEVICE_TIMES=1, the devices' own times are recorded.",
                False,
            )
        return Headline("No rank makes the others wait.", cost, False)
    first = summary.stragglers[0]
    caused = f"{percent(first.share)} of {time(summary.waiting_ms)} of waiting"
    if (first.share or 0.0) >= _MOST_OF_IT:
        return Headline(
            f"The ranks wait for each other for {percent(lost)} of the run.",
            begin_sentence(_who(first)) + f" caused {caused}, but not for long or not steadily "
            "enough to call it a straggler.",
            False,
        )
    return Headline(
        f"The ranks wait for each other for {percent(lost)} of the run, "
        "and none of them stands out.",
        f"First is {_who(first)} with {caused}.",
        False,
    )


def _who(straggler: LateArrivals) -> str:
    return (
        f"rank {straggler.rank} ({clean(straggler.host)})"
        if straggler.host
        else f"rank {straggler.rank}"
    )


def _blame(summary: Summary, late: Stragglers) -> Headline:
    """Name the ranks that make the others wait, and what that costs.

    All figures are of the time without a slow start, as those of a diagnosis are.
    """
    named = [straggler for straggler in summary.stragglers if straggler.rank in late.ranks]
    caused_s = dict(zip(late.ranks, late.caused_s, strict=True))
    whole_s = sum(late.caused_s) / late.share
    after = f" after the first {time(summary.slow_start_ms)}" if summary.slow_start_ms else ""

    def caused(ranks: Sequence[int]) -> str:
        theirs_s = sum(caused_s[rank] for rank in ranks)
        share = percent(theirs_s / whole_s)
        return f"caused {time(theirs_s * 1e3)} of waiting, {share} of all{after}."

    total = caused(late.ranks)
    if late.host:
        text = (
            f"Host {clean(late.host)} is late as a whole: its {plural(len(named), 'rank')} "
            f"({format_ranks(late.ranks)}) {total}"
        )
    else:
        text = " ".join(
            begin_sentence(f"{_who(straggler)} {_last(straggler)}{caused([straggler.rank])}")
            for straggler in named[:_MOST_NAMED]
        )
        if len(named) > _MOST_NAMED:
            text += f" Ranks {format_ranks(late.ranks)} together {total}"
    pronoun = "it" if len(named) == 1 else "them"
    detail = f"Waiting for {pronoun} cost each other rank {percent(late.cost)} of the run."
    if summary.slow_start_ms:
        detail += (
            f" The first {time(summary.slow_start_ms)}, in which steps took far longer, "
            "is left out."
        )
    if summary.late_because:
        why = reasons(summary.late_because, live=False)
        detail += f" {why} {advice_for(summary.late_because)}"
    elif late.host:
        detail += " Look at what they share: its network, its disk, its clock speed, its data."
    return Headline(text, detail, True, late.ranks)


def _last(straggler: LateArrivals) -> str:
    if not straggler.came_last:
        return ""
    share = percent(straggler.came_last / straggler.collectives)
    return f"came last in {share} of {plural(straggler.collectives, 'collective')} and "
