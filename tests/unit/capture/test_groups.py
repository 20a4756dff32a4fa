"""How a group with several back ends is written down."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankcall.capture.groups import sides_of
from rankcall.ring.tables import Group

WORLD = Group("0", 0, "as written", "default_pg", (0, 1))


@pytest.mark.parametrize(
    "back_ends", [{}, {"cuda": "nccl"}, {"cpu": "gloo"}, {"cpu": "gloo", "cuda": "gloo"}]
)
def test_one_back_end(back_ends: dict[str, str]) -> None:
    """The group stays as it is."""
    assert sides_of(WORLD, back_ends) == (WORLD, None)


def test_a_back_end_of_its_own_for_the_cpu() -> None:
    """It has a group of its own."""
    devices, host = sides_of(WORLD, {"cuda": "nccl", "xpu": "xccl", "cpu": "gloo"})
    assert devices == replace(WORLD, backend="nccl,xccl")
    assert host == replace(WORLD, name="0/cpu", backend="gloo")
