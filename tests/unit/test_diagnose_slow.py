"""Stragglers and slow links in jobs that go on, and jobs that are healthy."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from worlds import MS, START, group_of, together, write_world

from rankcall.analysis.verdicts import diagnose
from rankcall.analysis.verdicts.diagnosis import Diagnosis
from rankcall.run.load import load
from rankcall.testing.model import Op, Pace
from rankcall.testing.synthetic import synthetic_run

MESSAGES = (Op("exchange", 1 << 20, line=5), Op("all_reduce", 1 << 20, line=6))
WORLD = group_of(4)
PAIRS = {"tp": [[0, 1], [2, 3], [4, 5], [6, 7]]}


def look(folder: Path, ranks: int, collectives: int, **options: object) -> Diagnosis:
    """Diagnose a synthetic run."""
    synthetic_run(folder / "run", ranks, collectives, **options)  # type: ignore[arg-type]
    return diagnose(load(folder / "run"))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_healthy(tmp_path: Path, ranks: int, seed: int) -> None:
    """A job whose ranks all jitter by the same amount is healthy."""
    diagnosis = look(tmp_path, ranks, 200, pace=Pace(jitter_ms=1.0), seed=seed)
    assert (diagnosis.kind, diagnosis.findings) == ("healthy", [])


@pytest.mark.parametrize("ranks", [4, 64])
def test_straggler(tmp_path: Path, ranks: int) -> None:
    """A rank that is late before every op is named, with its share and the line."""
    findings = look(tmp_path, ranks, 200, straggler=3, straggler_ms=5.0).findings
    assert [(finding.kind, finding.ranks) for finding in findings] == [("straggler", (3,))]
    assert findings[0].group == "0"
    assert findings[0].call_site.startswith("train.py:")
    assert len(findings[0].victims) == ranks - 1


def test_straggler_with_clocks_apart(tmp_path: Path) -> None:
    """Hosts whose clocks are a second apart do not make their ranks stragglers, or hide one."""
    options = {"hosts": 4, "clock_offsets_ns": [0, 10**9, -(10**9), 5 * 10**8]}
    assert look(tmp_path / "healthy", 8, 200, **options).findings == []
    findings = look(tmp_path / "late", 8, 200, straggler=5, straggler_ms=5.0, **options).findings
    assert [(finding.kind, finding.ranks) for finding in findings] == [("straggler", (5,))]


def test_nothing_has_ended_yet(tmp_path: Path) -> None:
    """A job in its first collective is healthy, without a warning from numpy."""
    first = [replace(call, end=None) for call in together(1, [0, 0, 0, 1], MS, WORLD)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        diagnosis = diagnose(
            load(write_world(tmp_path / "run", first)),
            state_of=lambda header: "alive",
            now_ns=lambda: START + 5 * MS,
        )
    assert (diagnosis.kind, diagnosis.findings) == ("healthy", [])


def test_two_stragglers(tmp_path: Path) -> None:
    """Two ranks that are late together are one finding."""
    findings = look(tmp_path, 8, 200, straggler=(2, 6), straggler_ms=5.0).findings
    assert [(finding.kind, finding.ranks) for finding in findings] == [("straggler", (2, 6))]


def test_a_single_pause_is_no_habit(tmp_path: Path) -> None:
    """One long pause (a checkpoint) of one rank is healthy."""
    calls = []
    for seq in range(1, 101):
        start = seq * 10 * MS + (900 * MS if seq > 60 else 0)
        late = [0, 0, 900 * MS, 0] if seq == 60 else [0, 0, 0, 0]
        calls += together(seq, [start + delay for delay in late], start + max(late) + MS, WORLD)
    assert diagnose(load(write_world(tmp_path / "run", calls))).findings == []


def test_slow_link(tmp_path: Path) -> None:
    """A pair whose transfers take many times as long as those of equal pairs is named."""
    families = {"slow": [PAIRS["tp"][2]], "fast": [p for p in PAIRS["tp"] if p != PAIRS["tp"][2]]}
    program = (
        Op("all_reduce", 1 << 20, "fast", line=5, transfer_ms=2.0),
        Op("all_reduce", 1 << 20, "slow", line=5, transfer_ms=12.0),
    )
    findings = look(tmp_path, 8, 200, groups=families, program=program, hosts=2).findings
    assert [(finding.kind, finding.ranks) for finding in findings] == [("slow_link", (4, 5))]
    assert findings[0].hosts == ("node-1",)


def test_messages_between_equals_are_healthy(tmp_path: Path) -> None:
    """Links of equal speed are healthy."""
    assert look(tmp_path, 8, 200, program=MESSAGES, groups=PAIRS).findings == []
