"""Switches, lines, files, the guard round a sink, and sinks by name, without a job."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from tracing import Clock, no_file_beyond, origin, some

from rankcall.errors import ExtraMissingError
from rankcall.trace import (
    JsonLines,
    MemorySink,
    Mode,
    OpenTelemetry,
    Origin,
    PrometheusNode,
    Stdout,
)
from rankcall.trace.descriptions import DescribedCall, Descriptions, Teller
from rankcall.trace.sinks import by_name, optional
from rankcall.trace.sinks.by_name import make_sink
from rankcall.trace.sinks.guard import RETRY_SECONDS, Guarded
from rankcall.trace.switches import settle


@pytest.mark.parametrize("text", ["all", "All", " ALL ", Mode.ALL])
def test_modes_in_any_case(text: str) -> None:
    """A mode is found however it is written."""
    assert settle(text, None).mode is Mode.ALL


def test_a_wrong_mode_lists_the_right_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says where the value came from."""
    with pytest.raises(ValueError, match=r"mode must be one of ALL, CROSSNODE, NONE .* 'SOME'"):
        settle("SOME", None)
    monkeypatch.setenv("TORCH_DISTRIBUTED_TRACING", "cross")
    with pytest.raises(ValueError, match="TORCH_DISTRIBUTED_TRACING must be one of ALL, CROSS"):
        settle(None, None)
    with pytest.raises(TypeError, match="print_"):
        settle("ALL", "yes")  # type: ignore[arg-type]


def test_variables_count_where_arguments_do_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments win over variables; the defaults are CROSSNODE, silent, unknown."""
    plain = settle(None, None)
    assert (plain.mode, plain.print_, plain.gpu_serial) == (Mode.CROSSNODE, False, "unknown")
    for yes in ("true", "1", "T", "Y", "Yes", " TRUE "):
        monkeypatch.setenv("TORCH_DISTRIBUTED_TRACING_PRINT", yes)
        assert settle(None, None).print_
        assert not settle(None, False).print_
    for no in ("", "0", "no", "false", "on"):
        monkeypatch.setenv("TORCH_DISTRIBUTED_TRACING_PRINT", no)
        assert not settle(None, None).print_
    monkeypatch.setenv("TORCH_DISTRIBUTED_TRACING", "none")
    monkeypatch.setenv("VM_ID", "vm-1")
    assert settle(None, None).mode is Mode.NONE
    assert settle("all", None).mode is Mode.ALL
    assert settle(None, None).vm_id == "vm-1"


def test_lines_are_what_json_makes_of_the_dicts() -> None:
    """The same values in the same order, however hostile the names."""
    batch = some(500)
    lines = batch.lines().splitlines()
    assert [json.loads(line) for line in lines] == list(batch)
    assert [list(json.loads(line)) for line in lines] == [
        list(description) for description in batch
    ]
    assert some(0).lines() == b""
    for first in range(8):  # columns in which nothing differs are written another way
        single = some(1, first)
        columns = {name: np.repeat(column, 3) for name, column in single.columns.items()}
        alike = Descriptions(single.teller, single.calls, columns)
        assert [json.loads(line) for line in alike.lines().splitlines()] == list(alike)
        alike.columns["seq"][1] += 1
        assert [json.loads(line) for line in alike.lines().splitlines()] == list(alike)


def test_the_frame_says_the_same() -> None:
    """As a table: the facts, and the fields of a description; null if one does not apply."""
    calls = (DescribedCall("send", "a.py:1", "0", (0, 1, 2, 5)),) * 2
    batch = Descriptions(Teller(3), calls, some(50).columns)
    rows = batch.frame().to_dicts()
    for row, facts, description in zip(rows, batch.facts(), batch, strict=True):
        assert row.pop("group_ranks") == "0-2,5"
        del facts["group_ranks"], description["group_ranks"]
        assert {name: row[name] for name in facts if name in row} == {
            name: value for name, value in facts.items() if name in row
        }
        assert facts.keys() - row.keys() == {"in_flight", "failed", "prints", "first"}
        assert row.pop("device") == str(description.pop("device"))
        assert {name: value for name, value in row.items() if name in description} == description
        assert all(row[name] is None for name in row.keys() - description.keys() - facts.keys())


def test_names_of_version_0_1() -> None:
    """They give the same values, and warn."""
    batch = some(5)
    for old, new in (("kind", "call"), ("message_size", "message_bytes"), ("peer_rank", "peer")):
        with pytest.warns(DeprecationWarning, match=f'columns."{old}".* use columns."{new}"'):
            assert batch.columns[old] is batch.columns[new]
    with pytest.raises(KeyError):
        batch.columns["size"]
    with pytest.warns(DeprecationWarning, match="use Descriptions.calls"):
        (first, *_) = batch.kinds
    with pytest.warns(DeprecationWarning, match="use DescribedCall"):
        assert (first.name, first.source_line) == (first.op, first.call_site)


def test_stdout_prints_what_is_its_to_print(capsys: pytest.CaptureFixture[str]) -> None:
    """It leaves out the lines that other ranks print."""
    Stdout().write(some(10))
    printed = [json.loads(line)["seq"] for line in capsys.readouterr().out.splitlines()]
    assert printed == [1, 3, 5, 7, 9]


def test_a_file_rotates_and_stays_bounded(tmp_path: Path) -> None:
    """Whole lines in each, the newest in the file itself, no more files than asked for."""
    sink = JsonLines(tmp_path / "x.jsonl", max_mib=0.01, keep=2)
    sink.open(origin())
    for first in range(0, 300, 10):
        sink.write(some(10, first))
    sink.close()
    names = ["x.rank-3.jsonl.2", "x.rank-3.jsonl.1", "x.rank-3.jsonl"]
    assert sorted(names) == sorted(path.name for path in tmp_path.iterdir())
    seqs = []
    for name in names:
        assert (tmp_path / name).stat().st_size <= 0.01 * (1 << 20)
        seqs += [json.loads(line)["seq"] for line in (tmp_path / name).read_text().splitlines()]
    assert seqs == list(range(seqs[0], 301))
    assert len(seqs) < 300


def test_lines_longer_than_a_file_are_written_all_the_same(tmp_path: Path) -> None:
    """One a file."""
    sink = JsonLines(tmp_path / "x-{rank}.jsonl", max_mib=1e-5, keep=100)
    sink.open(origin())
    sink.write(some(5))
    sink.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 5
    assert all(len(path.read_text().splitlines()) == 1 for path in files)


def test_where_files_go(tmp_path: Path) -> None:
    """In the run directory, or as asked, with the rank in the name."""
    for asked, name in (
        (None, "trace/rank-00003.attempt-1.jsonl"),
        (tmp_path / "x.jsonl", "x.rank-3.jsonl"),
        (tmp_path / "{host}" / "{rank}-{attempt}", "node_a/3-1"),
    ):
        sink = JsonLines(asked)
        sink.open(origin(tmp_path))
        sink.close()
        assert sink.path == tmp_path / name
        assert sink.path.exists()
    with pytest.raises(ValueError, match="max_mib"):
        JsonLines(max_mib=0)
    with pytest.raises(ValueError, match="keep"):
        JsonLines(keep=-1)


def test_a_disk_that_fills(tmp_path: Path) -> None:
    """A failed write leaves no incomplete line; the next one, with room, writes all lines."""
    sink = JsonLines(tmp_path / "x-{rank}.jsonl")
    sink.open(origin())
    sink.write(some(10))
    whole = sink.path.read_bytes()  # type: ignore[union-attr]
    batch = some(10, first=10)
    with no_file_beyond(len(whole) + 500), pytest.raises(OSError, match="large"):
        sink.write(batch)
    assert sink.path.read_bytes() == whole  # type: ignore[union-attr]
    sink.write(batch)
    sink.close()
    lines = sink.path.read_text().splitlines()  # type: ignore[union-attr]
    assert [json.loads(line)["seq"] for line in lines] == list(range(1, 21))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_device_is_reported_as_such() -> None:
    """ENOSPC comes through, for the guard to try again."""
    sink = JsonLines("/dev/full")
    sink.path, sink._fd = Path("/dev/full"), os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError, match="No space left"):
        sink.write(some())
    sink.close()


class Fails(MemorySink):
    """Raises a given number of times."""

    def __init__(self, times: int, error: BaseException, when: str = "write") -> None:
        super().__init__()
        self.times, self.error, self.when = times, error, when

    def _maybe(self, when: str) -> None:
        if when == self.when and self.times:
            self.times -= 1
            raise self.error

    def open(self, origin: Origin) -> None:
        self._maybe("open")
        super().open(origin)

    def write(self, descriptions: Descriptions) -> None:
        self._maybe("write")
        super().write(descriptions)


@pytest.mark.parametrize("when", ["open", "write"])
def test_a_sink_that_recovers_misses_nothing(when: str, caplog: pytest.LogCaptureFixture) -> None:
    """Tried again after a while, not at once, and in order; nothing is logged."""
    sink, clock = Fails(3, OSError("gone"), when), Clock()
    guard = Guarded(sink, clock)
    for number, wait in enumerate((0.0, *RETRY_SECONDS)):
        clock.now += wait + 0.001
        guard.deliver(some(1, number), origin())
        guard.deliver(None, origin())  # too soon: not a try
    assert [description["seq"] for description in sink.descriptions] == [1, 2, 3, 4]
    guard.close(origin())
    assert sink.closed
    assert not caplog.records


@pytest.mark.parametrize("error", [OSError("collector gone"), ValueError("bug"), SystemExit(1)])
def test_a_sink_that_does_not_recover_is_dropped_once(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """It is closed, the lost ops are counted, and it is never called again."""
    sink, clock = Fails(100, error), Clock()
    guard = Guarded(sink, clock)
    for number in range(20):
        guard.deliver(some(2, 2 * number), origin())
        clock.now += 10
    assert guard.is_dropped
    assert sink.closed
    assert sink.times == 100 - 1 - len(RETRY_SECONDS)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "Fails failed 4 times and is dropped (8 ops not written)" in record.message
    assert str(error) in record.message
    guard.close(origin())
    assert len(caplog.records) == 1


def test_a_failing_sink_does_not_keep_everything() -> None:
    """Its queue is bounded: the oldest batches are dropped first."""
    sink, clock = Fails(2, OSError("slow")), Clock()
    guard = Guarded(sink, clock)
    big = some(20_000)
    for _ in range(10):
        guard.deliver(big, origin())
    clock.now += 10
    guard.deliver(None, origin())
    clock.now += 10
    guard.deliver(None, origin())
    assert len(sink.descriptions) == 3 * 20_000


def test_frames_of_nothing_have_the_columns() -> None:
    """An empty batch is a table with no rows."""
    assert some(0).frame().columns == some(1).frame().columns
    assert isinstance(some(0).frame(), pl.DataFrame)


class Offered:
    """An entry point, without a package."""

    def __init__(self, name: str, load: object) -> None:
        self.name, self.load = name, lambda: load


def test_sinks_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours, and what installed packages offer; an unknown name lists them all."""
    installed = [Offered("mine", MemorySink), Offered("no-sink", dict)]
    offered = {by_name.ENTRY_POINTS: installed}
    monkeypatch.setattr(by_name, "entry_points", lambda group: offered.get(group, []))
    assert isinstance(make_sink("jsonl"), JsonLines)
    assert isinstance(make_sink("mine"), MemorySink)
    with pytest.raises(ValueError, match="'csv': one of jsonl, mine, no-sink, nvtx, otel"):
        make_sink("csv")
    with pytest.raises(TypeError, match="'no-sink' has no open, write and close: dict"):
        make_sink("no-sink")


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the sink is made, not in the middle of the job."""

    def gone(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(optional.importlib, "import_module", gone)
    with pytest.raises(ExtraMissingError, match=r"pip install 'rankcall\[prometheus\]'"):
        PrometheusNode()
    with pytest.raises(ExtraMissingError, match=r"pip install 'rankcall\[otel\]'"):
        OpenTelemetry()
