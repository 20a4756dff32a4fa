"""Results that several tests share; the first test that needs a result makes it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def once(make: Callable[..., T]) -> Callable[..., T]:
    """Call ``make`` once for each first argument, and share what it returns.

    If the call fails, only the first caller fails; later callers are skipped. The arguments after
    the first are passed on to ``make``.
    """
    made: dict[tuple[Any, ...], T] = {}
    failed: set[tuple[Any, ...]] = set()

    @functools.wraps(make)
    def get(*arguments: Any) -> T:
        key = arguments[:1]
        if key in failed:
            pytest.skip(f"{make.__name__}{key} failed in the first test that needed it")
        if key not in made:
            failed.add(key)
            made[key] = make(*arguments)
            failed.remove(key)
        return made[key]

    return get
