"""Tables that fit: numbers are never cut, names are."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.table import Table
from rich.text import Text

from rankcall.report._format import clean

_LEAST = 6  # columns that a shortened name keeps


def cut(text: str, room: int, *, keep_end: bool = False) -> str:
    """Shorten a text to ``room`` columns; the end of a path says more than its beginning."""
    if cell_len(text) <= room:
        return text
    if not keep_end:
        return set_cell_size(text, max(0, room - 1)).rstrip() + "…"
    while text and cell_len(text) > room - 1:
        text = text[1:]
    return "…" + text


def listed(names: Sequence[str], room: int) -> str:
    """Write as many names as fit: ``node-0, node-1 and 30 more``."""
    names = [name or "?" for name in names]
    if cell_len(", ".join(names)) <= room:
        return ", ".join(names)
    shown = list(names)
    while len(shown) > 1:
        shown.pop()
        text = f"{', '.join(shown)} and {len(names) - len(shown):,} more"
        if cell_len(text) <= room:
            return text
    return cut(names[0], max(_LEAST, room - 12)) + (
        f" and {len(names) - 1:,} more" if len(names) > 1 else ""
    )


def fitted(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    room: int,
    *,
    names: int,
    paths: bool = False,
    marked: Sequence[int] = (),
    tight: bool = False,
) -> Table:
    """Make a table of at most ``room`` columns; the first ``names`` columns give way.

    Before that, numbers lose the space before their unit. The later of the names gives way first
    (``paths``: the first, from its beginning). An empty head
    makes a column of bars. Rows whose number is in ``marked`` stand out.
    """
    cells = [[clean(cell) for cell in row] for row in rows]
    widths = [
        max([cell_len(head), *(cell_len(row[i]) for row in cells)]) for i, head in enumerate(heads)
    ]
    over = sum(widths) + len(widths) - 1 - room
    if over > 0 and not tight:
        squeezed = [
            [*row[:names], *(cell.replace(" ", "") for cell in row[names:])] for row in rows
        ]
        return fitted(heads, squeezed, room, names=names, paths=paths, marked=marked, tight=True)
    for column in range(names) if paths else reversed(range(names)):
        spare = max(0, min(over, widths[column] - max(_LEAST, cell_len(heads[column]))))
        widths[column] -= spare
        over -= spare
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for index, head in enumerate(heads):
        left = index < names or not head
        table.add_column(head, justify="left" if left else "right", no_wrap=True)
    for number, row in enumerate(cells):
        texts = [
            Text(cut(cell, widths[i], keep_end=paths and i == 0) if i < names else cell)
            for i, cell in enumerate(row)
        ]
        table.add_row(*texts, style="bold red" if number in marked else None)
    return table
