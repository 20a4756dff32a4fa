"""How a group with several back ends is written down."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankcall.capture.groups import sides_of
from rankcall.ring.tables import Group

WORLD = Group("0", 0, "", "default_pg", (0, 1))


@pytest.mark.parametrize(
    ("backend", "on_devices", "on_host"),
    [
        ("nccl", "nccl", None),
        ("gloo", "gloo", None),
        ("undefined", "undefined", None),
        ("cpu:gloo", "cpu:gloo", None),
        ("cpu:gloo,cuda:gloo", "cpu:gloo,cuda:gloo", None),
        ("cuda:nccl", "cuda:nccl", None),
        ("cpu:gloo,cuda:nccl", "nccl", "gloo"),
        ("cuda:nccl,xpu:xccl,cpu:gloo", "nccl,xccl", "gloo"),
    ],
)
def test_a_back_end_of_its_own_for_the_cpu(
    backend: str, on_devices: str, on_host: str | None
) -> None:
    """It has a group of its own, unless it runs what is on devices, too."""
    devices, host = sides_of(replace(WORLD, backend=backend))
    assert devices == replace(WORLD, backend=on_devices)
    assert host == (on_host and replace(WORLD, name="0/cpu", backend=on_host))
