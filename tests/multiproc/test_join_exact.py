"""Join's results are those of one process: parameters and optimizer state, float64, 1e-6."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from joinmodels import sweep
from ranks import run_ranks

pytestmark = pytest.mark.multiproc

SHADOWED: list[dict[str, Any]] = [
    {},
    {"optimizer": "momentum", "divide_by": "active"},
    {"model": "batchnorm"},
    {"model": "unused", "optimizer": "momentum"},
    {"model": "static"},
    {"accumulate": 2},
    {"accumulate": 3, "divide_by": "active", "optimizer": "momentum"},
    {"accumulate": 2, "model": "unused"},
    {"clip": True},
    {"forward_only": True, "model": "batchnorm"},
    {"hook": True, "divide_by": "active"},
    {"zero": True},
    {"zero": True, "accumulate": 2},
    {"zero": True, "clip": True, "optimizer": "momentum", "divide_by": "active", "hook": True},
    {"views": True, "accumulate": 2},
    {"known": False},
    {"known": False, "model": "unused", "divide_by": "active"},
    {"epochs": 2, "divide_by": "active"},
    {"epochs": 2, "model": "batchnorm", "known": False},
    {"epochs": 2, "zero": True, "hook": True, "divide_by": "active"},
]
REPLAYED: list[dict[str, Any]] = [
    {},
    {"optimizer": "momentum", "divide_by": "active"},
    {"accumulate": 2},
    {"clip": True},
    {"known": False, "divide_by": "active"},
    {"forward_only": True},
    {"epochs": 2, "divide_by": "active"},
]


def cases(patterns: list[tuple[int, ...]], ways: list[dict[str, Any]], **more: Any) -> list[Any]:
    """Return every way with every pattern."""
    return [{"pattern": pattern, **way, **more} for pattern in patterns for way in ways]


def check(world_size: int, todo: list[Any], timeout: float = 110) -> None:
    """Run the cases, all on the same ranks."""
    wrong = run_ranks(sweep, world_size, todo, timeout=timeout)
    assert not any(wrong), "\n".join(wrong[0] + wrong[-1])


def test_shadow_is_exact_with_ddp() -> None:
    """Each way to train, with a rank without inputs, even inputs, and rank 0 first to end."""
    todo = cases([(0, 3, 5)], SHADOWED) + cases([(3, 3, 3)], SHADOWED[:3])
    check(3, todo + cases([(7, 1, 0)], SHADOWED[3:8]))


def test_replay_is_exact_with_ddp_fsdp_hsdp_and_tp() -> None:
    """The loop body knows nothing of what is parallel."""
    todo = cases([(0, 3, 5, 2)], REPLAYED[:2], policy="replay", parallel="ddp")
    todo += cases([(4, 4, 6, 1)], REPLAYED, policy="replay", parallel="fsdp")
    todo += cases([(0, 3, 5, 2)], REPLAYED, policy="replay", parallel="hsdp")
    # torch's clip_grad_norm_ refuses a model that is both.
    ways = [way for way in REPLAYED if "clip" not in way]
    check(4, todo + cases([(3, 5)], ways, policy="replay", parallel="tp"))


counts = st.tuples(*[st.integers(0, 7)] * 3)


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(counts, min_size=3, max_size=3), st.lists(st.sampled_from(SHADOWED), min_size=4))
def test_any_pattern_shadowed(patterns: list[tuple[int, ...]], ways: list[Any]) -> None:
    """Any numbers of batches, in any order of ways to train."""
    check(3, cases(patterns, ways[:6]), timeout=300)


quads = st.tuples(*[st.integers(0, 7)] * 4)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.lists(quads, min_size=3, max_size=3),
    st.lists(st.sampled_from(REPLAYED), min_size=2, max_size=4),
    st.sampled_from(["ddp", "fsdp", "hsdp", "tp"]),
)
def test_any_pattern_replayed(patterns: list[Any], ways: list[Any], parallel: str) -> None:
    """The same for replay, whatever is parallel."""
    if parallel == "tp":
        patterns = [pattern[:2] for pattern in patterns]
        ways = [way for way in ways if "clip" not in way]
    check(4, cases(patterns, ways, policy="replay", parallel=parallel), timeout=300)
