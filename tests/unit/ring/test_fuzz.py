"""Reading a ring file with any damage returns its sound records or raises CorruptRunError."""

from __future__ import annotations

import contextlib
import tracemalloc
from pathlib import Path

import polars as pl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ring_fuzz import apply, damages, sound_bytes

from rankcall.analysis.summary import summarise
from rankcall.errors import CorruptRunError
from rankcall.record import OPS, RECORD
from rankcall.report import json as json_report
from rankcall.report import summary_text
from rankcall.ring.reader import read_ring
from rankcall.run.load import load

_MEMORY = 256 << 20  # a group of a million ranks is allowed to exist
_many = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@_many
@given(changes=st.lists(damages, min_size=1, max_size=6))
def test_a_damaged_ring_reads_or_is_corrupt(tmp_path: Path, changes: list) -> None:
    """read_ring returns sound records or raises CorruptRunError; its memory is bounded."""
    path = tmp_path / "x.ring"
    data = apply(changes)
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with contextlib.suppress(CorruptRunError):
            ring = read_ring(path)
            assert len(ring.records) * RECORD.itemsize <= len(data)
            assert ring.dropped >= 0
            assert (ring.records["op"] < len(OPS)).all()
        assert tracemalloc.get_traced_memory()[1] < _MEMORY
    finally:
        tracemalloc.stop()


@_many
@given(changes=st.lists(damages, min_size=1, max_size=6))
def test_a_damaged_run_loads_or_is_corrupt(tmp_path: Path, changes: list) -> None:
    """Tables, the analysis and both reports of a damaged ring come out, or CorruptRunError does."""
    path = tmp_path / "x.ring"
    path.write_bytes(apply(changes))
    with contextlib.suppress(CorruptRunError):
        run = load(path)
        assert len(run.ranks) == 1
        assert run.groups.height >= 0
        assert run.dropped.keys() == {run.heads[0].header.rank}
        assert isinstance(run.records, pl.DataFrame)
        assert run.records.height == run.ranks["records"][0]
        summary = summarise(run)
        assert all(len(line) <= 80 for line in summary_text.render(summary, 80).splitlines())
        assert json_report.render(summary)


@_many
@given(changes=st.lists(damages, min_size=1, max_size=6))
def test_a_damaged_ring_among_sound_ones(tmp_path: Path, changes: list) -> None:
    """One damaged ring does not keep a run from being reported."""
    (tmp_path / "a.ring").write_bytes(sound_bytes())
    (tmp_path / "b.ring").write_bytes(apply(changes))
    summary = summarise(load(tmp_path))
    assert any(row.rank == 1 and row.records for row in summary.ranks)
    assert summary_text.render(summary, 120)
