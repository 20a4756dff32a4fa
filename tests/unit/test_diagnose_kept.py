"""What a run says of itself to who diagnoses it: its own threshold, what its watcher kept."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from test_diagnose_culprits import WAITING
from test_watch_verdict import FOUND, always, verdict
from worlds import MS, START, group_of, together, write_world

from rankcall.analysis.diagnosis import diagnose
from rankcall.cli import main
from rankcall.run import load
from rankcall.testing.synthetic import Planted, synthetic_run
from rankcall.watch import _verdict

WHEN = int(time.mktime((2026, 11, 21, 3, 41, 30, 0, 0, -1))) * 10**9


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run of four ranks that rank 2's death hung."""
    return synthetic_run(tmp_path / "job", 4, 40, planted=Planted("dead", (2,), 21)).path


def test_what_the_watcher_kept_is_pointed_to(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When, who was named, and where the stacks of that moment are; also of an archive."""
    monkeypatch.setenv("COLUMNS", "300")  # no path is broken
    _verdict.write(run, verdict(FOUND, WHEN), {2: "Thread 1", 3: "Thread 2"}, always)
    assert main(["diagnose", str(run)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    about = "2026-11-21 03:41:30 missing: rank 2; desync (with 2 stacks), in"
    assert f"What the job's own watcher said {about} {run}/hangs/0001" in said
    target = tmp_path / "all.tar.zst"
    assert main(["collect", str(run), "--to", str(target)]) == 0
    assert main(["diagnose", str(target)]) == 1
    assert f"{about} hangs/0001" in " ".join(capsys.readouterr().out.split())
    main(["diagnose", "--json", str(target)])
    causes = [{"kind": "missing", "ranks": [2]}, {"kind": "desync", "ranks": []}]
    assert json.loads(capsys.readouterr().out)["hangs"] == [
        {"place": "hangs/0001", "epoch_ns": WHEN, "causes": causes, "stacks": 2}
    ]


def test_a_run_without_a_hang_says_nothing_of_it(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does one whose verdicts somebody damaged."""
    (run / "hangs/0001").mkdir(parents=True)
    odd = {"findings": [{"kind": 7, "ranks": "x"}], "hang": {"epoch_ns": 5}}
    (run / "hangs/0001/verdict.json").write_text(json.dumps(odd))
    (run / "hangs/0002").mkdir()
    (run / "hangs/0002/verdict.json").write_text("[]")
    assert main(["diagnose", "--json", str(run)]) == 1
    (kept,) = json.loads(capsys.readouterr().out)["hangs"]
    assert kept["causes"] == [{"kind": "7", "ranks": []}]
    (run / "hangs/0001/verdict.json").unlink()
    assert main(["diagnose", str(run)]) == 1
    assert "watcher" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "threshold"),
    [(3, 3.0), (7.5, 7.5), (0, 60.0), (None, 60.0), ("5", 60.0), (-1, 60.0), (10**40, 60.0)],
)
def test_the_jobs_own_threshold(tmp_path: Path, given: Any, threshold: float) -> None:
    """Without another, a call counts as hung after what the job was started with."""
    world = group_of(4)
    calls = [call for seq in range(1, 4) for call in together(seq, [0] * 4, seq * MS, world)]
    folder = write_world(tmp_path / "run", calls)
    (folder / "run.json").write_text(json.dumps({"hang_after_s": given}))
    found = diagnose(load(folder), now_ns=lambda: START + 9 * MS)
    assert found.hang_after == threshold
    assert diagnose(load(folder), 11.0).hang_after == 11.0


@pytest.mark.parametrize("command", ["diagnose", "top"])
def test_a_threshold_of_0_is_the_jobs_own(
    tmp_path: Path,
    command: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """RANKCALL_HANG_AFTER=0 switches watchers off; it does not make every call a hang."""
    run = write_world(tmp_path / "run", WAITING, closed=lambda rank: False)
    about: dict[str, Any] = {"boot_id": "", "mono_ns": START + 6 * MS, "processes": []}
    headers = [head.header for head in load(run).heads]
    for head in headers:
        about["boot_id"] = head.boot_id
        about["processes"].append({"pid": head.pid, "start": head.process_start, "state": "alive"})
    (run / "states").mkdir()
    (run / "states/node-a.json").write_text(json.dumps(about))
    monkeypatch.setenv("RANKCALL_HANG_AFTER", "0")
    assert main([command, *(["--once"] if command == "top" else []), str(run)]) == 0
    assert "healthy" in capsys.readouterr().out
    monkeypatch.setenv("RANKCALL_HANG_AFTER", "0.0001")
    assert main([command, *(["--once"] if command == "top" else []), str(run)]) == 1
    assert "missing" in capsys.readouterr().out
