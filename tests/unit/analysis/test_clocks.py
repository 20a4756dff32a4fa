"""Hosts' clocks: seconds apart, drifting, linked over others, or not linked at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rankcall.analysis.clocks import HostClock
from rankcall.analysis.summary import summarise
from rankcall.run.load import load
from rankcall.testing.model import Op, Pace
from rankcall.testing.synthetic import synthetic_run

SECOND = 1_000_000_000


def late_by(truth: np.ndarray, rank: int) -> float:
    """Return a rank's mean lag behind the second-latest, in ms, over the ops that it is last at."""
    ordered = np.sort(truth, axis=1)
    was_last = truth.argmax(axis=1) == rank
    return float((ordered[:, -1] - ordered[:, -2])[was_last].mean() / 1e6)


@pytest.mark.parametrize("straggler", [0, 5])
def test_clocks_a_second_apart(tmp_path: Path, straggler: int) -> None:
    """A straggler by 3 ms is found on either side of clocks seconds apart, to 0.1 ms."""
    truth = synthetic_run(
        tmp_path / "run",
        6,
        300,
        hosts=["a", "b", "c"],
        straggler=straggler,
        straggler_ms=3.0,
        clock_offsets_ns=[0, SECOND, -2 * SECOND - 123_456],
    )
    worst = summarise(load(truth.path)).stragglers[0]
    assert worst.rank == straggler
    assert worst.late_by_ms == pytest.approx(late_by(truth.arrivals, straggler), abs=0.1)


def test_offsets_are_found(tmp_path: Path) -> None:
    """Shift and error of each host's clock come out within 50 µs of what was planted."""
    truth = synthetic_run(
        tmp_path / "run", 4, 400, hosts=["a", "b"], clock_offsets_ns=[0, 700_000_001]
    )
    clocks = {clock.host: clock for clock in summarise(load(truth.path)).hosts}
    assert clocks["b"].shift == pytest.approx(-700_000_001, abs=50_000)
    assert clocks["b"].linked
    assert 0 < clocks["b"].error_ns < 100_000


def test_epochs_that_lie(tmp_path: Path) -> None:
    """If only the epoch is wrong (NTP off by 1 s), the collectives correct it."""
    truth = synthetic_run(tmp_path / "run", 4, 400, hosts=["a", "b"], epoch_errors_ns=[0, SECOND])
    clock = {clock.host: clock for clock in summarise(load(truth.path)).hosts}["b"]
    assert clock.shift == pytest.approx(-SECOND, abs=50_000)


def test_drift(tmp_path: Path) -> None:
    """With clocks that drift by 50 ppm for a minute (3 ms), a 1 ms straggler is exact to 0.1 ms."""
    truth = synthetic_run(
        tmp_path / "run",
        4,
        600,
        hosts=["a", "b"],
        straggler=1,
        straggler_ms=1.0,
        clock_drift_ppm=[0, 50],
        pace=Pace(compute_ms=100),
    )
    summary = summarise(load(truth.path))
    clock = {clock.host: clock for clock in summary.hosts}["b"]
    assert clock.slope * 1e6 == pytest.approx(-50, rel=0.02)
    assert summary.stragglers[0].rank == 1
    assert summary.stragglers[0].late_by_ms == pytest.approx(late_by(truth.arrivals, 1), abs=0.1)


def test_no_drift_is_seen_where_there_is_none(tmp_path: Path) -> None:
    """Noise does not become a drift."""
    truth = synthetic_run(tmp_path / "run", 4, 300, hosts=["a", "b"])
    assert [clock.slope for clock in summarise(load(truth.path)).hosts] == [0.0, 0.0]


def test_hosts_linked_over_a_third(tmp_path: Path) -> None:
    """Two hosts that share no group are aligned over a third one."""
    truth = synthetic_run(
        tmp_path / "run",
        3,
        400,
        hosts=["a", "b", "c"],
        epoch_errors_ns=[0, SECOND, -SECOND],
        groups={"left": [[0, 1]], "right": [[1, 2]]},
        program=[Op(family="left"), Op(family="right")],
    )
    clocks = {clock.host: clock for clock in summarise(load(truth.path)).hosts}
    assert clocks["b"].shift == pytest.approx(-SECOND, abs=50_000)
    assert clocks["c"].shift == pytest.approx(SECOND, abs=100_000)
    assert all(clock.linked for clock in clocks.values())


def test_hosts_that_share_nothing(tmp_path: Path) -> None:
    """A host that no collective links keeps its epoch, and is marked."""
    truth = synthetic_run(
        tmp_path / "run",
        4,
        50,
        hosts=["a", "b"],
        groups={"own": [[0, 1], [2, 3]]},
        program=[Op(family="own")],
    )
    assert [clock.linked for clock in summarise(load(truth.path)).hosts] == [True, False]


def test_align_is_exact_at_large_times() -> None:
    """Nanoseconds survive 100 days of uptime and a base of years."""
    times = np.array([100 * 86400 * SECOND + 1], np.int64)
    assert HostClock("a", base=10**18).align(times)[0] == 10**18 + int(times[0])
    moved = HostClock("a", base=-5, shift=7.0).align(times)
    assert moved[0] == int(times[0]) + 2
