"""Calls to a store that cannot be meant: told at once, and nothing is sent."""

from __future__ import annotations

from typing import Any

import pytest
from stores import keys_of
from torch.distributed import HashStore

from rankcall import store as ours


@pytest.mark.parametrize(
    ("arguments", "kind_of_error", "says"),
    [
        ((0, "p"), ValueError, "world_size must be at least 1"),
        ((-3, "p"), ValueError, "world_size must be at least 1"),
        ((2.0, "p"), TypeError, "world_size must be an int"),
        ((True, "p"), TypeError, "world_size must be an int"),
        ((2, "p", 0), ValueError, "barrier_timeout must be positive"),
        ((2, "p", -1), ValueError, "barrier_timeout must be positive"),
        ((2, "p", float("nan")), ValueError, "barrier_timeout must be positive"),
        ((2, "p", "5"), TypeError, "barrier_timeout is in seconds"),
        ((2, "p", 1, 2), ValueError, "rank 2 is outside a world of 2"),
        ((2, "p", 1, -1), ValueError, "rank -1 is outside a world of 2"),
        ((2, "p", 1, "0"), TypeError, "rank must be an int"),
        ((2, "p", 1, None, str), ValueError, "give rank as well"),
        ((2, "p", 1, 0, None, -1), ValueError, "trace_timeout must be at least 0"),
        ((2, b"p"), TypeError, "key_prefix must be a str"),
        ((2, "\ud800"), ValueError, "cannot be written as UTF-8"),
    ],
)
def test_mistakes_are_told_at_once(arguments: Any, kind_of_error: Any, says: str) -> None:
    """Nothing is sent to the store for a call that cannot be meant."""
    store = HashStore()
    with pytest.raises(kind_of_error, match=says):
        ours.barrier(store, *arguments)
    assert keys_of(store) == []


def test_other_mistakes() -> None:
    """Arguments that are not a store, or not data, or too much data, raise."""
    with pytest.raises(TypeError, match=r"torch\.distributed\.Store; got dict"):
        ours.barrier({}, 2, "p")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="data must be bytes or str; got int on rank 1"):
        ours.synchronize(HashStore(), 7, 1, 2, "p")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="use a collective"):
        ours.synchronize(HashStore(), bytes(8 << 20), 1, 2, "p")
    with pytest.raises(ValueError, match="timeout must be positive"):
        ours.store_timeout(HashStore(), 0).__enter__()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda s: ours.synchronize(s, b"", 0, 0, "p"), "world_size must be at least 1"),
        (lambda s: ours.synchronize(s, b"", -1, 2, "p"), "rank -1 is outside a world of 2"),
        (lambda s: ours.synchronize(s, b"", 0, 2, "p", 0), "timeout must be positive"),
        (lambda s: ours.synchronize(s, b"", 0, 2, "p", host_rank=2), "host_rank 2 is outside"),
        (lambda s: ours.get_all(s, 2, "p", 2), "rank 2 is outside a world of 2"),
        (lambda s: ours.get_all(s, 0, "p", 2, timeout=-1), "timeout must be positive"),
        (lambda s: ours.rollcall(s, 5, 2), "rank 5 is outside a world of 2"),
        (lambda s: ours.rollcall(s, 0, 2, timeout=0), "timeout must be positive"),
        (lambda s: ours.clean_up(s, 0, -1, "p"), "world_size must be at least 1"),
        (lambda s: ours.clean_up(s, 2, 2, "p"), "rank 2 is outside a world of 2"),
        (lambda s: ours.barrier(s, 2, "p", attempt=-1), "attempt counts restarts from 0"),
    ],
)
def test_mistakes_of_the_other_functions(call: Any, says: str) -> None:
    """The other functions also raise at once, and send nothing."""
    store = HashStore()
    with pytest.raises(ValueError, match=says):
        call(store)
    assert keys_of(store) == []
