"""Names and tables that fit into the width of a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.table import Table
from rich.text import Text

from rankcall.printable import clean

_LEAST = 6  # columns that a shortened name keeps: fewer would tell no name from another


def cut(text: str, room: int) -> str:
    """Shorten a text to ``room`` characters."""
    if cell_len(text) <= room:
        return text
    return set_cell_size(text, max(0, room - 1)).rstrip() + "…"


def cut_path(path: str, room: int) -> str:
    """Leave out the first directories of a path, until it fits. Its file name is never cut."""
    left, short = path, path
    while cell_len(short) > room and "/" in left:
        left = left.split("/", 1)[1]
        short = f"…/{left}" if "/" in left else left
    return short


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
    paths: int | None = None,
    marked: Sequence[int] = (),
    tight: bool = False,
) -> Table:
    """Make a table that is at most ``room`` characters wide. Numbers are never cut, names are.

    If the table is too wide, numbers lose the space before their unit. If that does not suffice,
    paths lose directories, and then names are shortened, from the last column of names to the
    first. A file name longer than half of the room goes on in the next line.

    Args:
        heads: The columns' heads. A column with an empty head holds bars.
        rows: The cells.
        room: The width in characters.
        names: How many of the first columns hold names.
        paths: The column of names that holds paths.
        marked: The indexes of rows that stand out.
        tight: The numbers have lost their spaces already.
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
    least = [max(_LEAST, cell_len(head)) for head in heads]
    order = list(reversed(range(names)))
    if paths is not None:
        longest = max((cell_len(cut_path(row[paths], 0)) for row in cells), default=0)
        least[paths] = max(least[paths], longest if longest <= room // 2 else room // 3)
        order.sort(key=lambda column: column != paths)
    for column in order:
        spare = max(0, min(over, widths[column] - least[column]))
        widths[column] -= spare
        over -= spare
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for index, head in enumerate(heads):
        left = index < names or not head
        table.add_column(
            head,
            justify="left" if left else "right",
            no_wrap=index != paths,
            overflow="fold" if index == paths else "ellipsis",
        )
    for number, row in enumerate(cells):
        texts = [
            Text(
                cut_path(cell, widths[i])
                if i == paths
                else cut(cell, widths[i])
                if i < names
                else cell
            )
            for i, cell in enumerate(row)
        ]
        table.add_row(*texts, style="bold red" if number in marked else None)
    return table
