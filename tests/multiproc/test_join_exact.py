"""Join trains like one process: parameters and optimizer state are equal to 1e-6 in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from join_programs.models import sweep
from join_programs.pool import Pool
from ranks import run_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(900)]

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
# With DDP. In the first two, replays have an effect, and the one process replays as well.
REPLAYED_DDP: list[dict[str, Any]] = [
    {"model": "batchnorm"},
    {"model": "unused", "optimizer": "momentum"},
    {"model": "static", "divide_by": "active"},
    {"zero": True, "accumulate": 2, "clip": True},
    {"hook": True, "views": True, "divide_by": "active"},
]


def cases(patterns: list[tuple[int, ...]], ways: list[dict[str, Any]], **more: Any) -> list[Any]:
    """Return every way with every pattern."""
    return [{"pattern": pattern, **way, **more} for pattern in patterns for way in ways]


def check(world_size: int, todo: list[Any], timeout: float = 600) -> None:
    """Run the cases, all on the same ranks."""
    wrong = run_ranks(sweep, world_size, todo, timeout=timeout)
    assert not any(wrong), "\n".join(wrong[0] + wrong[-1])


def test_shadow_is_exact_with_ddp() -> None:
    """Shadowing is exact for a rank without inputs, for even inputs, and if rank 0 ends first."""
    todo = cases([(0, 3, 5)], SHADOWED) + cases([(3, 3, 3)], SHADOWED[:3])
    check(3, todo + cases([(7, 1, 0)], SHADOWED[3:8]))


def test_replay_is_exact_with_ddp_fsdp_hsdp_and_tp() -> None:
    """Replaying is exact whatever is parallel, with the same loop body."""
    ways = REPLAYED[:2] + REPLAYED_DDP
    todo = cases([(0, 3, 5, 2)], ways, policy="replay", parallel="ddp")
    todo += cases([(4, 4, 6, 1)], REPLAYED, policy="replay", parallel="fsdp")
    todo += cases([(0, 3, 5, 2)], REPLAYED, policy="replay", parallel="hsdp")
    # torch's clip_grad_norm_ refuses a model that is both.
    ways = [way for way in REPLAYED if "clip" not in way]
    check(4, todo + cases([(3, 5)], ways, policy="replay", parallel="tp"))


# Any numbers of batches, in any way to train.

counts, flag = st.integers(0, 7), st.booleans()
ways_to_train = {
    "optimizer": st.sampled_from(["adam", "momentum"]),
    "divide_by": st.sampled_from(["world", "active"]),
    "accumulate": st.integers(1, 3),
    "epochs": st.integers(1, 2),
    **dict.fromkeys(("clip", "forward_only", "known"), flag),
}
ways_with_ddp = {
    "model": st.sampled_from(["plain", "batchnorm", "unused", "static"]),
    **dict.fromkeys(("hook", "zero", "views"), flag),
}


def possible(case: dict[str, Any]) -> dict[str, Any]:
    """Replace what torch itself cannot do, and the static graphs that the guide excludes."""
    parallel = case.get("parallel", "ddp")
    if parallel != "ddp":
        case = {name: value for name, value in case.items() if name not in ways_with_ddp}
    elif case["model"] == "static":
        case = {**case, "accumulate": 1}  # DDP fails if a static graph begins under no_sync
        if "parallel" not in case and 0 in case["pattern"]:
            case = {**case, "epochs": 1}
    if parallel == "tp":  # torch's clip_grad_norm_ refuses its two meshes
        case = {**case, "clip": False, "pattern": case["pattern"][:2]}
    return case


shadowed = st.fixed_dictionaries(
    {"pattern": st.tuples(*[counts] * 3), **ways_to_train, **ways_with_ddp}
).map(possible)
replayed = st.fixed_dictionaries(
    {
        "pattern": st.tuples(*[counts] * 4),
        "policy": st.just("replay"),
        "parallel": st.sampled_from(["ddp", "fsdp", "hsdp", "tp"]),
        **ways_to_train,
        **ways_with_ddp,
    }
).map(possible)


@pytest.fixture(scope="module")
def three() -> Iterator[Pool]:
    """Return three ranks that stay up."""
    pool = Pool(3)
    yield pool
    pool.end()


@pytest.fixture(scope="module")
def four() -> Iterator[Pool]:
    """Return four ranks that stay up."""
    pool = Pool(4)
    yield pool
    pool.end()


def exact(pool: Pool, case: dict[str, Any]) -> None:
    """Train one case and check that it equals one process."""
    wrong = pool.run(case)
    assert not wrong, "\n".join(wrong)


@settings(max_examples=12)
@given(shadowed)
def test_some_patterns_shadowed(three: Pool, case: dict[str, Any]) -> None:
    """Shadowing is exact for DDP and ZeRO with any numbers of batches."""
    exact(three, case)


@settings(max_examples=12)
@given(replayed)
def test_some_patterns_replayed(four: Pool, case: dict[str, Any]) -> None:
    """Replaying is exact for DDP, ZeRO, FSDP2, HSDP and tensor parallelism with any numbers."""
    exact(four, case)


@pytest.mark.slow
@settings(max_examples=1500)
@given(shadowed)
def test_many_patterns_shadowed(three: Pool, case: dict[str, Any]) -> None:
    """The same rule, with other examples in each run, for minutes."""
    exact(three, case)


@pytest.mark.slow
@settings(max_examples=1500)
@given(replayed)
def test_many_patterns_replayed(four: Pool, case: dict[str, Any]) -> None:
    """The same rule, with other examples in each run, for minutes."""
    exact(four, case)
