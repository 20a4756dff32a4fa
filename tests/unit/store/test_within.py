"""``within``: what it refuses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rankcall


@pytest.fixture
def group() -> Iterator[None]:
    """Make this process a world of one, on Gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("seconds", "error"),
    [(0, ValueError), (-1, ValueError), (math.inf, ValueError), ("30", TypeError)],
)
def test_a_deadline_is_positive_and_finite(seconds: Any, error: type[Exception]) -> None:
    """Anything else is refused before the block begins."""
    with pytest.raises(error, match="seconds"), rankcall.within(seconds):
        pytest.fail("the block ran")


def test_without_a_gloo_group_it_is_refused() -> None:
    """Nothing could end the calls: there is no group, or only those of other back ends."""
    with pytest.raises(ValueError, match="Gloo"), rankcall.within(30):
        pytest.fail("the block ran")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(ValueError, match="Gloo"), rankcall.within(30):
            pytest.fail("the block ran")
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_longer_deadline_changes_nothing() -> None:
    """A group keeps its own timeout if that is shorter."""
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    usual = backend.options._timeout
    with rankcall.within(10 * usual.total_seconds()):
        assert backend.options._timeout == usual
