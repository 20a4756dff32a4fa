"""Where every rank stands, on the live page: a grid of ranks, and a table of lines.

The grid has its ranks by host or, if a viewer asks for it, by another fold of the job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rankcall.analysis.folds import Fold, folds_of
from rankcall.analysis.snapshot import END_UNKNOWN, RankPosition
from rankcall.analysis.verdicts.diagnosis import Diagnosis
from rankcall.analysis.verdicts.verdict import Verdict
from rankcall.printable import clean
from rankcall.report.formatting import plural
from rankcall.report.standing import shortened_ranks
from rankcall.report.top_lines import Line, cells

_MOST_CELLS = 2048  # with more ranks, a cell is a row of the fold
_MOST_PLACES = 24  # rows of the table
_SILENT_S = 5.0  # ten heartbeats: a busy machine can delay a few

# How a rank stands, the worst first: key and words.
STANDINGS = {
    "culprit": "named by the verdict",
    "gone": "gone",
    "stopped": "stopped",
    "silent": "silent",
    "unknown": "no records",
    "call": "in a call",
    "issued": "issued, end unknown",
    "code": "in no call",
    "ended": "ended",
}
_ORDER = {name: number for number, name in enumerate(STANDINGS)}


@dataclass(frozen=True)
class Cell:
    """A rank, or a row of ranks, in the grid. ``place``: its row in the table; -1: none."""

    label: str
    standing: str
    place: int = -1


@dataclass(frozen=True)
class Cells:
    """The ranks of one row of a fold."""

    name: str
    cells: tuple[Cell, ...]


def folds(diagnosis: Diagnosis) -> list[Fold]:
    """Return how the grid can be folded: by host, and as parallel dimensions divide the ranks."""
    host_of = {
        position.rank: clean(position.process.host) or "host not known"
        for position in diagnosis.ranks
    }
    hosts, *others = folds_of(host_of, diagnosis.snapshot.groups)
    most = min(len(host_of) // 2, _MOST_CELLS)
    return [hosts, *(fold for fold in others if len(fold.names) <= most)]


def grid(verdict: Verdict, lines: Sequence[Line], ways: Sequence[Fold], by: Fold) -> dict[str, Any]:
    """Return a cell for each rank by the rows of a fold or, of a large job, one for each row.

    Args:
        verdict: What is known of the job.
        lines: The rows of the table.
        ways: The folds that a viewer can choose.
        by: The fold that is shown.
    """
    place_of = {place.rank: n for n, line in enumerate(lines) for place in line.places}
    culprits = verdict.culprits
    standings = [_standing(position, culprits) for position in verdict.ranks]
    rows: list[list[Cell]] = [[] for _ in range(len(by.names) + 1)]
    for position, standing in zip(verdict.ranks, standings, strict=True):
        cell = Cell(str(position.rank), standing, place_of.get(position.rank, -1))
        rows[by.row_of.get(position.rank, -1)].append(cell)
    names = [*map(clean, by.names), "in none of them"]
    shown = [Cells(name, tuple(row)) for name, row in zip(names, rows, strict=True) if row]
    is_large = len(standings) > _MOST_CELLS
    if is_large:
        shown = [Cells("", tuple(map(_cell_of_row, shown)))]
    counts = Counter(standings)
    return {
        "rows": shown,
        "ways": [way.title for way in ways],
        "by": by.title,
        "of_rows": is_large,
        "large": len(standings) <= 64,
        "key": [(name, STANDINGS[name], counts[name]) for name in STANDINGS if counts[name]],
        "places": [_tip(line, verdict) for line in lines[:_MOST_CELLS]],
    }


def _standing(position: RankPosition, culprits: set[int]) -> str:
    state = position.process
    if state.rank in culprits:
        return "culprit"
    if state.blind:
        return "unknown"
    if state.closed or state.exit == 0:
        return "ended"
    if state.state == "gone" or state.exit is not None:
        return "gone"
    if state.state == "stopped":
        return "stopped"
    if state.mute_s > _SILENT_S:
        return "silent"
    if position.how == END_UNKNOWN:
        return "issued"
    return "call" if position.in_call else "code"


def _cell_of_row(row: Cells) -> Cell:
    """Return one cell for the ranks of a row: as the worst of them stands."""
    worst = min(row.cells, key=lambda cell: _ORDER[cell.standing])
    count = sum(cell.standing == worst.standing for cell in row.cells)
    label = f"{row.name}: {count} of {plural(len(row.cells), 'rank')} {STANDINGS[worst.standing]}"
    return Cell(label, worst.standing, worst.place)


def _tip(line: Line, verdict: Verdict) -> str:
    """Return what the tip of a rank says, after the rank's number and host."""
    cells = _row(line, verdict)
    where = f" at {cells['line']}" if cells["line"] else ""
    return ", ".join(filter(None, (cells["state"], f"{cells['call']}{where}")))


def _row(line: Line, verdict: Verdict) -> dict[str, str]:
    total = max(1, len(verdict.ranks))
    _, _, state, call, name, age = cells(verdict, line, total)
    return {
        "state": clean(state),
        "call": clean(call),
        "line": clean(name),
        "site": clean(verdict.stands_at(line.places[0]) or line.places[0].shown_line),
        "age": age,
    }


def places(verdict: Verdict, lines: Sequence[Line]) -> dict[str, Any]:
    """Return the table of the lines at which ranks are: culprits first, then the many."""
    total = max(1, len(verdict.ranks))
    rows = [
        {
            **_row(line, verdict),
            "ranks": shortened_ranks([place.rank for place in line.places]),
            "count": len(line.places),
            "share": len(line.places) / total,
            "named": line.named,
        }
        for line in lines[:_MOST_PLACES]
    ]
    rest = sum(len(line.places) for line in lines[_MOST_PLACES:])
    more = f"and {plural(rest, 'more rank')} at other lines" if rest else ""
    return {"rows": rows, "more": more}
