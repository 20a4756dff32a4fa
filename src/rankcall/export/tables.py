"""Write records as a table: the columns of docs/records.md, and the time on a common clock."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import IO, Any, cast

import numpy as np
import polars as pl
from polars.exceptions import PolarsError

from rankcall.analysis.clocks import RunClocks, align
from rankcall.ring.reader import Ring
from rankcall.run.load import Progress, Run

_MOMENT = pl.Datetime("ns", "UTC")
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%S%.9fZ"


def write_parquet(run: Run, out: IO[bytes], progress: Progress | None = None) -> None:
    """Write a Parquet file, compressed with zstd; a row group holds the records of some ranks."""
    with _watched(out) as file:
        _stream(run, progress).sink_parquet(file, compression="zstd", compression_level=1)


def write_jsonl(run: Run, out: IO[bytes], progress: Progress | None = None) -> None:
    """Write one JSON object per record and line; an absent value is null."""
    text = pl.col("enqueued_at").dt.strftime(_TIME_FORMAT)
    with _watched(out) as file:
        _stream(run, progress).with_columns(text).sink_ndjson(file)


class _Watched(io.RawIOBase):
    """A file that keeps its last write error, because the error that Polars raises says less."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            return self._out.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        pass  # the code that opened the file flushes it


@contextlib.contextmanager
def _watched(out: IO[bytes]) -> Iterator[IO[bytes]]:
    """Raise the file's own error instead of the one that Polars makes of it."""
    file = _Watched(out)
    try:
        yield cast(IO[bytes], file)
    except (PolarsError, OSError) as error:
        raise file.error or error from None


def _stream(run: Run, progress: Progress | None) -> pl.LazyFrame:
    """Return the records of all rings. Polars reads one ring at a time while it writes."""
    from polars.io.plugins import register_io_source

    clocks = align(run)

    def rings(
        columns: list[str] | None, where: pl.Expr | None, rows: int | None, batch: int | None
    ) -> Iterator[pl.DataFrame]:
        for ring in run.iter_rings(progress):
            frame = _frame(run, ring, clocks)
            yield frame if columns is None else frame.select(columns)

    schema = _frame(run, run.heads[0].without_records(), clocks).schema
    source: Callable[..., Any] = rings
    return register_io_source(source, schema=schema)


def _frame(run: Run, ring: Ring, clocks: RunClocks) -> pl.DataFrame:
    mono = np.ascontiguousarray(ring.records["enqueued_ns"])
    moments = pl.Series("enqueued_at", clocks.epoch_ns(ring.header, mono))
    if not mono.all():
        moments = moments.set(moments == 0, None)
    moments = moments.cast(_MOMENT)
    return run.frame(ring).insert_column(3, moments)
