"""Which ranks are on other hosts: by torchrun's variables, and by names that ranks announce."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from tracing import Clock

from rankcall.capture.hosts import Hosts, ranks_of_this_node


def test_torchrun_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's ranks are consecutive; uneven nodes are no different."""
    for name, value in (
        ("RANK", "5"),
        ("LOCAL_RANK", "2"),
        ("LOCAL_WORLD_SIZE", "4"),
        ("GROUP_RANK", "1"),
    ):
        monkeypatch.setenv(name, value)
    here = ranks_of_this_node()
    assert here == range(3, 7)
    hosts = Hosts(here, "any", lambda ranks: {})
    assert [rank for rank in range(9) if hosts.is_elsewhere(rank)] == [0, 1, 2, 7, 8]
    assert not hosts.crosses((3, 6))
    assert hosts.crosses((2, 3))
    for name in ("GROUP_RANK", "LOCAL_WORLD_SIZE"):
        with monkeypatch.context() as patch:
            patch.delenv(name)
            assert ranks_of_this_node() is None


def test_names_are_asked_for_until_they_are_told() -> None:
    """A rank without an announced host counts as remote; its host is requested again later."""
    announced: dict[int, str] = {0: "a"}
    asked: list[list[int]] = []
    clock = Clock()

    def lookup(ranks: Iterable[int]) -> dict[int, str]:
        asked.append(list(ranks))
        return {rank: announced[rank] for rank in asked[-1] if rank in announced}

    hosts = Hosts(None, "a", lookup, clock)
    assert hosts.crosses((0, 1))
    announced[1] = "a"
    assert hosts.crosses((0, 1))  # too soon to ask again
    assert asked == [[0], [1]]
    clock.now += 1
    assert not hosts.crosses((0, 1))
    assert not hosts.is_elsewhere(1)
    assert asked == [[0], [1], [1]]
    announced[2] = "b"
    assert hosts.crosses((0, 2))
    assert hosts.is_elsewhere(2)
    assert len(asked) == 4
    assert hosts.crosses(())  # a group without known ranks
