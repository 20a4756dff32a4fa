"""From records to descriptions: names, sizes, bandwidths, and the batches that sinks get."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

import numpy as np
import numpy.typing as npt

from rankcall.record import (
    DTYPES,
    NO_RANK,
)

if TYPE_CHECKING:
    import polars as pl


Description = dict[str, Any]
Part = Union[str, "pl.Series"]
Column = npt.NDArray[Any]


@dataclass(frozen=True)
class Kind:
    """The fields that all descriptions of one op, from one source line, in one group share."""

    name: str
    source_line: str
    group: str
    group_ranks: tuple[int, ...]


@dataclass(frozen=True)
class Teller:
    """The rank that describes, with the names of its device and machine."""

    rank: int
    gpu_serial: str = "unknown"
    vm_id: str = "unknown"


@dataclass(frozen=True)
class Descriptions:
    """Some descriptions of one rank, in issue order per group. Iterating yields them as dicts.

    Attributes:
        teller: The rank that describes.
        kinds: The distinct kinds, to which the column ``kind`` refers.
        columns: Arrays with one element for each description: ``kind`` (an index into ``kinds``),
            ``message_size``, ``device`` (-1: cpu), ``issued_ns`` (since the epoch), ``peer_rank``
            and ``root_rank`` (-1: no such rank), ``correlation_id`` (0: not correlated), ``seq``,
            ``dtype`` (a code), ``duration_ms``, ``algbw_gbps``, ``busbw_gbps`` (NaN: unknown),
            ``step``, ``in_flight``, ``failed``, ``prints`` (whether this rank prints it) and
            ``first`` (false for the second and later tensors of one coalesced op).
        dropped: How many ops were missed before the first of these.
    """

    teller: Teller
    kinds: tuple[Kind, ...]
    columns: dict[str, Column]
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.columns["kind"])

    def only(self, wanted: npt.NDArray[np.bool_]) -> Descriptions:
        """Return the descriptions whose element of ``wanted`` is true."""
        if wanted.all():
            return self
        columns = {name: column[wanted] for name, column in self.columns.items()}
        return Descriptions(self.teller, self.kinds, columns, self.dropped)

    def __iter__(self) -> Iterator[Description]:
        lists = {name: column.tolist() for name, column in self.columns.items()}
        for at in range(len(self)):
            yield self._describe({name: values[at] for name, values in lists.items()})

    def _describe(self, row: dict[str, Any]) -> Description:
        kind, teller = self.kinds[row["kind"]], self.teller
        applies = {
            "peer_rank": row["peer_rank"] != NO_RANK,
            "root_rank": row["root_rank"] != NO_RANK,
            "correlation_id": row["correlation_id"] != 0,
        }
        return {
            "name": kind.name,
            "rank": teller.rank,
            "source_line": kind.source_line,
            "message_size": row["message_size"],
            "device": "cpu" if row["device"] < 0 else row["device"],
            "timestamp": row["issued_ns"] // 1_000_000_000,
            "gpu_serial": teller.gpu_serial,
            "vm_id": teller.vm_id,
            "group_ranks": list(kind.group_ranks),
            **{name: row[name] for name, has_value in applies.items() if has_value},
            "seq": row["seq"],
            "group": kind.group,
            "dtype": DTYPES[row["dtype"]],
            **{name: _number(row[name]) for name in ("duration_ms", "algbw_gbps", "busbw_gbps")},
            "step": row["step"],
        }

    # --- as a table and as text, made by Polars, which does not hold the GIL while it works ---

    def frame(self) -> pl.DataFrame:
        """Return a table with a column for each field (``device`` as text, ranks as ``0-3,8``)."""
        import polars as pl

        from rankcall.ranks import format_ranks

        columns, count = self.columns, len(self)
        device = pl.Series(columns["device"])
        return pl.DataFrame(
            {
                "name": self._of_kind(lambda kind: kind.name),
                "rank": pl.repeat(self.teller.rank, count, dtype=pl.Int32, eager=True),
                "source_line": self._of_kind(lambda kind: kind.source_line),
                "message_size": columns["message_size"],
                "device": device.cast(pl.String).set(device < 0, "cpu"),
                "timestamp": columns["issued_ns"] // 1_000_000_000,
                "gpu_serial": pl.repeat(self.teller.gpu_serial, count, eager=True),
                "vm_id": pl.repeat(self.teller.vm_id, count, eager=True),
                "group_ranks": self._of_kind(lambda kind: format_ranks(kind.group_ranks)),
                **{name: _absent(columns[name], NO_RANK) for name in ("peer_rank", "root_rank")},
                "correlation_id": _absent(columns["correlation_id"], 0),
                "seq": columns["seq"],
                "group": self._of_kind(lambda kind: kind.group),
                "dtype": pl.Series(DTYPES).gather(columns["dtype"].astype(np.uint32)),
                **{
                    name: pl.Series(columns[name]).fill_nan(None)
                    for name in ("duration_ms", "algbw_gbps", "busbw_gbps")
                },
                "step": columns["step"],
            }
        )

    def lines(self) -> bytes:
        """Return one JSON object per line, with the same text as ``json.dumps`` of each dict."""
        import polars as pl

        if not len(self):
            return b""
        parts = _joined(self._parts())
        if len(parts) == 1 and isinstance(parts[0], str):
            return f"{parts[0]}\n".encode() * len(self)
        line = pl.concat_str([pl.lit(part) for part in parts])
        text = io.BytesIO()  # JSON escapes line breaks, so each description stays on one line
        pl.select(line).write_csv(text, include_header=False, quote_style="never")
        return text.getvalue()

    def _parts(self) -> Iterator[Part]:
        """Yield the parts of a line from left to right."""
        columns = self.columns
        yield self._shared(self._head)
        yield from (', "message_size": ', _numbers(columns["message_size"]))
        yield from (', "device": ', _devices(columns["device"]))
        yield from (', "timestamp": ', _numbers(columns["issued_ns"] // 1_000_000_000))
        yield self._shared(self._ranks)
        yield _where_it_applies("peer_rank", columns["peer_rank"], NO_RANK)
        yield _where_it_applies("root_rank", columns["root_rank"], NO_RANK)
        yield _where_it_applies("correlation_id", columns["correlation_id"], 0)
        yield from (', "seq": ', _numbers(columns["seq"]))
        yield self._shared(lambda kind: f', "group": {json.dumps(kind.group)}')
        yield from (', "dtype": ', _chosen([f'"{name}"' for name in DTYPES], columns["dtype"]))
        for name in ("duration_ms", "algbw_gbps", "busbw_gbps"):
            yield from (f', "{name}": ', _reals(columns[name]))
        yield from (', "step": ', _numbers(columns["step"]), "}")

    def _head(self, kind: Kind) -> str:
        head = {"name": kind.name, "rank": self.teller.rank, "source_line": kind.source_line}
        return json.dumps(head)[:-1]

    def _ranks(self, kind: Kind) -> str:
        teller = self.teller
        part = {
            "gpu_serial": teller.gpu_serial,
            "vm_id": teller.vm_id,
            "group_ranks": kind.group_ranks,
        }
        return f", {json.dumps(part)[1:-1]}"

    def _shared(self, text: Callable[[Kind], str]) -> Part:
        return _chosen([text(kind) for kind in self.kinds], self.columns["kind"])

    def _of_kind(self, text: Callable[[Kind], str]) -> pl.Series:
        """Return a text for each description that depends only on its kind."""
        import polars as pl

        texts = pl.Series([text(kind) for kind in self.kinds], dtype=pl.String)
        return texts.gather(self.columns["kind"].astype(np.uint32))


NOTHING = Descriptions(Teller(NO_RANK), (), {"kind": np.empty(0, np.int64)})

# --- Parts of lines. A part that is the same in the whole batch is one string, because a column of
# --- strings costs time.


def _joined(parts: Iterable[Part]) -> list[Part]:
    """Join strings that stand next to each other."""
    merged: list[Part] = []
    for part in parts:
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] += part
        else:
            merged.append(part)
    return merged


def _chosen(texts: list[str], which: Column) -> Part:
    import polars as pl

    if (which == which[0]).all():
        return texts[int(which[0])]
    return pl.Series(texts, dtype=pl.String).gather(which.astype(np.uint32))


def _numbers(column: Column) -> Part:
    import polars as pl

    return str(column[0]) if (column == column[0]).all() else pl.Series(column).cast(pl.String)


def _reals(column: Column) -> Part:
    import polars as pl

    unknown = np.isnan(column)
    if unknown.all():
        return "null"
    texts: pl.Series = pl.Series(column).cast(pl.String)
    return texts.set(pl.Series(unknown), "null") if unknown.any() else texts


def _devices(column: Column) -> Part:
    import polars as pl

    if (column < 0).all():
        return '"cpu"'
    texts: pl.Series = pl.Series(column).cast(pl.String)
    return texts.set(pl.Series(column < 0), '"cpu"')


def _where_it_applies(name: str, column: Column, nothing: int) -> Part:
    import polars as pl

    if (column == nothing).all():
        return ""
    texts: pl.Series = f', "{name}": ' + pl.Series(column).cast(pl.String)
    return texts.set(pl.Series(column == nothing), "")


def _number(value: float) -> float | None:
    return value if value == value else None


def _absent(column: Column, nothing: int) -> pl.Series:
    import polars as pl

    series = pl.Series(column)
    return series.set(series == nothing, None)
