"""Replay where ranks meet in the forward pass ends without a hang, and as one process does."""

from __future__ import annotations

import pytest
from join_programs import parallel
from ranks import run_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]
TIMEOUT_S = 300


@pytest.mark.parametrize("divide_by", ["world", "active"])
@pytest.mark.parametrize("pattern", [[2, 4], [3, 0]])
def test_pipelines(pattern: list[int], divide_by: str) -> None:
    """A pipeline of two stages and two replicas equals one process."""
    for rank, results in enumerate(
        run_ranks(parallel.pipeline, 4, pattern, divide_by, timeout=TIMEOUT_S)
    ):
        assert results["apart"] < 1e-12, results
        pair = [max(pattern) - pattern[share] for share in range(2)]
        assert results["replayed"] == pair, rank


@pytest.mark.parametrize("divide_by", ["world", "active"])
def test_norms_over_all_ranks(divide_by: str) -> None:
    """Of replayed batches, only the statistics of a norm over all ranks count."""
    for results in run_ranks(parallel.synchronised, 3, [4, 0, 2], divide_by, timeout=TIMEOUT_S):
        assert results["apart"] < 1e-9, results
        assert results["replayed"] == [0, 4, 2]
