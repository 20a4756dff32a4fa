"""The Perfetto trace: decoded by Perfetto's own protobuf, and asked through its trace processor."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import trace_processor
from hypothesis import given
from hypothesis import strategies as st
from worlds import MS, PAIR, Call, group_of, together, write_world

from rankcall.export import export
from rankcall.export.perfetto_tracks import track_numbers
from rankcall.export.protobuf import Messages, number, text
from rankcall.record import FLAG_ABANDONED, FLAG_ANY_SOURCE, FLAG_DEVICE
from rankcall.ring.tables import Group
from rankcall.run.load import load
from rankcall.testing.model import Op
from rankcall.testing.synthetic import EPOCH_NS, synthetic_run

PROGRAM = (
    Op(message_bytes=1 << 20, line=41),
    Op("all_gather", 1 << 16, family="tp", line=57, function="forward"),
    Op("exchange", 4096, family="pp", line=90),
    Op("broadcast", 64, line=12),
)
FAMILIES = {"tp": [[0, 1], [2, 3]], "pp": [[0, 2], [1, 3]]}


@pytest.fixture(scope="module")
def processor() -> Iterator[trace_processor.Processor]:
    """Return the trace processor; starting it takes a second."""
    with trace_processor.running() as started:
        yield started


def trace_of(run: Path) -> bytes:
    """Export a run and return the file's bytes."""
    target = run.parent / "run.perfetto-trace"
    export(load(run), "perfetto", target)
    return target.read_bytes()


def decoded(trace: bytes) -> list[Any]:
    """Return all packets, unpacked, by Perfetto's protobuf definitions."""
    proto = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    outer = proto.Trace.FromString(trace)
    return [
        packet
        for packed in outer.packet
        for packet in proto.Trace.FromString(zlib.decompress(packed.compressed_packets)).packet
    ]


def test_an_end_that_cannot_be_known(tmp_path: Path) -> None:
    """The slice of such an op ends at once and says so; that of an op in flight has no end."""
    calls = [
        Call(0, 1, 0, MS),
        Call(0, 2, 2 * MS, None, flags=FLAG_DEVICE | FLAG_ABANDONED),
        Call(0, 3, 3 * MS, None, flags=FLAG_DEVICE),
    ]
    events = [
        packet.track_event
        for packet in decoded(trace_of(write_world(tmp_path / "run", calls)))
        if packet.HasField("track_event")
    ]
    begins = [event for event in events if event.type == event.TYPE_SLICE_BEGIN]
    unknown = [
        [detail.bool_value for detail in event.debug_annotations if detail.HasField("bool_value")]
        for event in begins
    ]
    assert unknown == [[], [True], [True]]
    assert sum(event.type == event.TYPE_SLICE_END for event in events) == 2


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=9), st.integers(1, 200))
def test_rows_are_protobuf(values: list[int], tag: int) -> None:
    """Numbers that are longer than they need to be are read by the protobuf library as they are."""
    proto = pytest.importorskip("google.protobuf.unknown_fields")
    from google.protobuf.empty_pb2 import Empty

    inner = (
        Messages(len(values)).numbers(tag, np.array(values)).constant(text(3, "x") + number(4, 300))
    )
    rows = Messages(len(values)).messages(tag + 1, inner).fixed64(5, np.array(values, np.uint64))
    for value, raw in zip(values, rows.matrix(), strict=True):
        message, fixed = proto.UnknownFieldSet(Empty.FromString(raw.tobytes()))
        assert (message.field_number, fixed.data) == (tag + 1, value)
        fields = list(proto.UnknownFieldSet(Empty.FromString(message.data)))
        assert [field.data for field in fields] == [value, b"x", 300]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=40))
def test_ops_of_a_track_do_not_overlap(spans: list[tuple[int, int]]) -> None:
    """No two intervals of one track overlap or touch, and no more tracks than needed are used."""
    spans.sort()
    start = np.array([a for a, _ in spans], np.int64)
    end = start + np.array([length for _, length in spans], np.int64)
    numbers = track_numbers(start, end)
    for track in set(numbers.tolist()):
        rows = np.flatnonzero(numbers == track)
        assert np.all(start[rows][1:] > end[rows][:-1])
    deepest = max((int(((start <= t) & (t <= end)).sum()) for t in start), default=0)
    assert len(set(numbers.tolist())) == deepest


def test_decodes_without_a_browser(tmp_path: Path) -> None:
    """Every record is a begin and an end event at its times, with its source line."""
    truth = synthetic_run(tmp_path / "run", 4, 40, program=PROGRAM, groups=FAMILIES)
    packets = decoded(trace_of(tmp_path / "run"))
    events = [packet for packet in packets if packet.HasField("track_event")]
    records = load(tmp_path / "run").records
    assert Counter(event.track_event.type for event in events) == {
        1: len(records),
        2: len(records),
    }
    begins = sorted({event.timestamp for event in events if event.track_event.type == 1})
    assert begins == sorted({EPOCH_NS + int(t) for t in truth.arrivals[truth.arrivals >= 0]})
    lines = {
        site.line_number for packet in packets for site in packet.interned_data.source_locations
    }
    assert lines == {12, 41, 57, 90}


def test_the_trace_processor_agrees(processor: Any, tmp_path: Path) -> None:
    """Slices, tracks, processes, arguments and arrows are those of the records."""
    run = tmp_path / "run"
    truth = synthetic_run(
        run,
        4,
        400,
        hosts=["node-a", "node-b"],
        program=PROGRAM,
        groups=FAMILIES,
        clock_offsets_ns=[0, 1_000_000_000],
    )
    processor.load(trace_of(run))
    assert processor.query("select * from stats where value > 0 and severity != 'info'") == []
    records = load(run).records
    assert {row["name"] for row in processor.query("select name from process where pid > 0")} == {
        "host node-a",
        "host node-b",
    }
    tracks = processor.query(
        "select t.name, p.name as parent, count(*) as n, sum(dur) as total from slice s "
        "join track t on s.track_id = t.id join track p on t.parent_id = p.id "
        "group by 1, 2 order by 1, 2"
    )
    expected = (
        records.with_columns(
            pl.format("{} ({})", pl.col("group").cast(pl.String), "group_ranks").alias("name"),
            pl.format("rank {}", "rank").alias("parent"),
            (pl.col("completed_ns") - pl.col("started_ns")).alias("total"),
        )
        .group_by("name", "parent")
        .agg(pl.len().alias("n"), pl.col("total").sum())
        .sort("name", "parent")
    )
    assert [dict(row) for row in tracks] == expected.to_dicts()
    assert processor.query("select max(depth) as d from slice") == [{"d": 0}]
    # Members of a collective are joined in a chain; a send and its receive are a pair.
    flows = processor.query(
        "select o.name as a, i.name as b, count(*) as n from flow f "
        "join slice o on f.slice_out = o.id join slice i on f.slice_in = i.id "
        "group by 1, 2"
    )
    joined: Counter[str] = Counter()
    for row in flows:
        assert row["a"] == row["b"] or {row["a"], row["b"]} == {"send", "recv"}
        joined["p2p" if row["a"] != row["b"] else row["a"]] += row["n"]
    assert joined == {"all_reduce": 300, "broadcast": 300, "all_gather": 200, "p2p": 400}
    _on_one_clock(processor, truth.ends)


def _on_one_clock(processor: Any, ends: np.ndarray) -> None:
    """All members of an all_reduce end at the right times, though clocks differ by a second."""
    rows = processor.query(
        "select p.name as parent, s.ts + s.dur as until from slice s join track t on "
        "s.track_id = t.id join track p on t.parent_id = p.id "
        "where s.name = 'all_reduce' order by 1, 2"
    )
    end_times = np.array([row["until"] for row in rows]).reshape(4, -1) - EPOCH_NS
    assert np.abs(end_times - ends[::4].T).max() < 100_000


def test_what_a_click_shows(processor: Any, tmp_path: Path) -> None:
    """Arguments are those of the record; fields that do not apply are left out."""
    calls = [
        Call(0, 1, 0, MS, "send", 256, peer=1, tag=3, line=9),
        *together(1, [0, MS], 3 * MS, Group("g", 0, "gloo", "tp", (1, 0)), op="broadcast", root=0),
    ]
    processor.load(trace_of(write_world(tmp_path / "run", calls)))
    rows = processor.query(
        "select s.name as op, a.key as key, a.display_value as value from slice s "
        "join args a using (arg_set_id) where key glob 'debug.*' or key glob 'source.*'"
    )
    send = {row["key"]: row["value"] for row in rows if row["op"] == "send"}
    assert send == {
        "debug.seq": "1",
        "debug.step": "0",
        "debug.message_bytes": "256",
        "debug.peer": "1",
        "debug.dtype": "float32",
        "debug.status": "completed",
        "source.file_name": "train.py",
        "source.function_name": "step",
        "source.line_number": "9",
    }
    broadcast = {row["key"]: row["value"] for row in rows if row["op"] == "broadcast"}
    assert broadcast["debug.root"] == "1"  # the group's first member is global rank 1
    assert "debug.peer" not in broadcast


def test_unfinished_overlapping_and_odd(processor: Any, tmp_path: Path) -> None:
    """An op in flight has no end; overlapping ops are all at the top; names do no harm."""
    nasty = Group("</script>\x00'\"\udcff", 0, "gloo", "d", (0, 1))
    calls = [
        *together(1, [0, 0], 9 * MS, PAIR),
        *together(2, [MS, MS], 8 * MS, PAIR),
        *together(3, [9 * MS, 9 * MS], 10 * MS, PAIR),
        *together(1, [2 * MS, 2 * MS], 3 * MS, nasty),
        Call(1, 0, 11 * MS, None, "recv", flags=FLAG_ANY_SOURCE),
        Call(0, 4, 11 * MS, 12 * MS, status="failed"),
    ]
    processor.load(trace_of(write_world(tmp_path / "run", calls)))
    assert processor.query("select * from stats where value > 0 and severity != 'info'") == []
    rows = processor.query("select name, dur, depth from slice order by ts, id")
    assert {row["depth"] for row in rows} == {0}
    assert [row["name"] for row in rows if row["dur"] < 0] == ["recv"]
    durations = sorted(row["dur"] for row in rows)
    assert durations == [-1, MS, MS, MS, MS, MS, 7 * MS, 7 * MS, 9 * MS, 9 * MS]
    status = processor.query(
        "select count(*) as n from args where key = 'debug.status' and display_value = 'failed'"
    )
    assert status == [{"n": 1}]


def test_restarts_have_tracks_of_their_own(processor: Any, tmp_path: Path) -> None:
    """A rank of two attempts is two tracks, and arrows do not join them."""
    group = group_of(2)
    calls = [*together(1, [0, 1], MS, group), *together(1, [0, 1], MS, group, attempt=1)]
    processor.load(trace_of(write_world(tmp_path / "run", calls)))
    names = processor.query("select distinct name from track where name glob 'rank*' order by 1")
    assert [row["name"] for row in names] == [
        "rank 0, attempt 0",
        "rank 0, attempt 1",
        "rank 1, attempt 0",
        "rank 1, attempt 1",
    ]
    assert processor.query("select count(*) as n from flow") == [{"n": 2}]
