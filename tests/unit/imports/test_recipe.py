"""A new source of evidence is one module and one entry: no reader of runs knows the sources."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from rankcall import imports
from rankcall.analysis.verdicts import diagnose
from rankcall.budget import Budget
from rankcall.export import export
from rankcall.problems import Problem, ProblemKind
from rankcall.record import KINDS, OPS, RECORD, STATUSES
from rankcall.report import diagnosis_text as diagnosis_report
from rankcall.report import top
from rankcall.ring.spec import RingSpec
from rankcall.ring.tables import Group
from rankcall.run.load import load

# Each line of the toy's files: an op, and whether it has ended.
TRACE = "all_reduce done\nbarrier done\nall_reduce open\n"
WORLD = Group("0", 0, "toy", "default_pg", (0, 1, 2))


def looks_like_toy(path: Path) -> bool:
    """Tell whether a folder has files of the toy."""
    return path.is_dir() and any(path.glob("*.toy"))


def rings_of_toy(
    sources: Sequence[Path], problems: list[Problem], budget: Budget
) -> Iterator[RingSpec]:
    """Yield a ring for each file ``<rank>.toy``."""
    for path in sorted(sources[0].glob("*.toy")):
        with path.open() as file, budget.reading(path, path.stat()):
            budget.spend(RECORD.itemsize * len(file.readlines()))
        lines = [line.split() for line in path.read_text().splitlines()]
        spec = RingSpec(int(path.stem), 3, "", capture="imported", closed=False)
        spec.records = np.zeros(len(lines), RECORD)
        spec.records["op"] = [OPS.index(op) for op, _ in lines]
        spec.records["kind"] = KINDS.index("collective")
        spec.records["seq"] = np.arange(1, len(lines) + 1)
        spec.records["group"] = spec.group(WORLD)
        spec.records["enqueued_ns"] = spec.records["started_ns"] = np.arange(1, len(lines) + 1)
        spec.records["root"] = spec.records["peer"] = spec.records["device_index"] = -1
        spec.records["device_ms"] = np.nan
        done = [
            STATUSES.index("completed" if state == "done" else "enqueued") for _, state in lines
        ]
        spec.records["status"] = done
        yield spec
    problems.append(Problem(ProblemKind.LIMITED, "the toy knows no times"))


@pytest.fixture
def toy_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Add the toy to the sources, and return a folder in which rank 1 does not come."""
    toy = imports.EvidenceSource("Toy", looks_like_toy, rings_of_toy)
    monkeypatch.setattr(imports, "SOURCES", (*imports.SOURCES, toy))
    folder = tmp_path / "toys"
    folder.mkdir()
    for rank in range(3):
        text = TRACE.replace("all_reduce open\n", "") if rank == 1 else TRACE
        (folder / f"{rank}.toy").write_text(text)
    return folder


def test_a_new_source_is_loaded_judged_and_exported(toy_run: Path, tmp_path: Path) -> None:
    """The run has its records, the verdict names the rank, and the problem is passed on."""
    run = load(toy_run)
    assert run.world_size == 3
    assert run.records["op"].to_list()[:3] == ["all_reduce", "barrier", "all_reduce"]
    diagnosis = diagnose(run)
    assert [(finding.kind, finding.ranks) for finding in diagnosis.findings] == [("missing", (1,))]
    assert "the toy knows no times" in diagnosis.problems
    for text in (diagnosis_report.diagnosis_text(diagnosis), top.render(diagnosis)):
        assert "Rank 1" in text
    export(run, "jsonl", tmp_path / "out.jsonl")
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 8


def test_a_folder_of_another_tool_is_not_taken_for_it(toy_run: Path) -> None:
    """Without its entry among the sources, the folder is no run."""
    done = subprocess.run(
        [sys.executable, "-m", "rankcall", "diagnose", str(toy_run), "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "no ring files" in done.stderr
    assert not done.stdout or json.loads(done.stdout)


def test_every_source_has_a_name_of_its_own() -> None:
    """The name tells a reader of a run where it came from."""
    names = [source.name for source in imports.SOURCES]
    assert len(set(names)) == len(names)
    assert all(names)
