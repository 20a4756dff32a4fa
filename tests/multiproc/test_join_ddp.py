"""DistributedDataParallel under Join: the checks of PyTorch's own tests, and more."""

from __future__ import annotations

import pytest
from join_programs import ddp
from ranks import run_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]  # for a busy machine


def test_gradients_are_divided() -> None:
    """Each step divides by the world or by the active ranks; after the block, by the world."""
    # Ranks 0 to 2 have the inputs 1, 2 and 3; rank 0 is there for three steps.
    wanted = {"world": [2.0] * 3 + [5 / 3] * 2, "active": [2.0] * 3 + [2.5] * 2}
    for rank, results in enumerate(run_ranks(ddp.gradients, 3, timeout=300)):
        steps = 3 if rank == 0 else 5
        for divide_by, gradients in wanted.items():
            for way in ("plain", "batches"):
                assert results[f"{divide_by} {way}"] == pytest.approx(gradients[:steps])
                assert results[f"{divide_by} {way} after"] == [2.0]
        assert results["disabled"] == [2.0] * 5


def test_all_raise_before_a_collective_of_the_forward_pass() -> None:
    """All ranks raise at the same step, before that step's collectives, with equal parameters."""
    results = run_ranks(ddp.thrown, 3, timeout=300)
    for rank, outcomes in enumerate(results):
        for (steps, text, weights), (*_, first) in zip(outcomes, results[0], strict=True):
            assert steps == 5
            wanted = "Detected at least one rank" if rank == 0 else f"Rank {rank} exhausted all"
            assert text.startswith(wanted)
            assert weights == first


def test_buffers_stay_unexchanged() -> None:
    """With ``forward_sync_buffers=False``, Join exchanges no buffer in the tail or after it."""
    assert run_ranks(ddp.own_buffers, 3, timeout=300) == [[0.0] * 2, [1.0] * 2, [2.0] * 2]


def test_nothing_is_sent_while_all_have_batches() -> None:
    """Known lengths add no collective to an even step; unknown ones add one in eight steps."""
    for results in run_ranks(ddp.collectives, 2, timeout=300):
        # Between the first batch and the last lie 15 steps, and with windows one exchange.
        assert results["plain"] == 16
        assert results["known"] == 15
        assert results["unknown"] == 16
