"""What ``rankcall diagnose`` prints: golden files of a small world, a large one, gaps, health."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_diagnose_culprits import WAITING, look
from worlds import MS, together, write_world

import golden
from rankcall.analysis.diagnosis import Diagnosis, diagnose
from rankcall.cli import main
from rankcall.report.diagnosis import render
from rankcall.run import load
from rankcall.testing.synthetic import Op, Planted, synthetic_run


def large(folder: Path, *planted: Planted, ranks: int = 1024, **options: object) -> Diagnosis:
    """Diagnose a job of tensor- and data-parallel groups."""
    families = {
        "tp": [list(range(first, first + 8)) for first in range(0, ranks, 8)],
        "dp": [list(range(first, ranks, 8)) for first in range(8)],
    }
    program = (
        Op("all_reduce", 1 << 20, "tp", line=5), Op("all_gather", 1 << 20, "tp", line=6),
        Op("reduce_scatter", 1 << 20, "dp", line=7), Op("all_reduce", 8, line=8),
    )  # fmt: skip
    synthetic_run(
        folder / "run", ranks, 80, hosts=ranks // 8, groups=families, program=program,
        planted=planted, **options,  # type: ignore[arg-type]
    )  # fmt: skip
    return diagnose(load(folder / "run"))


@pytest.mark.parametrize("width", [80, 120])
def test_a_small_world(tmp_path: Path, width: int) -> None:
    """The cause comes first, then where the ranks stand; no line is too wide."""
    text = render(look(tmp_path, WAITING, states={}), width)
    golden.check(f"diagnose-missing-{width}.txt", text)
    assert max(map(len, text.splitlines())) <= width


def test_a_large_world(tmp_path: Path) -> None:
    """1,024 ranks fit on a screen."""
    text = render(large(tmp_path, Planted("stopped", (341,), 57)))
    golden.check("diagnose-1024.txt", text)
    assert len(text.splitlines()) <= 24


def test_two_causes(tmp_path: Path) -> None:
    """Two causes at once are two findings, each with its evidence."""
    faults = Planted("dead", (9,), 41), Planted("missing", (30,), 41)
    golden.check("diagnose-two-causes.txt", render(large(tmp_path, *faults, ranks=64)))


def test_gaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not known is said, and the confidence is lower."""
    monkeypatch.chdir(tmp_path)  # lines break where the run's path, which is in one, lets them
    text = render(large(Path(), Planted("missing", (9,), 41), ranks=64, without_ranks=(10, 11)))
    assert text.startswith("missing (likely): ")
    golden.check("diagnose-gaps.txt", text)


def test_healthy(tmp_path: Path) -> None:
    """A job in which nothing is wrong says how fast it goes."""
    golden.check("diagnose-healthy.txt", render(large(tmp_path, ranks=64)))


def test_names_cannot_act_on_the_terminal(tmp_path: Path) -> None:
    """What comes from a file holds no control characters when it is printed."""
    calls = together(1, [0] * 4, MS, WAITING[0].group)
    run = write_world(tmp_path / "run", calls, hosts=dict.fromkeys(range(4), "a\x1b[31mb\r"))
    text = render(diagnose(load(run)))
    assert "\x1b" not in text
    assert "\r" not in text


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 1 with a finding, 0 where all is healthy, 2 for what is no run; --json."""
    large(tmp_path / "hung", Planted("dead", (3,), 21), ranks=8)
    large(tmp_path / "fine", ranks=8)
    assert main(["diagnose", str(tmp_path / "hung" / "run")]) == 1
    assert capsys.readouterr().out.startswith("dead: Rank 3 (node-0, pid 1003) was killed by")
    assert main(["diagnose", "--json", str(tmp_path / "hung" / "run")]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["verdict"]) == (1, "dead")
    assert found["findings"][0]["ranks"] == [3]
    assert found["ranks"][3]["exit"] == -9
    assert main(["diagnose", str(tmp_path / "fine" / "run")]) == 0
    assert capsys.readouterr().out.startswith("healthy: 8 of 8 ranks ended well")
    assert main(["diagnose", str(tmp_path / "none")]) == 2
    assert "no such run" in capsys.readouterr().err
