"""Where every rank stands, on the live page: a grid of ranks or hosts, and a table of lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rankcall.analysis.snapshot import END_UNKNOWN, RankPosition
from rankcall.analysis.verdicts.verdict import Verdict
from rankcall.printable import clean
from rankcall.report.formatting import plural
from rankcall.report.standing import shortened_ranks
from rankcall.report.top_lines import Line, cells

_MOST_RANK_CELLS = 2048  # with more ranks, a cell is a host
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
    """A rank, or a host, in the grid. ``place``: the index of its row in the table; -1: none."""

    label: str
    standing: str
    place: int = -1


@dataclass(frozen=True)
class HostCells:
    """The cells of one host."""

    host: str
    cells: tuple[Cell, ...]


def grid(verdict: Verdict, lines: Sequence[Line]) -> dict[str, Any]:
    """Return a cell for each rank, or for each host of a large job, by host."""
    place_of = {place.rank: n for n, line in enumerate(lines) for place in line.places}
    culprits = verdict.culprits
    standings = [_standing(position, culprits) for position in verdict.ranks]
    by_host: dict[str, list[Cell]] = {}
    for position, standing in zip(verdict.ranks, standings, strict=True):
        cell = Cell(str(position.rank), standing, place_of.get(position.rank, -1))
        by_host.setdefault(clean(position.process.host) or "host not known", []).append(cell)
    hosts = [HostCells(host, tuple(cells)) for host, cells in by_host.items()]
    if len(standings) > _MOST_RANK_CELLS:
        hosts = [HostCells("", tuple(map(_host_cell, hosts)))]
    counts = Counter(standings)
    return {
        "hosts": hosts,
        "of_hosts": len(standings) > _MOST_RANK_CELLS,
        "large": len(standings) <= 64,
        "key": [(name, STANDINGS[name], counts[name]) for name in STANDINGS if counts[name]],
        "places": [_tip(line, verdict) for line in lines[:_MOST_RANK_CELLS]],
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


def _host_cell(host: HostCells) -> Cell:
    """Return one cell for a host: as the worst of its ranks stands."""
    worst = min(host.cells, key=lambda cell: _ORDER[cell.standing])
    count = sum(cell.standing == worst.standing for cell in host.cells)
    label = f"{host.host}: {count} of {plural(len(host.cells), 'rank')} {STANDINGS[worst.standing]}"
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
