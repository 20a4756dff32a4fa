"""In synthetic runs with planted faults, every kind is found at every size, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rankcall.analysis.verdicts import diagnose
from rankcall.run.load import load
from rankcall.testing.model import Op, Planted
from rankcall.testing.synthetic import synthetic_run

# Of a process on another host only its heartbeats are known; if they end, it counts as stopped.
KINDS = ("missing", "dead", "stopped", "exhausted", "desync", "mismatch", "deadlock")
PROGRAM = (
    Op("all_reduce", 1 << 20, "tp", line=5),
    Op("all_gather", 1 << 20, "tp", line=6),
    Op("reduce_scatter", 1 << 20, "dp", line=7),
    Op("all_reduce", 8, line=8),
)


def families(ranks: int) -> dict[str, list[list[int]]]:
    """Return tensor-parallel groups of eight ranks, and data-parallel groups across them."""
    return {
        "tp": [list(range(first, first + 8)) for first in range(0, ranks, 8)],
        "dp": [list(range(first, ranks, 8)) for first in range(8)],
    }


def planted(kind: str, ranks: int) -> Planted:
    """Return a fault of the rank a third into the world, or a deadlock of two ranks."""
    rank = ranks // 3
    if kind == "deadlock":
        return Planted(kind, (rank, rank + 9), 43)  # the all_reduce of all
    return Planted(kind, (rank,), 43 if kind in ("desync", "mismatch") else 41)


def causes_of(folder: Path, ranks: int, *faults: Planted) -> list[tuple[str, tuple[int, ...]]]:
    """Write a run, diagnose it, and return kinds and culprits."""
    synthetic_run(
        folder,
        ranks,
        60,
        hosts=ranks // 8,
        groups=families(ranks),
        program=PROGRAM,
        planted=faults,
    )
    try:
        diagnosis = diagnose(load(folder))
        for finding in diagnosis.findings:
            assert not set(finding.ranks) & set(finding.victims)
        return [(finding.kind, finding.ranks) for finding in diagnosis.findings]
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "ranks",
    [
        64,
        pytest.param(1024, marks=pytest.mark.slow),
        pytest.param(4096, marks=pytest.mark.slow),
        pytest.param(16384, marks=pytest.mark.slow),
    ],
)
def test_every_kind_at_every_size(tmp_path: Path, kind: str, ranks: int) -> None:
    """One fault, one finding: of its kind, with its ranks."""
    fault = planted(kind, ranks)
    assert causes_of(tmp_path / "run", ranks, fault) == [(kind, fault.ranks)]


def test_none(tmp_path: Path) -> None:
    """A world without a fault is healthy."""
    assert causes_of(tmp_path / "run", 64) == []


def test_a_whole_host(tmp_path: Path) -> None:
    """The ranks of a host that died together are one finding."""
    assert causes_of(tmp_path / "run", 64, Planted("dead", tuple(range(16, 24)), 43)) == [
        ("dead", tuple(range(16, 24)))
    ]


@pytest.mark.parametrize(
    ("kind", "ranks", "at"), [("melted", (1,), 3), ("dead", (), 3), ("dead", (1,), -1)]
)
def test_what_cannot_be_planted(kind: str, ranks: tuple[int, ...], at: int) -> None:
    """An unknown kind, no rank and a negative position raise ``ValueError``."""
    with pytest.raises(ValueError, match="a fault"):
        Planted(kind, ranks, at)
