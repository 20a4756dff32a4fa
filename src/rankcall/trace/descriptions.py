"""Descriptions, many at a time: columns for sinks that count, lines and dicts for the others."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rankcall.record import DTYPES

if TYPE_CHECKING:
    import polars as pl

Description = dict[str, Any]
Column = npt.NDArray[Any]
NO_RANK = -1


@dataclass(frozen=True)
class Kind:
    """What all descriptions of one op, from one line, in one group have in common."""

    name: str
    source_line: str
    group: str
    group_ranks: tuple[int, ...]


@dataclass(frozen=True)
class Teller:
    """Whose descriptions they are."""

    rank: int
    gpu_serial: str = "unknown"
    vm_id: str = "unknown"


@dataclass(frozen=True)
class Descriptions:
    """Some descriptions of one rank, in issue order per group. Iterating yields them as dicts.

    ``columns`` has one element for each: ``kind`` (a place in ``kinds``), ``message_size``,
    ``device`` (-1: cpu), ``issued_ns`` (since the epoch), ``peer_rank``, ``root_rank`` (-1: none),
    ``correlation_id`` (0: none), ``seq``, ``dtype`` (a code), ``duration_ms``, ``algbw_gbps``,
    ``busbw_gbps`` (NaN: not known), ``step``, ``in_flight``, ``failed``, ``prints`` (this rank is
    the one that prints it) and ``first`` (false for the further tensors of one coalesced op).
    """

    teller: Teller
    kinds: tuple[Kind, ...]
    columns: dict[str, Column]
    dropped: int = 0  # ops missed before the first of these

    def __len__(self) -> int:
        return len(self.columns["kind"])

    def only(self, wanted: npt.NDArray[np.bool_]) -> Descriptions:
        """Return the wanted ones."""
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
            **{name: row[name] for name, there in applies.items() if there},
            "seq": row["seq"],
            "group": kind.group,
            "dtype": DTYPES[row["dtype"]],
            **{name: _number(row[name]) for name in ("duration_ms", "algbw_gbps", "busbw_gbps")},
            "step": row["step"],
        }

    # --- as a table and as text: by Polars, which does not hold the GIL meanwhile ---

    def frame(self) -> pl.DataFrame:
        """Return a table with a column for each field (``device`` as text, ranks as ``0-3,8``)."""
        import polars as pl

        from rankcall.run import format_ranks

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
        """Return one JSON object a line, as ``json.dumps`` of each dict would be."""
        import polars as pl

        if not len(self):
            return b""
        columns = self.columns
        table = pl.DataFrame(
            {
                "_head": self._of_kind(self._head),
                "_ranks": self._of_kind(self._ranks),
                "_group": self._of_kind(lambda kind: f', "group": {json.dumps(kind.group)}'),
                "_dtype": pl.Series([f', "dtype": "{name}"' for name in DTYPES]).gather(
                    columns["dtype"].astype(np.uint32)
                ),
                "timestamp": columns["issued_ns"] // 1_000_000_000,
                **{name: column for name, column in columns.items() if name in _WRITTEN},
            }
        )
        text = io.BytesIO()  # no text has a line break in it: they are escaped
        table.select(_line(columns)).write_csv(text, include_header=False, quote_style="never")
        return text.getvalue()

    def _head(self, kind: Kind) -> str:
        head = {"name": kind.name, "rank": self.teller.rank, "source_line": kind.source_line}
        return f'{json.dumps(head)[:-1]}, "message_size": '

    def _ranks(self, kind: Kind) -> str:
        teller = self.teller
        part = {
            "gpu_serial": teller.gpu_serial,
            "vm_id": teller.vm_id,
            "group_ranks": kind.group_ranks,
        }
        return f", {json.dumps(part)[1:-1]}"

    def _of_kind(self, text: Callable[[Kind], str]) -> pl.Series:
        """Return a text that depends on the kind only, made once for each."""
        import polars as pl

        texts = pl.Series([text(kind) for kind in self.kinds], dtype=pl.String)
        return texts.gather(self.columns["kind"].astype(np.uint32))


_WRITTEN = (
    "message_size", "device", "peer_rank", "root_rank", "correlation_id", "seq", "duration_ms",
    "algbw_gbps", "busbw_gbps", "step",
)  # fmt: skip


def _line(columns: dict[str, Column]) -> pl.Expr:
    """Return what makes a line; what no line needs is left out, since each part costs."""
    import polars as pl

    def number(name: str) -> pl.Expr:
        return pl.col(name).cast(pl.String)

    def where(name: str, nothing: int) -> list[pl.Expr]:
        there = columns[name] != nothing
        text = [pl.lit(f', "{name}": '), number(name)]
        if there.all():
            return text
        applies = pl.when(pl.col(name) != nothing).then(pl.concat_str(text))
        return [applies.otherwise(pl.lit(""))] if there.any() else []

    def real(name: str) -> list[pl.Expr]:
        text = number(name)
        if np.isnan(columns[name]).any():
            text = pl.when(pl.col(name).is_not_nan()).then(text).otherwise(pl.lit("null"))
        return [pl.lit(f', "{name}": '), text]

    device = [pl.lit(', "device": "cpu"')]
    if (columns["device"] >= 0).any():
        on_cpu = pl.when(pl.col("device") < 0).then(pl.lit('"cpu"'))
        device = [pl.lit(', "device": '), on_cpu.otherwise(number("device"))]
    return pl.concat_str(
        "_head", number("message_size"), *device, pl.lit(', "timestamp": '), number("timestamp"),
        "_ranks", *where("peer_rank", NO_RANK), *where("root_rank", NO_RANK),
        *where("correlation_id", 0), pl.lit(', "seq": '), number("seq"), "_group", "_dtype",
        *real("duration_ms"), *real("algbw_gbps"), *real("busbw_gbps"),
        pl.lit(', "step": '), number("step"), pl.lit("}"),
    )  # fmt: skip


def _number(value: float) -> float | None:
    return value if value == value else None


def _absent(column: Column, nothing: int) -> pl.Series:
    import polars as pl

    series = pl.Series(column)
    return series.set(series == nothing, None)
