"""The parts of lines of many descriptions at once: columns of strings, made by Polars.

Polars does not hold the GIL while it works. A part that is the same in the whole batch is one
string, because a column of strings costs time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Union

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import polars as pl

Part = Union[str, "pl.Series"]
Column = npt.NDArray[Any]


def joined(parts: Iterable[Part]) -> list[Part]:
    """Join strings that stand next to each other."""
    merged: list[Part] = []
    for part in parts:
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] += part
        else:
            merged.append(part)
    return merged


def chosen(texts: list[str], which: Column) -> Part:
    """Return the text of each description by its index in ``texts``."""
    import polars as pl

    if (which == which[0]).all():
        return texts[int(which[0])]
    return pl.Series(texts, dtype=pl.String).gather(which.astype(np.uint32))


def numbers(column: Column) -> Part:
    """Return whole numbers as JSON."""
    import polars as pl

    return str(column[0]) if (column == column[0]).all() else pl.Series(column).cast(pl.String)


def reals(column: Column) -> Part:
    """Return numbers as JSON; null for NaN."""
    import polars as pl

    unknown = np.isnan(column)
    if unknown.all():
        return "null"
    texts: pl.Series = pl.Series(column).cast(pl.String)
    return texts.set(pl.Series(unknown), "null") if unknown.any() else texts


def devices(column: Column) -> Part:
    """Return indexes of devices as JSON; ``"cpu"`` for a negative one."""
    import polars as pl

    if (column < 0).all():
        return '"cpu"'
    texts: pl.Series = pl.Series(column).cast(pl.String)
    return texts.set(pl.Series(column < 0), '"cpu"')


def where_it_applies(key: str, column: Column, absent: int) -> Part:
    """Return a key with its value, and nothing for the value ``absent``."""
    import polars as pl

    if (column == absent).all():
        return ""
    texts: pl.Series = key + pl.Series(column).cast(pl.String)
    return texts.set(pl.Series(column == absent), "")
