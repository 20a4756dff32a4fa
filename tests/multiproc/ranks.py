"""``spawn_ranks`` in the two forms that the tests use."""

from __future__ import annotations

from typing import Any

from rankcall.testing import RankResult as Result
from rankcall.testing import RanksFailed, spawn_ranks

__all__ = ["RanksFailed", "Result", "run_ranks", "try_ranks"]

HUNG_S = 240.0  # only a hang takes so long, also on a machine with 40 busy processes


def run_ranks(target: Any, world_size: int, *args: Any, **options: Any) -> list[Any]:
    """Return the value of each rank; raise if any rank failed."""
    options = {"timeout": HUNG_S, **options}
    return [result.value for result in spawn_ranks(target, world_size, *args, **options)]


def try_ranks(target: Any, world_size: int, *args: Any, **options: Any) -> list[Result]:
    """Return how each rank ended. Use it if ranks are meant to fail; it waits for all."""
    options = {"timeout": HUNG_S, "grace": HUNG_S, **options}
    return spawn_ranks(target, world_size, *args, check=False, **options)
