"""Decode records: names for codes and ids, and global ranks for ranks within a group.

``decode_record`` returns one record as Python values, for hooks. ``decode_ring`` returns the
records of a ring as columns, for tables. Both give the same values, but a table holds
``group_ranks`` and ``shape`` as text, and it has a label for each group that is unique in the
run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankcall.ranks import format_ranks
from rankcall.record import (
    CODED,
    FLAG_ABANDONED,
    GROUP_RANKS,
    LATE_TIMES,
    PLAIN,
    RECORD,
    Rows,
    device_name,
)
from rankcall.ring.reader import Ring
from rankcall.ring.tables import Group, Tables

if TYPE_CHECKING:
    import polars as pl


_FIELDS = RECORD.names or ()


def decode_record(row: Any, tables: Tables) -> dict[str, Any]:
    """Return a record's columns by name; a column that does not apply is None."""
    raw = dict(zip(_FIELDS, row.item(), strict=True))  # all as Python's own numbers, in one call
    group = tables.groups.get(raw["group"])
    site = tables.sites.get(raw["call_site"])
    ranks = group.ranks if group is not None else ()
    device_ms = raw["device_ms"]
    return {
        "index": (raw["commit"] >> 2) - 1,
        "group": group.label if group is not None else None,
        "group_ranks": list(ranks),
        **{name: names[raw[name]] for name, names in CODED.items()},
        "variant": tables.strings.get(raw["variant"]),
        **{name: raw[name] for name in PLAIN},
        "shape": raw["shape"][: raw["ndim"]].tolist(),
        **{name: _global_rank(ranks, raw[name]) for name in GROUP_RANKS},
        "async_op": {0: False, 1: True}.get(raw["async_op"]),
        "device": device_name(raw["device_type"], raw["device_index"]),
        "call_site": str(site) if site is not None else None,
        "user_line": site.user_line or None if site is not None else None,
        "function": site.function if site is not None else None,
        "api": site.api if site is not None else None,
        "correlation": raw["correlation"],
        "error": tables.strings.get(raw["error"]) if raw["error"] else None,
        "abandoned": bool(raw["flags"] & FLAG_ABANDONED),
        **{name: raw[name] or None for name in LATE_TIMES},
        "device_ms": device_ms if device_ms == device_ms else None,
    }


def _global_rank(ranks: tuple[int, ...], local: int) -> int | None:
    return ranks[local] if 0 <= local < len(ranks) else None


class Column(NamedTuple):
    """One column: numbers, or indexes into a list of names.

    NumPy makes the columns, so that a process that only records does not load Polars (0.5 s).
    """

    values: npt.NDArray[Any]
    names: Sequence[str | None] | None = None
    absent: npt.NDArray[np.bool_] | None = None  # rows without a value; None: every row has one
    complete: bool = False  # ``names`` are all that there can ever be

    def series(self) -> pl.Series:
        """Return the column as a Polars series, with null for absent values."""
        import polars as pl

        column = pl.Series(np.ascontiguousarray(self.values))
        if self.absent is not None and self.absent.any():
            column = column.set(pl.Series(self.absent), None)
        if self.names is None:
            return column
        if self.complete:
            known = [name for name in self.names if name is not None]
            no_gaps = len(known) == len(self.names)
            names = pl.Series(self.names, dtype=pl.Enum(known) if no_gaps else pl.String)
        else:
            names = pl.Series(self.names, dtype=pl.String).cast(pl.Categorical)
        return names.gather(column)


def decode_ring(ring: Ring, labels: Mapping[Group, str]) -> dict[str, Column]:
    """Return the columns of a ring's records, by name; docs/records.md lists them.

    Args:
        ring: The ring.
        labels: The run's labels of its groups. A group that is not among them, because it was made
            since, has its own name.
    """
    rows, header, groups = ring.records, ring.header, ring.tables.groups
    sites, strings = ring.tables.sites, ring.tables.strings

    def of_group(text: Callable[[Group], str]) -> Column:
        return _named(rows["group"], {key: text(group) for key, group in groups.items()})

    return {
        "rank": Column(np.full(len(rows), header.rank, np.int32)),
        "attempt": Column(np.full(len(rows), header.attempt, np.int32)),
        "host": Column(np.zeros(len(rows), np.uint32), [header.host]),
        "index": Column((rows["commit"] >> 2).astype(np.int64) - 1),
        "group": of_group(lambda group: labels.get(group, group.label)),
        "group_ranks": of_group(lambda group: format_ranks(group.ranks)),
        **{
            name: Column(rows[name].astype(np.uint32), names, complete=True)
            for name, names in CODED.items()
        },
        "variant": _named(rows["variant"], strings),
        **{name: Column(rows[name]) for name in PLAIN},
        "shape": _shapes(rows),
        **{name: _global_ranks(rows, name, groups) for name in GROUP_RANKS},
        "async_op": Column(rows["async_op"] == 1, absent=rows["async_op"] == 2),
        "device": _devices(rows),
        "call_site": _named(rows["call_site"], {key: str(site) for key, site in sites.items()}),
        "user_line": _named(
            rows["call_site"], {key: site.user_line for key, site in sites.items() if site.user}
        ),
        "function": _named(rows["call_site"], {key: site.function for key, site in sites.items()}),
        "api": _named(rows["call_site"], {key: site.api for key, site in sites.items()}),
        "correlation": Column(rows["correlation"]),
        "error": _named(rows["error"], strings),
        "abandoned": Column(rows["flags"] & FLAG_ABANDONED != 0),
        **{name: Column(rows[name], absent=rows[name] == 0) for name in LATE_TIMES},
        "device_ms": Column(rows["device_ms"], absent=np.isnan(rows["device_ms"])),
    }


def _named(ids: npt.NDArray[Any], names: Mapping[int, str]) -> Column:
    """Return the names of ids; an id without a name is absent."""
    known = np.array(sorted(names), dtype=np.uint32)
    if not len(known):
        return Column(np.zeros(len(ids), np.uint32), [""], np.ones(len(ids), np.bool_))
    at = np.searchsorted(known, ids).clip(max=len(known) - 1)
    texts = [names[key] for key in known.tolist()]
    return Column(at.astype(np.uint32), texts, known[at] != ids)


def _shapes(rows: Rows) -> Column:
    """Return shapes as text, ``[4, 8]``. A run has few different shapes; each is formatted once."""
    key = np.column_stack([rows["ndim"].astype(np.int64), rows["shape"]])
    shapes, which = _distinct_rows(key)
    texts = [str(shape[1 : 1 + shape[0]].tolist()) for shape in shapes]
    return Column(which.ravel().astype(np.uint32), texts)


def _distinct_rows(
    rows: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.intp]]:
    """Return the distinct rows, and for each row the index of its equal among them.

    Sorting one hash per row is ten times as fast as sorting the rows. Two different rows with the
    same hash are possible, if unlikely, so the result is compared, and if it is wrong the rows are
    sorted after all.
    """
    # Powers of an odd number: each column has a weight of its own, and none of them is even, which
    # would lose the highest bits of what it is multiplied with.
    odd = np.cumprod(np.full(rows.shape[1], 0x5851F42D4C957F2D, np.uint64))
    hashes = (rows.view(np.uint64) * odd).sum(axis=1, dtype=np.uint64)
    _, first, which = np.unique(hashes, return_index=True, return_inverse=True)
    distinct = rows[first]
    if np.array_equal(distinct[which], rows):
        return distinct, which
    return np.unique(rows, axis=0, return_inverse=True)


def _devices(rows: Rows) -> Column:
    types, indexes = rows["device_type"].astype(np.int64), rows["device_index"].astype(np.int64)
    # Both in one number, because to sort numbers is faster than to sort rows. An index has 16 bits
    # and may be negative.
    keys, which = np.unique(types * 65536 + (indexes + 32768), return_inverse=True)
    names = [device_name(key // 65536, key % 65536 - 32768) for key in keys.tolist()]
    return Column(which.ravel().astype(np.uint32), names)


def _global_ranks(rows: Rows, name: str, groups: Mapping[int, Group]) -> Column:
    """Translate ranks within their groups to global ranks; absent if none applies."""
    local = rows[name]
    result = np.full(len(rows), -1, np.int32)
    if (local >= 0).any():
        for key, group in groups.items():
            ranks = np.array(group.ranks, np.int32)
            mine = (rows["group"] == key) & (local >= 0) & (local < len(ranks))
            result[mine] = ranks[local[mine]]
    return Column(result, absent=result < 0)
