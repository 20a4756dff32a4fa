"""Records copied whole are what NumPy makes of them field by field."""

from __future__ import annotations

import numpy as np

from rankcall._whole import Rows, copied, joined, picked, put
from rankcall.record import RECORD


def random_rows(count: int, seed: int) -> Rows:
    """Return records with anything in every field."""
    random = np.random.default_rng(seed)
    return np.frombuffer(random.bytes(count * RECORD.itemsize), RECORD)


def test_as_numpy_does_it() -> None:
    """By mask, by places, from a part, with nothing in it; what is returned is a copy."""
    rows, other = random_rows(50, 1), random_rows(7, 2)
    mask = rows["op"] % 3 == 0
    for part in (rows, rows[10:40], rows[::3], rows[:0]):
        assert copied(part).tobytes() == part.copy().tobytes()
        assert joined([part, other]).tobytes() == np.concatenate([part, other]).tobytes()
    for which in (mask, np.array([3, 0, 3, 49]), np.array([], np.int64), np.zeros(50, np.bool_)):
        assert picked(rows, which).tobytes() == rows[which].tobytes()
    assert not np.shares_memory(copied(rows), rows)
    ours, theirs = copied(rows), rows.copy()
    put(ours, np.arange(0, 14, 2), other)
    theirs[np.arange(0, 14, 2)] = other
    assert ours.tobytes() == theirs.tobytes()
    assert joined([other]) is other
