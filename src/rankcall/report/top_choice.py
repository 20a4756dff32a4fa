"""What a user of ``top`` chose: an order of the rows, a filter, a row, and whose stack to show.

The keys are htop's, as far as it has them: ``<``, ``>`` and F6 choose the column to sort by, ``I``
turns the order round, ``/`` and F4 filter, the arrows choose a row, and ``+`` unfolds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rankcall.analysis.verdicts.verdict import Verdict
from rankcall.report.standing import line_cell
from rankcall.report.top_lines import Line, cells, lines_of

HELP = (
    ("up, down, page up, page down, home, end", "choose a row"),
    ("enter or s", "show the stack of the row's first rank; again: hide it"),
    ("< > or F6", "sort by the column before or after"),
    ("I", "turn the order round"),
    ("/ or F4", "show only rows with a text; enter keeps it, escape drops it"),
    ("+ and -", "one row for each rank; ranks at the same line in one row"),
    ("h, ? or F1", "show or hide this help"),
    ("q or Ctrl-C", "leave; the job goes on"),
)
_PAGE = 10
# What rows are sorted by, in the order of the columns; the first is the order without a choice.
_ORDERS: dict[str, Callable[[Verdict, Line], object]] = {
    "": lambda verdict, line: 0,
    "ranks": lambda verdict, line: line.places[0].rank,
    "state": lambda verdict, line: line.places[0].shown_state,
    "call": lambda verdict, line: (line.places[0].op, line.places[0].seq),
    "line": lambda verdict, line: line_cell(verdict, line.places[0]),
    "for": lambda verdict, line: -line.longest,
}
_MOVES = {"up": -1, "down": 1, "page up": -_PAGE, "page down": _PAGE}


@dataclass(frozen=True)
class Choice:
    """What the user chose.

    ``rank``: the first rank of the row that is chosen, so that the choice follows the rank when
    rows change; None: no row. ``typing``: keys go into ``only``, the text that rows must have.
    """

    order: str = ""
    backwards: bool = False
    only: str = ""
    typing: bool = False
    apart: bool = False
    rank: int | None = None
    stack: bool = False
    help: bool = False

    def lines(self, verdict: Verdict) -> list[Line]:
        """Return the rows in the chosen order, without those that the filter leaves out."""
        lines = lines_of(verdict)
        if self.apart:
            lines = [Line((place,), line.named) for line in lines for place in line.places]
        if self.only:
            lines = [line for line in lines if self._shows(verdict, line)]
        if self.order:
            lines = sorted(lines, key=lambda line: _ORDERS[self.order](verdict, line))  # type: ignore[arg-type,return-value]
        return lines[::-1] if self.backwards else lines

    def _shows(self, verdict: Verdict, line: Line) -> bool:
        hosts = {place.process.host for place in line.places}
        text = " ".join([*cells(verdict, line, len(verdict.ranks)), *hosts])
        return self.only.casefold() in text.casefold()

    def at(self, lines: Sequence[Line]) -> int | None:
        """Return the index of the chosen row; None if no row is chosen or shown."""
        for index, line in enumerate(lines):
            if any(place.rank == self.rank for place in line.places):
                return index
        return None

    def press(self, key: str, verdict: Verdict) -> Choice:
        """Return what is chosen after a key. Keys without a meaning change nothing."""
        if self.typing:
            return self._type(key)
        lines = self.lines(verdict)
        if key in _MOVES or key in ("home", "end"):
            return self._move(key, lines)
        orders = list(_ORDERS)
        at = orders.index(self.order)
        changes: dict[str, Callable[[], Choice]] = {
            ">": lambda: replace(self, order=orders[(at + 1) % len(orders)]),
            "F6": lambda: replace(self, order=orders[(at + 1) % len(orders)]),
            "<": lambda: replace(self, order=orders[at - 1]),
            "I": lambda: replace(self, backwards=not self.backwards),
            "/": lambda: replace(self, typing=True),
            "F4": lambda: replace(self, typing=True),
            "+": lambda: replace(self, apart=True),
            "-": lambda: replace(self, apart=False),
            "escape": lambda: replace(self, only="", stack=False, help=False),
            **dict.fromkeys(("h", "?", "F1"), lambda: replace(self, help=not self.help)),
            **dict.fromkeys(("s", "enter"), lambda: self._show_stack(lines)),
        }
        return changes.get(key, lambda: self)()

    def _type(self, key: str) -> Choice:
        if key in ("enter", "escape"):
            return replace(self, typing=False, only=self.only if key == "enter" else "")
        if key == "backspace":
            return replace(self, only=self.only[:-1])
        return replace(self, only=self.only + key) if len(key) == 1 else self

    def _move(self, key: str, lines: Sequence[Line]) -> Choice:
        if not lines:
            return self
        at = self.at(lines)
        if key in ("home", "end"):
            index = 0 if key == "home" else len(lines) - 1
        else:
            # The first move chooses the first row, or the last one.
            start = at if at is not None else (-1 if _MOVES[key] > 0 else len(lines))
            index = min(max(start + _MOVES[key], 0), len(lines) - 1)
        return replace(self, rank=lines[index].places[0].rank)

    def _show_stack(self, lines: Sequence[Line]) -> Choice:
        if self.stack:
            return replace(self, stack=False)
        at = self.at(lines)
        if at is None and not lines:
            return self
        return replace(self, stack=True, rank=lines[at or 0].places[0].rank)
