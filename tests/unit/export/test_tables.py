"""Exported tables, read back by other programs."""

from __future__ import annotations

import io
import json
import os
import threading
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ring_fuzz import SHAPE, Damage, apply, body, damages, sound_bytes
from torchless import without_torch
from worlds import MS, PAIR, Call, together, write_world

import golden
from rankcall.analysis.details import detail
from rankcall.cli import main
from rankcall.errors import ExportError
from rankcall.export import FORMATS, export
from rankcall.record import FLAG_ANY_SOURCE
from rankcall.report.html import render
from rankcall.ring.tables import Group
from rankcall.ring.writer import Identity, PythonRing, create
from rankcall.run.load import load
from rankcall.testing.model import Op
from rankcall.testing.synthetic import EPOCH_NS, synthetic_run

TABLES = ("parquet", "jsonl")
NASTY = Group('a,"b"\n</script>\x1b[31m', 0, "gloo", "tp\t'x'", (0, 1))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return a run with one of everything: unfinished, failed, rooted, p2p, odd names."""
    calls = [
        *together(1, [0, 3 * MS], 4 * MS, PAIR),
        *together(1, [5 * MS, 5 * MS], 6 * MS, NASTY, op="broadcast", root=1, line=7),
        Call(0, 1, 7 * MS, 9 * MS, "send", 256, peer=1, tag=3, line=9),
        Call(1, 1, 7 * MS, 9 * MS, "recv", 256, peer=0, tag=3, line=9),
        Call(1, 0, 9 * MS, None, "recv", 64, flags=FLAG_ANY_SOURCE, line=11),
        Call(0, 2, 9 * MS, 10 * MS, status="failed"),
        Call(1, 2, 9 * MS, None, step=1),
    ]
    return write_world(tmp_path / "run", calls, hosts={0: "node-a", 1: "node-b"})


def written(run: Path, to: str) -> Path:
    """Export a run and return the file."""
    target = run.parent / f"out.{to}"
    export(load(run), to, target)
    return target


def test_golden(small: Path) -> None:
    """The JSON lines equal their golden file."""
    golden.check("export.jsonl", written(small, "jsonl").read_text())


def test_parquet_is_the_records(small: Path) -> None:
    """Polars reads back every column of Run.records, and enqueued_at."""
    exported = pl.read_parquet(written(small, "parquet"))
    expected = load(small).records
    text = pl.selectors.by_dtype(pl.Categorical, pl.Enum)
    assert (
        exported.drop("enqueued_at")
        .with_columns(text.cast(pl.String))
        .equals(expected.with_columns(text.cast(pl.String)))
    )
    assert exported.schema["enqueued_at"] == pl.Datetime("ns", "UTC")


@pytest.mark.parametrize("to", TABLES)
def test_duckdb_counts_the_same(tmp_path: Path, to: str) -> None:
    """DuckDB groups each form into the same figures as Polars does the records."""
    duckdb = pytest.importorskip("duckdb", reason="needs duckdb")
    synthetic_run(tmp_path / "run", 4, 90, hosts=2, program=(Op(), Op("exchange", 64)))
    path = written(tmp_path / "run", to)
    reader = {"parquet": "read_parquet", "jsonl": "read_json"}[to]
    rows = duckdb.sql(
        f"select op, count(*), sum(message_bytes), count(peer) from {reader}('{path}') "
        "group by op order by op"
    ).fetchall()
    records = load(tmp_path / "run").records
    expected = [
        (op, len(part), int(part["message_bytes"].sum()), part["peer"].count())
        for (op,), part in records.group_by(pl.col("op").cast(pl.String))
    ]
    assert rows == sorted(expected)


def test_absent_is_absent(small: Path) -> None:
    """An unknown value is null, and never 0."""
    lines = [json.loads(line) for line in written(small, "jsonl").read_text().splitlines()]
    open_ends = [row for row in lines if row["status"] == "started"]
    assert [row["completed_ns"] for row in open_ends] == [None, None]
    assert [row["peer"] for row in open_ends] == [None, None]
    assert {row["device_ms"] for row in lines} == {None}
    assert {row["group"] for row in lines} == {"0", NASTY.name}


def test_moments_are_on_one_clock(tmp_path: Path) -> None:
    """Hosts a second apart: enqueued_at is right to less than a tenth of a millisecond."""
    truth = synthetic_run(
        tmp_path / "run", 4, 400, hosts=2, clock_offsets_ns=[0, 1_000_000_000], program=(Op(),)
    )
    exported = pl.read_parquet(written(tmp_path / "run", "parquet"))
    for rank in range(4):
        mine = exported.filter(pl.col("rank") == rank)["enqueued_at"].dt.timestamp("ns").to_numpy()
        error = mine - EPOCH_NS - truth.arrivals[:, rank]
        assert np.abs(error).max() < 100_000


@pytest.mark.parametrize("to", FORMATS)
def test_a_run_that_is_being_written(tmp_path: Path, to: str) -> None:
    """An export of a ring that is being overwritten is complete, and leaves the ring alone."""
    (tmp_path / "run" / "rings").mkdir(parents=True)
    path = tmp_path / "run" / "rings" / "live.ring"
    ring = PythonRing(create(path, Identity(rank=0, world_size=1, host="h"), SHAPE), SHAPE)
    known, go_on, issued = ring.group(PAIR), threading.Event(), 0

    def write() -> None:
        nonlocal issued
        while not go_on.is_set():
            issued += 1
            index = ring.issue(body(seq=issued, enqueued_ns=issued, op=1, group=known))
            ring.finish(index, 2, issued + 1)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        files = [written(tmp_path / "run", to).read_bytes() for _ in range(5)]
    finally:
        go_on.set()
        writer.join()
    assert all(files)
    if to == "parquet":
        seqs = pl.read_parquet(files[-1])["seq"]
        assert 0 < len(seqs) <= 64
        assert seqs.is_sorted()
    known_after = load(tmp_path / "run").records
    assert known_after["seq"].max() == issued


def test_a_group_made_since_load(small: Path) -> None:
    """A live job may make a group between the two readings; it is exported under its own name."""
    run = load(small)
    for head in run.heads:
        head.tables.groups.clear()
    assert run.run_groups == {}
    export(run, "jsonl", small.parent / "x.jsonl")
    lines = (small.parent / "x.jsonl").read_text().splitlines()
    groups = {json.loads(line)["group"] for line in lines}
    assert groups == {"0", NASTY.name}


@pytest.mark.parametrize("to", FORMATS)
def test_a_full_disk(small: Path, to: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error is one clear line, and the status is 2."""
    assert main(["export", str(small), "--to", to, "-o", "/dev/full"]) == 2
    err = capsys.readouterr().err
    assert err == "rankcall: error: /dev/full: cannot be written: No space left on device\n"


@pytest.mark.parametrize("to", FORMATS)
def test_half_a_file_is_never_left(small: Path, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an export fails, an earlier file of that name stays, and no other file is left."""
    target = written(small, to)
    before = target.read_bytes()

    def fail(run: object, ring: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rankcall.run.load.Run.iter_rings", lambda self, progress=None: fail(0, 0))
    with pytest.raises(ExportError, match="No space left on device"):
        export(load(small), to, target)
    assert target.read_bytes() == before
    assert {path.name for path in small.parent.iterdir()} == {"run", target.name}


def test_wrong_usage(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown format lists those there are; so does a missing one, and a missing folder."""
    assert main(["export", str(small), "--to", "xls"]) == 2
    assert "one of perfetto, parquet, jsonl" in capsys.readouterr().err
    assert main(["export", str(small)]) == 2
    assert "--to" in capsys.readouterr().err
    assert main(["export", str(small), "--to", "jsonl", "-o", "/nowhere/x.jsonl"]) == 2
    assert "/nowhere/x.jsonl: cannot be written: No such file" in capsys.readouterr().err
    with pytest.raises(ValueError, match="parquet"):
        export(load(small), "xls", small)


def test_the_command(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without -o the file is named after the run, and the output names it."""
    monkeypatch.chdir(small.parent)
    assert main(["export", "--to", "jsonl", str(small)]) == 0
    assert capsys.readouterr().out.startswith("run.jsonl: 9 records, ")
    assert len(Path("run.jsonl").read_text().splitlines()) == 9


def test_problems_are_told(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A ring that cannot be read is left out and named on stderr, and the status is 1."""
    (small / "rings" / "bad.ring").write_bytes(b"nothing")
    assert main(["export", "--to", "jsonl", "-o", str(small / "x.jsonl"), str(small)]) == 1
    out, err = capsys.readouterr()
    assert "9 records" in out
    assert "bad.ring: not a rankcall ring file" in err


def test_stdout_and_no_torch(small: Path) -> None:
    """``-o -`` writes to a pipe; torch is not needed; a closed pipe is no error."""
    export = ("export", "--to", "jsonl", "-o", "-", small)
    done = without_torch(*export)
    assert (done.returncode, done.stderr) == (0, b"")
    assert len([json.loads(line) for line in done.stdout.splitlines()]) == 9
    read, write = os.pipe()
    os.close(read)
    done = without_torch(*export, stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_nothing_recorded(tmp_path: Path) -> None:
    """A run without records is a table without rows, with all columns."""
    run = write_world(tmp_path / "run", [], ranks=[0, 1])
    assert pl.read_parquet(written(run, "parquet")).shape[0] == 0
    assert pl.read_parquet(written(run, "parquet")).columns[:4] == [
        *("rank", "attempt", "host", "enqueued_at")
    ]
    assert written(run, "jsonl").read_text() == ""


def test_hostile_text(tmp_path: Path) -> None:
    """A name that is not valid Unicode (possible in JSON) does not stop an export."""
    lone = Group("\udcff" + "x" * 3, 0, "gloo", "d", (0, 1))
    run = write_world(tmp_path / "run", together(1, [0, 1], MS, lone))
    for to in FORMATS:
        assert written(run, to).stat().st_size > 0
    line = json.loads(written(run, "jsonl").read_text().splitlines()[0])
    assert line["group"] == "?xxx"


@settings(suppress_health_check=list(HealthCheck), max_examples=20)
@given(changes=st.lists(damages, min_size=1, max_size=6))
def test_damaged_rings(tmp_path: Path, changes: list[Damage]) -> None:
    """If one ring is damaged in any way, the sound one is still exported in every format."""
    (tmp_path / "a.ring").write_bytes(sound_bytes())
    (tmp_path / "b.ring").write_bytes(apply(changes))
    run = load(tmp_path)
    for to in FORMATS:
        target = io.BytesIO()
        export(run, to, target)
        assert target.getvalue()
    assert render(detail(run)).endswith("</html>")
