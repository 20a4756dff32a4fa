"""The rows of ``top``, and the live page's: ranks at the same line together."""

from __future__ import annotations

from dataclasses import dataclass

from rankcall.analysis.snapshot import RankPosition
from rankcall.analysis.verdicts.verdict import Verdict
from rankcall.analysis.verdicts.wording import duration, numbered
from rankcall.report.standing import line_cell, no_call, ranks_cell, with_verb

_BAR = 12
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
