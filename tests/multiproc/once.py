"""What several tests look at, made by the first of them that wants it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def once(make: Callable[..., T]) -> Callable[..., T]:
    """Call ``make`` once for each first argument; where that fails, only the first caller does.

    The other arguments are what the making takes. Whoever wants what failed is skipped.
    """
    made: dict[tuple[Any, ...], T] = {}
    failed: set[tuple[Any, ...]] = set()

    @functools.wraps(make)
    def get(*arguments: Any) -> T:
        key = arguments[:1]
        if key in failed:
            pytest.skip(f"{make.__name__}{key} failed, in the first test that wanted it")
        if key not in made:
            failed.add(key)
            made[key] = make(*arguments)
            failed.remove(key)
        return made[key]

    return get
