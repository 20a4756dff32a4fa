"""Parquet: the history on disk, read back by Polars and by DuckDB."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from tracing import Clock, no_file_beyond, origin
from worlds import MS, Call, write_world

from rankcall.run.load import load
from rankcall.trace import Parquet
from rankcall.trace.sinks.guard import Guarded


def world(folder: Path, ranks: int, count: int) -> Path:
    """Write a run of all_reduces of three sizes."""
    calls = [
        Call(rank, seq, seq * MS, seq * MS + 1000 * (seq % 3 + 1), bytes=4096 * (seq % 3))
        for rank in range(ranks)
        for seq in range(1, count + 1)
    ]
    return write_world(folder, calls)


def test_history_reads_back(tmp_path: Path) -> None:
    """Segments hold all records, as Run.records has them; by Polars and by DuckDB."""
    duckdb = pytest.importorskip("duckdb")
    run = load(world(tmp_path / "run", ranks=2, count=300))
    for ring in run.rings:
        sink = Parquet(tmp_path / "history", rows=100)
        sink.open(origin(tmp_path, ring.header.rank))
        for first in range(0, 300, 30):
            ring_part = type(ring)(
                ring.path, ring.header, ring.records[first : first + 30], ring.tables, 0
            )
            sink.write_records(ring_part)
        sink.close()
    files = sorted((tmp_path / "history").iterdir())
    assert [path.name[:10] for path in files] == ["rank-00000"] * 3 + ["rank-00001"] * 3
    whole = run.records.with_columns(pl.col(pl.Categorical, pl.Enum).cast(pl.String))
    read = pl.read_parquet(files).with_columns(pl.col(pl.Categorical, pl.Enum).cast(pl.String))
    order = ["rank", "index"]
    assert read.sort(order).equals(whole.sort(order))
    rows = duckdb.sql(
        f"select rank, count(*), sum(message_bytes) from '{tmp_path}/history/*.parquet' "
        "group by rank order by rank"
    ).fetchall()
    totals = whole.group_by("rank").agg(pl.len(), pl.col("message_bytes").sum()).sort("rank")
    assert rows == totals.rows()


def test_a_segment_is_whole_or_not_there(tmp_path: Path) -> None:
    """A segment that cannot be written leaves no file; no record is lost or comes twice."""
    (ring,) = load(world(tmp_path / "run", ranks=1, count=40)).rings
    clock = Clock()
    sink = Parquet(tmp_path / "history", rows=1000, seconds=5, clock=clock)
    guard = Guarded(sink, clock)
    parts = [
        type(ring)(ring.path, ring.header, ring.records[first : first + 10], ring.tables, 0)
        for first in range(0, 40, 10)
    ]
    rank_origin = origin(tmp_path)
    guard.deliver(parts[0], rank_origin)
    folder = tmp_path / "history"
    folder.rmdir()
    clock.now += 6
    guard.deliver(parts[1], rank_origin)  # time for a segment: there is no folder
    assert not folder.exists()
    guard.deliver(parts[2], rank_origin)
    folder.mkdir()
    clock.now += 1
    guard.deliver(parts[3], rank_origin)
    guard.close(rank_origin)
    assert all(path.suffix == ".parquet" for path in folder.iterdir())
    assert pl.read_parquet(folder / "*.parquet")["index"].sort().to_list() == list(range(40))
    with pytest.raises(ValueError, match="rows"):
        Parquet(rows=0)
    with pytest.raises(ValueError, match="seconds"):
        Parquet(seconds=0)


def test_history_on_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Said once, with the file and why; nothing half stays, and what was written can be read."""
    (ring,) = load(world(tmp_path / "run", ranks=1, count=3000)).rings
    folder, clock = tmp_path / "history", Clock()
    guard = Guarded(Parquet(folder, rows=3000), clock)
    guard.deliver(ring, origin(tmp_path))
    with no_file_beyond(2000):
        for _ in range(6):
            guard.deliver(ring, origin(tmp_path))
            clock.now += 10
    assert guard.is_dropped
    (record,) = caplog.records
    assert record.exc_info is None
    assert "the trace sink Parquet failed 4 times and is dropped" in record.message
    assert "File too large" in record.message
    assert ".000001.parquet" in record.message
    assert [path.name.split(".")[-2:] for path in folder.iterdir()] == [["000000", "parquet"]]
    assert pl.read_parquet(folder / "*.parquet").height == 3000


def test_a_segment_over_two_recordings(tmp_path: Path) -> None:
    """Each record has the names of its own recording: ids count anew in each."""
    runs = [
        load(write_world(tmp_path / name, [Call(0, 1, 0, MS, line=line)]))
        for name, line in (("a", 7), ("b", 8))
    ]
    sink = Parquet(tmp_path / "history")
    sink.open(origin(tmp_path, 0))
    for run in (runs[0], runs[0], runs[1]):
        sink.write_records(run.rings[0])
    sink.close()
    (file,) = (tmp_path / "history").iterdir()
    assert pl.read_parquet(file)["call_site"].cast(pl.String).to_list() == [
        f"train.py:{line}" for line in (7, 7, 8)
    ]
