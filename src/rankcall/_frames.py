"""Rings as Polars tables: names for codes, global ranks for group ranks, ids resolved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import polars as pl

from rankcall.record import CODED, FLAG_ABANDONED, GROUP_RANKS, LATE_TIMES, PLAIN, device_name
from rankcall.ring.reader import Ring
from rankcall.run import RunGroup, format_ranks

if TYPE_CHECKING:
    from rankcall.run import Run


def groups_frame(run: Run) -> pl.DataFrame:
    """See ``Run.groups``."""
    rows = [
        {
            "group": known.label,
            "name": known.group.name,
            "epoch": known.group.epoch,
            "description": known.group.description,
            "backend": known.group.backend,
            "size": len(known.group.ranks),
            "ranks": list(known.group.ranks),
            "hosts": list(known.hosts),
            "cross_host": known.cross_host,
        }
        for known in run.run_groups.values()
    ]
    schema: dict[str, pl.DataType | type[pl.DataType]] = {
        "group": pl.String, "name": pl.String, "epoch": pl.Int64, "description": pl.String,
        "backend": pl.String, "size": pl.Int64, "ranks": pl.List(pl.Int64),
        "hosts": pl.List(pl.String), "cross_host": pl.Boolean,
    }  # fmt: skip
    return pl.DataFrame(rows, schema=schema)


def ranks_frame(run: Run) -> pl.DataFrame:
    """See ``Run.ranks``."""
    rows = [
        {
            "rank": head.rank,
            "world_size": head.world_size,
            "local_rank": head.local_rank,
            "host": head.host,
            "node": head.node,
            "pid": head.pid,
            "attempt": head.attempt,
            "capture": head.capture,
            "records": run.count(ring)[0],
            "dropped": run.count(ring)[1],
            "steps": min(head.step, (1 << 63) - 1),
            "closed": head.closed_ns != 0,
        }
        for ring in run.heads
        for head in (ring.header,)
    ]
    text, flags = ("host", "capture"), ("closed",)
    schema: dict[str, type[pl.DataType]] = {
        name: pl.String if name in text else pl.Boolean if name in flags else pl.Int64
        for name in rows[0]
    }
    return pl.DataFrame(rows, schema=schema)


def records_frame(run: Run) -> pl.DataFrame:
    """See ``Run.records``."""
    frames = [ring_frame(run, ring) for ring in run.rings]
    return pl.concat(frames, how="vertical") if frames else pl.DataFrame()


def ring_frame(run: Run, ring: Ring) -> pl.DataFrame:
    """Return one ring's part of ``Run.records``."""
    records, head = ring.records, ring.header
    labels = _group_labels(run, ring)
    columns: dict[str, Any] = {
        "rank": pl.repeat(head.rank, len(records), dtype=pl.Int32, eager=True),
        "attempt": pl.repeat(head.attempt, len(records), dtype=pl.Int32, eager=True),
        "host": _constant(head.host, len(records)),
        "index": (records["commit"] >> 2).astype(np.int64) - 1,
        "group": _named(records["group"], {key: known.label for key, known in labels.items()}),
        "group_ranks": _named(
            records["group"], {key: _ranks_text(known) for key, known in labels.items()}
        ),
    }
    for name, names in CODED.items():
        columns[name] = _names(names).gather(records[name].astype(np.uint32))
    columns["variant"] = _named(records["variant"], ring.tables.strings)
    for name in PLAIN:
        columns[name] = np.ascontiguousarray(records[name])
    columns["shape"] = _shapes(records)
    for name in GROUP_RANKS:
        columns[name] = _global_ranks(records, name, labels)
    columns["async_op"] = _async(records["async_op"])
    columns["device"] = _devices(records)
    sites = ring.tables.sites
    columns["call_site"] = _named(records["call_site"], {k: str(v) for k, v in sites.items()})
    columns["function"] = _named(records["call_site"], {k: v.function for k, v in sites.items()})
    columns["api"] = _named(records["call_site"], {k: v.api for k, v in sites.items()})
    columns["correlation"] = np.ascontiguousarray(records["correlation"])
    columns["error"] = _named(records["error"], ring.tables.strings)
    columns["abandoned"] = np.ascontiguousarray(records["flags"] & FLAG_ABANDONED != 0)
    for name in LATE_TIMES:
        columns[name] = _nullable(records[name])
    columns["device_ms"] = pl.Series(np.ascontiguousarray(records["device_ms"])).fill_nan(None)
    return pl.DataFrame(columns)


def _names(names: tuple[str | None, ...]) -> pl.Series:
    """Return the names of a column's codes: an enum, where each code has a name."""
    every = [name for name in names if name is not None]
    return pl.Series(names, dtype=pl.Enum(every) if len(every) == len(names) else pl.String)


def _group_labels(run: Run, ring: Ring) -> dict[int, RunGroup]:
    """Return a ring's groups; of one made since ``load`` no other rank is known to differ."""
    return {
        key: run.run_groups.get(group) or RunGroup(group.label, group, ())
        for key, group in ring.tables.groups.items()
    }


def _constant(text: str, count: int) -> pl.Series:
    column: pl.Series = pl.repeat(text, count, dtype=pl.String, eager=True).cast(pl.Categorical)
    return column


def _ranks_text(known: RunGroup) -> str:
    return format_ranks(known.group.ranks)


def _named(codes: npt.NDArray[Any], names: dict[int, str]) -> pl.Series:
    """Replace ids by names (categorical); an id without a name is null."""
    keys = np.array(sorted(names), dtype=np.uint32)
    values = pl.Series([names[int(key)] for key in keys], dtype=pl.String).cast(pl.Categorical)
    at = np.searchsorted(keys, codes)
    known = at < len(keys)
    known[known] = keys[at[known]] == codes[known]
    if not len(keys):
        return pl.Series([None] * len(codes), dtype=pl.Categorical)
    named: pl.Series = values.gather(_without(pl.Series(at.astype(np.uint32)), ~known))
    return named


def _nullable(times: npt.NDArray[np.int64]) -> pl.Series:
    return _without(pl.Series(np.ascontiguousarray(times)), times == 0)


def _without(column: pl.Series, absent: npt.NDArray[np.bool_]) -> pl.Series:
    """Return a column with null where something is absent; most columns lack nothing."""
    return column.set(pl.Series(absent), None) if absent.any() else column


def _async(codes: npt.NDArray[np.uint8]) -> pl.Series:
    return _without(pl.Series(codes == 1), codes == 2)


def _shapes(records: npt.NDArray[Any]) -> pl.Series:
    """Return shapes as text, ``[4, 8]``; few differ in a run, so each is formatted once."""
    if not len(records):
        return pl.Series([], dtype=pl.Categorical)
    key = np.column_stack([records["ndim"].astype(np.int64), records["shape"]])
    kinds, which = _distinct_rows(key)
    texts = [str([int(n) for n in kind[1 : 1 + kind[0]]]) for kind in kinds]
    return _picked(texts, which)


def _distinct_rows(
    rows: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.intp]]:
    """Return the rows that differ, and which of them each row is.

    Sorting one hash a row is ten times as fast as sorting the rows.
    """
    odd = np.cumprod(np.full(rows.shape[1], 0x5851F42D4C957F2D, np.uint64))
    hashes = (rows.view(np.uint64) * odd).sum(axis=1, dtype=np.uint64)
    _, first, which = np.unique(hashes, return_index=True, return_inverse=True)
    kinds = rows[first]
    if np.array_equal(kinds[which], rows):
        return kinds, which
    return np.unique(rows, axis=0, return_inverse=True)


def _picked(texts: list[str], which: npt.NDArray[np.intp]) -> pl.Series:
    """Return ``texts[which]`` as categories."""
    column: pl.Series = pl.Series(texts, dtype=pl.String).cast(pl.Categorical)
    return column.gather(which.ravel())


def _devices(records: npt.NDArray[Any]) -> pl.Series:
    kinds, index = records["device_type"].astype(np.int64), records["device_index"].astype(np.int64)
    keys, which = np.unique(kinds * 65536 + (index + 32768), return_inverse=True)
    texts = [device_name(int(key) // 65536, int(key) % 65536 - 32768) for key in keys]
    return _picked(texts, which)


def _global_ranks(records: npt.NDArray[Any], name: str, labels: dict[int, RunGroup]) -> pl.Series:
    """Translate ranks within their groups to global ones; null where none applies."""
    local = records[name]
    result = np.full(len(records), -1, np.int32)
    some = local >= 0
    if not some.any():
        return pl.Series([None] * len(records), dtype=pl.Int32)
    for key, known in labels.items():
        ranks = np.array(known.group.ranks, np.int32)
        rows = some & (records["group"] == key) & (local < len(ranks))
        result[rows] = ranks[local[rows]]
    return _without(pl.Series(result), result < 0)
