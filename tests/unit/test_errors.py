"""Every error survives the way to another process."""

from __future__ import annotations

import pickle

import pytest

from rankcall import errors


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "RankcallError"])
def test_an_error_can_be_pickled(name: str) -> None:
    """As it is on its way out of a worker; its text and attributes arrive."""
    error = getattr(errors, name)("who, what, where")
    error.note = 3
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_a_late_group_is_a_late_barrier() -> None:
    """Whoever catches the one, or Python's own, catches the other, and finds who was missing."""
    error = errors.RpcTimeout("late", missing_ranks=[2], arrived=2, world_size=3)
    assert isinstance(error, (errors.BarrierTimeout, RuntimeError))
    assert isinstance(error, TimeoutError)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.missing_ranks, copy.arrived, copy.world_size) == ((2,), 2, 3)
