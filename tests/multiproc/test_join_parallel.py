"""Replay where ranks meet in the forward pass ends without a hang, and as one process does."""

from __future__ import annotations

import joinparallel
import pytest
from ranks import run_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]
TIMEOUT_S = 300


@pytest.mark.parametrize("divide_by", ["world", "active"])
@pytest.mark.parametrize("pattern", [[2, 4], [3, 0]])
def test_pipelines(pattern: list[int], divide_by: str) -> None:
    """Two stages, two replicas: exact, as the stages of a replica run dry together."""
    for rank, told in enumerate(
        run_ranks(joinparallel.pipeline, 4, pattern, divide_by, timeout=TIMEOUT_S)
    ):
        assert told["apart"] < 1e-12, told
        pair = [max(pattern) - pattern[share] for share in range(2)]
        assert told["replayed"] == pair, rank


@pytest.mark.parametrize("divide_by", ["world", "active"])
def test_norms_over_all_ranks(divide_by: str) -> None:
    """Replayed batches count in the statistics, and nothing else of them does."""
    for told in run_ranks(joinparallel.synchronised, 3, [4, 0, 2], divide_by, timeout=TIMEOUT_S):
        assert told["apart"] < 1e-9, told
        assert told["replayed"] == [0, 4, 2]
