"""Runs as Flight Recorder dumps: read back by torch's own analyser, and by our importer."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from rankcall.analysis.verdicts import diagnose
from rankcall.cli import main
from rankcall.export import export
from rankcall.run.load import load
from rankcall.testing.model import Op, Planted
from rankcall.testing.synthetic import synthetic_run

GROUPS = {"tp": [[0, 1], [2, 3], [4, 5], [6, 7]], "dp": [[0, 2, 4, 6], [1, 3, 5, 7]]}
PROGRAM = (
    Op(message_bytes=1 << 20),
    Op("all_gather", message_bytes=1 << 16, family="tp", line=11),
    Op("reduce_scatter", message_bytes=1 << 16, family="dp", line=12),
    Op("barrier", message_bytes=1, line=13),
)
FAULTS = [
    Planted("missing", (5,), 40),
    Planted("missing", (3,), 42),
    Planted("desync", (2,), 40),
    Planted("mismatch", (6,), 40),
]


def faulty(folder: Path, planted: Planted | tuple[()]) -> Path:
    """Write a synthetic run of eight ranks with a fault."""
    synthetic_run(folder, 8, 60, hosts=2, groups=GROUPS, program=PROGRAM, planted=planted)
    return folder


@pytest.mark.parametrize("as_json", [False, True], ids=["pickles", "json"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.kind}-{fault.at}")
def test_the_verdict_of_the_dumps_is_that_of_the_run(
    tmp_path: Path, fault: Planted, as_json: bool
) -> None:
    """Kind, ranks, victims, group, number, op and line of each finding survive the export."""
    run = load(faulty(tmp_path / "run", fault))
    expected = diagnose(run).findings
    assert [(finding.kind, finding.ranks) for finding in expected] == [(fault.kind, fault.ranks)]
    export(run, "flight-recorder", tmp_path / "dumps", as_json=as_json)
    dump_findings = diagnose(load(tmp_path / "dumps")).findings
    for own, dumped in zip(expected, dump_findings, strict=True):
        for name in ("kind", "ranks", "victims", "seq", "op", "call_site"):
            assert getattr(dumped, name) == getattr(own, name), name
        assert dumped.since_s == pytest.approx(own.since_s, abs=1.0)


def test_the_records_survive(tmp_path: Path) -> None:
    """Ops, numbers, sizes, dtypes, members, lines and times are those of the run."""
    run = load(faulty(tmp_path / "run", ()))
    export(run, "flight-recorder", tmp_path / "dumps")
    ours, read = run.records, load(tmp_path / "dumps").records
    assert len(read) == len(ours)
    has_tensors = pl.col("op") != "barrier"
    ours, read = ours.filter(has_tensors), read.filter(has_tensors)
    for name in ("rank", "op", "kind", "seq", "in_bytes", "out_bytes", "dtype", "status"):
        assert read[name].cast(str).to_list() == ours[name].cast(str).to_list(), name
    assert read["call_site"].to_list() == ours["call_site"].to_list()
    assert read["group_ranks"].to_list() == ours["group_ranks"].to_list()


def fr_trace(folder: Path) -> str:
    """Run torch's own analyser on a folder of dumps, and return what it wrote."""
    pytest.importorskip("torch.distributed.flight_recorder.fr_trace")
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_torchs_analyser_reads_the_dumps(tmp_path: Path) -> None:
    """torchfrtrace names the rank that had not come, and no rank in a healthy run."""
    export(load(faulty(tmp_path / "run", FAULTS[0])), "flight-recorder", tmp_path / "dumps")
    text = fr_trace(tmp_path / "dumps")
    missing = re.findall(r"missing ranks: \{([\d, ]*)\}", text)
    assert missing, text
    assert set(missing) == {"5"}
    export(load(faulty(tmp_path / "well", ())), "flight-recorder", tmp_path / "healthy")
    text = fr_trace(tmp_path / "healthy")
    assert "missing ranks" not in text
    assert "Culprit" not in text


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``export --to flight-recorder`` writes a folder of pickles, or JSON; stdout cannot be one."""
    run = faulty(tmp_path / "run", ())
    out = tmp_path / "out"
    arguments = ["export", str(run), "--to", "flight-recorder", "-o"]
    assert main([*arguments, str(out)]) == 0
    assert "480 records" in capsys.readouterr().out
    dump = pickle.loads((out / "nccl_trace_rank_3").read_bytes())
    assert (dump["version"], len(dump["entries"])) == ("2.10", 60)
    assert main([*arguments, str(tmp_path / "json"), "--json"]) == 0
    json_dump = json.loads((tmp_path / "json" / "nccl_trace_rank_3.json").read_text())
    assert len(json_dump["entries"]) == 60
    assert main([*arguments, "-"]) == 2
    assert "folder" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main([*arguments, str(tmp_path / "file" / "x")]) == 2
    assert "cannot be written" in capsys.readouterr().err
