"""Runs as traces of torch.profiler: all fields, and what HolisticTraceAnalysis reads."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from worlds import MS, PAIR, Call, together, write_world

from rankcall.export import export
from rankcall.record import FLAG_DEVICE
from rankcall.run.load import load
from rankcall.testing.model import Op
from rankcall.testing.synthetic import synthetic_run

GROUPS = {"tp": [[0, 1], [2, 3]], "dp": [[0, 2], [1, 3]]}
PROGRAM = (
    Op(message_bytes=1 << 20),
    Op("all_gather", message_bytes=1 << 16, family="tp", line=11),
    Op("reduce_scatter", message_bytes=1 << 16, family="dp", line=12),
    Op("barrier", message_bytes=1, line=13),
)
# What torch/csrc/profiler/util.h calls the fields of an op.
FIELDS = {
    "Collective name",
    "dtype",
    "In msg nelems",
    "Out msg nelems",
    "Group size",
    "Process Group Name",
    "Process Group Description",
    "Process Group Ranks",
    "Rank",
    "Seq",
    "Is asynchronized op",
}


def traces_of(run: Path, folder: Path) -> dict[int, dict[str, Any]]:
    """Export a run and return its traces by rank."""
    export(load(run), "kineto", folder)
    traces = {}
    for path in folder.iterdir():
        trace = json.loads(gzip.decompress(path.read_bytes()))
        traces[trace["distributedInfo"]["rank"]] = trace
    return traces


def of_kind(trace: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """Return the events of one category."""
    return [event for event in trace["traceEvents"] if event.get("cat") == kind]


def test_each_op_is_an_event_with_the_fields_of_the_profiler(tmp_path: Path) -> None:
    """Ops, numbers, sizes, groups, times and durations are those of the records."""
    synthetic_run(tmp_path / "run", 4, 60, hosts=2, groups=GROUPS, program=PROGRAM)
    run = load(tmp_path / "run")
    traces = traces_of(tmp_path / "run", tmp_path / "traces")
    assert sorted(traces) == [0, 1, 2, 3]
    for rank, trace in traces.items():
        records = run.records.filter(run.records["rank"] == rank).to_dicts()
        issued, kernels = of_kind(trace, "cpu_op"), of_kind(trace, "kernel")
        assert len(issued) == len(kernels) == len(records) == 60
        for record, op, kernel in zip(records, issued, kernels, strict=True):
            fields = kernel["args"]
            assert set(fields) >= FIELDS | {"External id", "correlation", "stream"}
            assert op["args"]["External id"] == fields["External id"]
            name = fields["Collective name"].replace("_", "").removesuffix("base")
            assert name == record["op"].replace("_", "")
            assert kernel["name"].startswith("ncclDevKernel_")
            assert fields["Seq"] == record["seq"]
            width = 4 if record["dtype"] == "float32" else 1
            assert fields["In msg nelems"] * width == record["in_bytes"]
            assert json.loads(fields["Process Group Ranks"])[fields["Rank"]] == rank
            assert fields["Group size"] == len(json.loads(fields["Process Group Ranks"]))
            lasts = record["completed_ns"] - record["started_ns"]
            assert kernel["dur"] * 1e3 == pytest.approx(lasts, abs=1)


def test_events_of_one_stream_do_not_overlap(tmp_path: Path) -> None:
    """Viewers draw a stream as one row: ops that overlap are on different streams."""
    calls = [
        *together(1, [0, 0], 10 * MS, PAIR),
        *together(2, [2 * MS, 3 * MS], 8 * MS, PAIR),
        *together(3, [11 * MS, 12 * MS], 14 * MS, PAIR),
    ]
    traces = traces_of(write_world(tmp_path / "run", calls), tmp_path / "traces")
    for trace in traces.values():
        streams = Counter(event["args"]["stream"] for event in of_kind(trace, "kernel"))
        assert sorted(streams.values()) == [1, 2]


def test_an_unknown_duration_is_no_kernel(tmp_path: Path) -> None:
    """Ops in flight, ops that failed, and device ops without device times have no duration."""
    calls = [
        *together(1, [0, 0], 4 * MS, PAIR, flags=FLAG_DEVICE),
        Call(0, 2, 5 * MS, None),
        Call(1, 2, 5 * MS, 6 * MS, status="failed"),
    ]
    for trace in traces_of(write_world(tmp_path / "run", calls), tmp_path / "traces").values():
        assert len(of_kind(trace, "cpu_op")) == 2
        assert of_kind(trace, "kernel") == []


@pytest.mark.slow
def test_holistic_trace_analysis_reads_the_traces(tmp_path: Path) -> None:
    """HTA finds all ranks, takes every kernel for communication, and sums up the same times."""
    pytest.importorskip("hta")
    synthetic_run(tmp_path / "run", 4, 60, hosts=2, groups=GROUPS, program=PROGRAM)
    traces = traces_of(tmp_path / "run", tmp_path / "traces")
    code = (
        "import sys\n"
        "from hta.trace_analysis import TraceAnalysis\n"
        "kinds, names = TraceAnalysis(trace_dir=sys.argv[1]).get_gpu_kernel_breakdown("
        "visualize=False)\n"
        "print(kinds.to_json(orient='records'))\n"
        "print(names.to_json(orient='records'))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "traces")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    kinds, names = (json.loads(line) for line in re.findall(r"^\[.*\]$", done.stdout, re.M))
    assert [row["kernel_type"] for row in kinds] == ["COMMUNICATION"]
    for rank, trace in traces.items():
        expected: Counter[str] = Counter()
        for event in of_kind(trace, "kernel"):
            expected[event["name"]] += event["dur"]
        sums = {row["name"]: row["sum (us)"] for row in names if row["rank"] == rank}
        assert set(sums) == set(expected)
        for name, total in expected.items():
            assert sums[name] == pytest.approx(total, abs=60)  # it rounds each to 1 µs
