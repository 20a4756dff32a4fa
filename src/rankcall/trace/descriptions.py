"""The batches that sinks get: descriptions as columns, as a table, as dictionaries and as lines.

Columns and tables use the names of ``record.FACTS``. The dictionaries and lines have the names of
``drop_in.DESCRIPTION``, which also gives the marks that are made at issue their fields.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rankcall.drop_in import DESCRIPTION, NS_PER_S, Field, description
from rankcall.errors import warn_renamed
from rankcall.ranks import format_ranks
from rankcall.record import DTYPES, NO_RANK
from rankcall.trace.line_parts import (
    Column,
    Part,
    chosen,
    devices,
    joined,
    numbers,
    reals,
    where_it_applies,
)

if TYPE_CHECKING:
    import polars as pl


Description = dict[str, Any]

# The values in columns that stand for "does not apply"; a dictionary has None instead.
_ABSENT = {"peer": NO_RANK, "root": NO_RANK, "correlation": 0, "end_unknown": False}
_REALS = ("duration_ms", "algbw_gbps", "busbw_gbps")


@dataclass(frozen=True)
class DescribedCall:
    """The facts that all descriptions of one op, from one call site, in one group share."""

    op: str
    call_site: str
    group: str
    group_ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        """Deprecated: ``op``."""
        warn_renamed("Kind.name", "DescribedCall.op")
        return self.op

    @property
    def source_line(self) -> str:
        """Deprecated: ``call_site``."""
        warn_renamed("Kind.source_line", "DescribedCall.call_site")
        return self.call_site


@dataclass(frozen=True)
class Teller:
    """The rank that describes, with the names of its device and machine."""

    rank: int
    gpu_serial: str = "unknown"
    vm_id: str = "unknown"


class Columns(dict[str, Column]):
    """Arrays by name. A name of version 0.1 finds the same array, with a ``DeprecationWarning``."""

    def __missing__(self, name: str) -> Column:
        new = _OLD_COLUMNS.get(name)
        if new is None:
            raise KeyError(name)
        warn_renamed(f'columns["{name}"]', f'columns["{new}"]')
        return self[new]


_OLD_COLUMNS = {
    "kind": "call",
    "issued_ns": "enqueued_epoch_ns",
    "message_size": "message_bytes",
    "device": "device_index",
    "peer_rank": "peer",
    "root_rank": "root",
    "correlation_id": "correlation",
}


@dataclass(frozen=True)
class Descriptions:
    """Some descriptions of one rank, in issue order per group. Iterating yields them as dicts.

    Attributes:
        teller: The rank that describes.
        calls: The distinct calls, to which the column ``call`` refers.
        columns: Arrays with one element for each description: ``call`` (an index into ``calls``),
            ``message_bytes``, ``device_index`` (-1: the CPU), ``enqueued_epoch_ns``, ``peer`` and
            ``root`` (-1: no such rank), ``correlation`` (0: not correlated), ``seq``, ``dtype`` (a
            code), ``duration_ms``, ``algbw_gbps``, ``busbw_gbps`` (NaN: unknown), ``step``,
            ``end_unknown`` (issued, and the end is not known), ``in_flight`` (the same, and the op
            is described again when it ends), ``failed``, ``prints`` (whether this rank prints it)
            and ``first`` (false for the second and later tensors of one coalesced op).
        dropped: How many ops were missed before the first of these.
    """

    teller: Teller
    calls: tuple[DescribedCall, ...]
    columns: Columns
    dropped: int = 0

    @property
    def kinds(self) -> tuple[DescribedCall, ...]:
        """Deprecated: ``calls``."""
        warn_renamed("Descriptions.kinds", "Descriptions.calls")
        return self.calls

    def __len__(self) -> int:
        return len(self.columns["call"])

    def only(self, wanted: npt.NDArray[np.bool_]) -> Descriptions:
        """Return the descriptions whose element of ``wanted`` is true."""
        if wanted.all():
            return self
        columns = Columns({name: column[wanted] for name, column in self.columns.items()})
        return Descriptions(self.teller, self.calls, columns, self.dropped)

    def __iter__(self) -> Iterator[Description]:
        return map(description, self.facts())

    def facts(self) -> Iterator[dict[str, Any]]:
        """Yield each op's facts, by the names that records have. What does not apply is None."""
        shared = [self._of_call(call) for call in self.calls]
        lists = {name: column.tolist() for name, column in self.columns.items()}
        for at in range(len(self)):
            row = {name: values[at] for name, values in lists.items()}
            yield {
                **shared[row.pop("call")],
                **row,
                **{name: _known(row[name], absent) for name, absent in _ABSENT.items()},
                **{name: _number(row[name]) for name in _REALS},
                "dtype": DTYPES[row["dtype"]],
            }

    def _of_call(self, call: DescribedCall) -> dict[str, Any]:
        """Return the facts that do not differ within a call, from the whole batch or from it."""
        return {**vars(self.teller), **vars(call), "group_ranks": list(call.group_ranks)}

    def frame(self) -> pl.DataFrame:
        """Return a table with a column for each fact (ranks as ``0-3,8``).

        Until version 0.4 it also has the columns of version 0.1, by the names of a description.
        """
        import polars as pl

        columns, count = self.columns, len(self)
        device, seconds = pl.Series(columns["device_index"]), columns["enqueued_epoch_ns"]
        facts: dict[str, Any] = {
            "op": self._text(lambda call: call.op),
            "rank": pl.repeat(self.teller.rank, count, dtype=pl.Int32, eager=True),
            "call_site": self._text(lambda call: call.call_site),
            "message_bytes": columns["message_bytes"],
            "device_index": device,
            "enqueued_epoch_ns": columns["enqueued_epoch_ns"],
            "gpu_serial": pl.repeat(self.teller.gpu_serial, count, eager=True),
            "vm_id": pl.repeat(self.teller.vm_id, count, eager=True),
            "group_ranks": self._text(lambda call: format_ranks(call.group_ranks)),
            **{name: _absent(columns[name], absent) for name, absent in _ABSENT.items()},
            "seq": columns["seq"],
            "group": self._text(lambda call: call.group),
            "dtype": pl.Series(DTYPES).gather(columns["dtype"].astype(np.uint32)),
            **{name: pl.Series(columns[name]).fill_nan(None) for name in _REALS},
            "step": columns["step"],
        }
        old = {field.name: facts[field.fact] for field in DESCRIPTION if field.name not in facts}
        old["device"] = device.cast(pl.String).set(device < 0, "cpu")
        old["timestamp"] = seconds // NS_PER_S
        return pl.DataFrame({**facts, **old})

    def lines(self) -> bytes:
        """Return one JSON object per line, with the same text as ``json.dumps`` of each dict."""
        import polars as pl

        if not len(self):
            return b""
        parts = joined(self._parts())
        if len(parts) == 1 and isinstance(parts[0], str):
            return f"{parts[0]}\n".encode() * len(self)
        line = pl.concat_str([pl.lit(part) for part in parts])
        text = io.BytesIO()  # JSON escapes line breaks, so each description stays on one line
        pl.select(line).write_csv(text, include_header=False, quote_style="never")
        return text.getvalue()

    def _parts(self) -> Iterator[Part]:
        """Yield the parts of a line from left to right.

        Neighbouring fields that are the same within a call become one part, because a column of
        strings costs time.
        """
        shared = [self._of_call(call) for call in self.calls]
        separator = "{"
        for is_column, group in groupby(DESCRIPTION, lambda field: field.fact in self.columns):
            fields = list(group)
            if is_column:
                for field in fields:
                    yield from self._column(field, separator)
            else:
                texts = [_text_of(fields, facts) for facts in shared]
                yield chosen([separator + text for text in texts], self.columns["call"])
            separator = ", "
        yield "}"

    def _column(self, field: Field, separator: str) -> Iterator[Part]:
        """Yield the parts of a field that differs within a call: its key and its values."""
        key, column = f'{separator}"{field.name}": ', self.columns[field.fact]
        if field.is_optional:
            yield where_it_applies(key, column, _ABSENT[field.fact])
            return
        yield key
        if field.fact == "dtype":
            yield chosen([f'"{name}"' for name in DTYPES], column)
        elif field.fact == "device_index":
            yield devices(column)
        elif field.fact == "enqueued_epoch_ns":
            yield numbers(column // NS_PER_S)
        elif field.fact in _REALS:
            yield reals(column)
        else:
            yield numbers(column)

    def _text(self, text: Callable[[DescribedCall], str]) -> pl.Series:
        """Return a text for each description that depends only on its call."""
        import polars as pl

        texts = pl.Series([text(call) for call in self.calls], dtype=pl.String)
        return texts.gather(self.columns["call"].astype(np.uint32))


NOTHING = Descriptions(Teller(NO_RANK), (), Columns({"call": np.empty(0, np.int64)}))


def _text_of(fields: Iterable[Field], facts: dict[str, Any]) -> str:
    return json.dumps({field.name: facts[field.fact] for field in fields})[1:-1]


def _known(value: int, absent: int) -> int | None:
    return None if value == absent else value


def _number(value: float) -> float | None:
    return value if value == value else None


def _absent(column: Column, absent: int) -> pl.Series:
    import polars as pl

    series = pl.Series(column)
    return series.set(series == absent, None)
