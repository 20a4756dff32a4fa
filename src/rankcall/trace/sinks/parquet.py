"""The complete history: every record, in Parquet files that are complete once they exist."""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Callable, Hashable, Sequence
from itertools import groupby
from pathlib import Path

from rankcall import durations
from rankcall.durations import Duration
from rankcall.files import replacing
from rankcall.folders import make_folder
from rankcall.record import concat_rows
from rankcall.ring.reader import Head, Ring
from rankcall.run.load import Run
from rankcall.trace.sinks.optional import load_polars
from rankcall.trace.sinks.protocols import Origin


class Parquet:
    """Keeps every record of this rank, in every mode, in segments ``NAME.000000.parquet``.

    The columns are those of docs/records.md. A segment is compressed with zstd and gets its name
    once it is complete. If the process is killed, the records of the unfinished segment are still
    in the ring, which holds the newest ones.

    Args:
        folder: Where to write; the folder is made. The default is ``history/`` in the run
            directory.
        rows: The number of records at which a segment is written.
        seconds: A segment is also written at the first record that comes this long after its first,
            in seconds or as a ``timedelta``.
        clock: For tests.

    Raises:
        ValueError: ``rows`` or ``seconds`` is not positive.
    """

    sink_name = "parquet"

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        rows: int = 50_000,
        seconds: Duration = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if rows < 1:
            raise ValueError(f"rows must be 1 or more; got {rows}")
        load_polars()
        self._asked = None if folder is None else Path(folder)
        self._rows, self._clock = rows, clock
        self._seconds = durations.seconds(seconds, "seconds")
        self._held: list[Ring] = []
        self._since = 0.0
        self._number = 0
        self._stem = ""
        self.folder = Path()

    def open(self, origin: Origin) -> None:
        """Make the folder."""
        self.folder = self._asked or (origin.run_dir or Path()) / "history"
        if not self.folder.is_dir():
            make_folder(self.folder, private=False)
        host = re.sub(r"[^A-Za-z0-9_.-]+", "_", origin.host)
        self._stem = f"rank-{origin.rank:05d}.attempt-{origin.attempt}.{host}.{os.getpid()}"

    def write_records(self, ring: Ring) -> None:
        """Take the next records; write a segment when it is time."""
        now = self._clock()
        if not self._held:
            self._since = now
        self._held.append(ring)
        full = sum(len(held.records) for held in self._held) >= self._rows
        if full or now - self._since >= self._seconds:
            try:
                self._write_segment()
            except BaseException:
                self._held.pop()  # the caller passes it again
                raise

    def close(self) -> None:
        """Write the remaining records."""
        if self._held:
            self._write_segment()

    def _write_segment(self) -> None:
        import polars as pl

        rings = [_as_one(list(parts)) for _, parts in groupby(self._held, _recording_of)]
        run = Run(self.folder, {}, [Head(ring.path, ring.header, ring.tables) for ring in rings])
        frames = [run.frame(ring) for ring in rings]
        table = pl.concat(frames, how="vertical") if len(frames) > 1 else frames[0]
        data = io.BytesIO()  # Python writes the file: its OSError says more than Polars' error
        table.write_parquet(data, compression="zstd", compression_level=1)
        self._put(self._unused(), data)
        self._held.clear()

    def _put(self, target: Path, data: io.BytesIO) -> None:
        """Write a file that is either complete or absent, even after a crash of the machine."""
        try:
            with replacing(target) as file:
                file.write(data.getbuffer())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if error.filename is None:
                error.filename = str(target)
            raise

    def _unused(self) -> Path:
        while True:
            path = self.folder / f"{self._stem}.{self._number:06d}.parquet"
            if not path.exists():
                return path
            self._number += 1


def _recording_of(ring: Ring) -> Hashable:
    """Return a key that differs between the successive recordings of a process."""
    return ring.path, ring.header.anchor_mono_ns


def _as_one(parts: Sequence[Ring]) -> Ring:
    """Join parts of one recording. Its side tables only grow, so the newest ones are complete."""
    newest, records = parts[-1], concat_rows([part.records for part in parts])
    dropped = sum(part.dropped for part in parts)
    return Ring(newest.path, newest.header, records, newest.tables, dropped)
