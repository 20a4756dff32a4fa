"""Synthetic runs: real rings, and a truth that the records agree with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from rankcall.run.load import load
from rankcall.testing.model import Op
from rankcall.testing.synthetic import BOOT_NS, synthetic_run


def test_records_hold_the_truth(tmp_path: Path) -> None:
    """Each rank's times are the true ones in its host's clock."""
    truth = synthetic_run(
        tmp_path / "run", 4, 50, hosts=["a", "b"], clock_offsets_ns={"b": 10**9}, seed=3
    )
    run = load(truth.path)
    assert run.records.height == 200
    for rank, offset in ((0, 0), (3, 10**9)):
        mine = run.records.filter(pl.col("rank") == rank)
        assert (mine["enqueued_ns"].to_numpy() - BOOT_NS - offset == truth.arrivals[:, rank]).all()
        assert (mine["completed_ns"].to_numpy() - BOOT_NS - offset == truth.ends[:, rank]).all()
        assert mine["seq"].to_list() == list(range(1, 51))


def test_no_rank_leaves_before_the_last_arrives(tmp_path: Path) -> None:
    """No rank leaves a synchronising op before all arrived; the straggler is as late as planned."""
    truth = synthetic_run(tmp_path / "run", 8, 100, straggler=3, straggler_ms=15.0)
    assert (truth.ends.min(axis=1) > truth.arrivals.max(axis=1)).all()
    others = np.delete(truth.arrivals, 3, axis=1).max(axis=1)
    assert np.median(truth.arrivals[:, 3] - others) / 1e6 == pytest.approx(15, abs=0.5)


def test_groups_and_exchanges(tmp_path: Path) -> None:
    """Ranks only record ops of their own groups; both ends of a message have the same number."""
    program = [Op(), Op("exchange", 64, family="pair"), Op("all_gather", 4096, family="pair")]
    truth = synthetic_run(
        tmp_path / "run", 5, 9, groups={"pair": [[0, 1], [2, 3]]}, program=program
    )
    run = load(truth.path)
    assert run.ranks["records"].to_list() == [12, 12, 12, 12, 3]
    p2p = run.records.filter(pl.col("kind") == "p2p")
    sends = p2p.filter(pl.col("op") == "send").select("rank", "peer", "seq", "group")
    receives = p2p.filter(pl.col("op") == "recv")
    ends = receives.select(
        pl.col("peer").alias("rank"), pl.col("rank").alias("peer"), "seq", "group"
    )
    assert sorted(sends.rows()) == sorted(ends.rows())
    gathered = run.records.filter(pl.col("op") == "all_gather")
    assert set(gathered["in_bytes"]) == {2048}
    assert set(gathered["seq"]) == {1, 2, 3}


def test_steps_and_a_lap(tmp_path: Path) -> None:
    """Ops are spread over steps; a small ring keeps the newest and counts the rest."""
    truth = synthetic_run(tmp_path / "run", 2, 100, per_step=10, capacity=64)
    run = load(truth.path)
    assert run.ranks["steps"].to_list() == [10, 10]
    assert run.dropped == {0: 36, 1: 36}
    assert run.records.filter(pl.col("rank") == 0)["seq"].to_list() == list(range(37, 101))


def test_the_same_seed_is_the_same_run(tmp_path: Path) -> None:
    """Runs with one seed are equal; runs with two seeds differ."""
    first, again, other = (
        synthetic_run(tmp_path / name, 2, 20, seed=seed)
        for name, seed in zip("abc", (1, 1, 2), strict=True)
    )
    assert (first.arrivals == again.arrivals).all()
    assert (first.arrivals != other.arrivals).any()


def test_ranks_without_a_ring(tmp_path: Path) -> None:
    """Ranks in ``without_ranks`` take part and leave no ring."""
    truth = synthetic_run(tmp_path / "run", 4, 10, without_ranks=[1])
    run = load(truth.path)
    assert run.missing_ranks == [1]
    assert (truth.arrivals[:, 1] > 0).all()


def test_unknown_ops(tmp_path: Path) -> None:
    """An unknown op is a ValueError."""
    with pytest.raises(ValueError, match="no op 'dance'"):
        synthetic_run(tmp_path / "run", 2, 1, program=[Op("dance")])
