"""PyTorch's own uneven-input tests pass with our Join in place of theirs."""

from __future__ import annotations

import pytest
from join_programs.upstream import LONG, QUICK, run_upstream
from ranks import run_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_torchs_uneven_input_tests(world_size: int) -> None:
    """The bodies of torch's tests pass, and each of them enters our Join."""
    for counts in run_ranks(run_upstream, world_size, list(QUICK), True, timeout=300):
        assert set(counts) == set(QUICK)
        assert all(counts.values()), counts


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("world_size", [2, 3])
def test_torchs_long_uneven_input_test(world_size: int) -> None:
    """torch's longest test passes: seven models, communication hooks, no_sync, thrown errors."""
    for counts in run_ranks(run_upstream, world_size, list(LONG), True, timeout=1400):
        assert counts["test_ddp_uneven_inputs"] > 100
