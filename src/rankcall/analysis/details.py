"""What a page can show beyond the summary: pictures over time, by rank and by host."""

from __future__ import annotations

from dataclasses import dataclass

from rankcall.analysis.timing.gather import gather
from rankcall.analysis.timing.lateness import Lateness, lateness
from rankcall.analysis.timing.lines import LateLine, late_lines
from rankcall.analysis.timing.split import RankSplit, split
from rankcall.analysis.timing.summary import Summary, conclude
from rankcall.analysis.timing.traffic import Traffic, traffic
from rankcall.run import Progress, Run

_SUSPECTS = 3


@dataclass(frozen=True)
class Details:
    """A summary and the figures behind it."""

    summary: Summary
    splits: list[RankSplit]
    lateness: Lateness
    late_lines: list[LateLine]  # of the ranks that caused most waiting, by rank
    traffic: Traffic


def detail(run: Run, progress: Progress | None = None) -> Details:
    """Read all rings of a run once and analyse them in depth (``summarise`` is part of it)."""
    gathered = gather(run, progress)
    splits, late = split(gathered), lateness(gathered)
    sent = traffic(gathered, run.hosts)
    summary = conclude(run, gathered)
    suspects = [each.rank for each in summary.stragglers[:_SUSPECTS] if each.came_last]
    return Details(summary, splits, late, late_lines(run, late.lasts, suspects), sent)
