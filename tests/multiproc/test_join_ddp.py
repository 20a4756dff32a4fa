"""DistributedDataParallel under Join: what PyTorch's own tests check on two GPUs, and more."""

from __future__ import annotations

import joinddp
import pytest
from ranks import run_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]  # for a busy machine


def test_gradients_are_divided() -> None:
    """By the world or by who is active, in each step; after the block by the world again."""
    # Ranks 0 to 2 have the inputs 1, 2 and 3; rank 0 is there for three steps.
    wanted = {"world": [2.0] * 3 + [5 / 3] * 2, "active": [2.0] * 3 + [2.5] * 2}
    for rank, told in enumerate(run_ranks(joinddp.gradients, 3, timeout=300)):
        steps = 3 if rank == 0 else 5
        for divide_by, gradients in wanted.items():
            for way in ("plain", "batches"):
                assert told[f"{divide_by} {way}"] == pytest.approx(gradients[:steps])
                assert told[f"{divide_by} {way} after"] == [2.0]
        assert told["disabled"] == [2.0] * 5


def test_thrown_where_ranks_meet_in_the_forward_pass() -> None:
    """All raise at the same step, before the collectives of the forward pass, equal so far."""
    told = run_ranks(joinddp.thrown, 3, timeout=300)
    for rank, each in enumerate(told):
        for (steps, says, weights), (*_, first) in zip(each, told[0], strict=True):
            assert steps == 5
            wanted = "Detected at least one rank" if rank == 0 else f"Rank {rank} exhausted all"
            assert says.startswith(wanted)
            assert weights == first


def test_buffers_that_are_not_exchanged() -> None:
    """Neither in the tail nor at its end."""
    assert run_ranks(joinddp.own_buffers, 3, timeout=300) == [[0.0] * 2, [1.0] * 2, [2.0] * 2]


def test_nothing_is_sent_while_all_have_batches() -> None:
    """With known lengths no collective is added; with unknown ones one in eight steps."""
    for told in run_ranks(joinddp.collectives, 2, timeout=300):
        # Between the first batch and the last lie 15 steps, and with windows one exchange.
        assert told["plain"] == 16
        assert told["known"] == 15
        assert told["unknown"] == 16
