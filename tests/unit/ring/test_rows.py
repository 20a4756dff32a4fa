"""Copies of records as bytes equal the copies that NumPy makes field by field."""

from __future__ import annotations

import numpy as np

from rankcall.record import RECORD, Rows, assign_rows, concat_rows, copy_rows, take_rows


def random_rows(count: int, seed: int) -> Rows:
    """Return records with anything in every field."""
    random = np.random.default_rng(seed)
    return np.frombuffer(random.bytes(count * RECORD.itemsize), RECORD)


def test_as_numpy_does_it() -> None:
    """Rows are taken by mask, by position, from a part, or none; the result is a copy."""
    rows, other = random_rows(50, 1), random_rows(7, 2)
    mask = rows["op"] % 3 == 0
    for part in (rows, rows[10:40], rows[::3], rows[:0]):
        assert copy_rows(part).tobytes() == part.copy().tobytes()
        assert concat_rows([part, other]).tobytes() == np.concatenate([part, other]).tobytes()
    for which in (mask, np.array([3, 0, 3, 49]), np.array([], np.int64), np.zeros(50, np.bool_)):
        assert take_rows(rows, which).tobytes() == rows[which].tobytes()
    assert not np.shares_memory(copy_rows(rows), rows)
    ours, theirs = copy_rows(rows), rows.copy()
    assign_rows(ours, np.arange(0, 14, 2), other)
    theirs[np.arange(0, 14, 2)] = other
    assert ours.tobytes() == theirs.tobytes()
    assert concat_rows([other]) is other
