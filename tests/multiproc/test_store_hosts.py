"""Leaders that speak for their hosts, with real processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hosting import LONG, all_at, attempt, await_ranks, connect, hosted
from ranks import run_ranks, try_ranks

pytestmark = pytest.mark.multiproc


def _led(client: Any, rank: int, world_size: int, size: int, timeout: float) -> None:
    from rankcall import store

    store.barrier(
        client, world_size, "p", timeout, rank, local_rank=rank % size, local_world_size=size
    )


def _sent(client: Any) -> int:
    from rankcall.store import _connection

    return sum(link.operations for link in _connection.local(client).idle)


def _counted(rank: int, world_size: int, port: int, size: int, folder: str) -> int:
    from rankcall.store import _hosts

    _hosts._PATIENCE_S = _hosts._LOOK_S = LONG  # nobody is late: this machine is only busy
    client = connect(port)
    for _ in range(2):
        _led(client, rank, world_size, size, 30)
    before = _sent(client)
    for _ in range(10):
        _led(client, rank, world_size, size, 30)
    all_at(folder, f"through-{size}", rank, world_size)  # a leader that ends takes its store along
    return _sent(client) - before


def test_operations_grow_with_hosts(tmp_path: Path) -> None:
    """Eight ranks cost the store what their leaders send: on two hosts as much as on two ranks."""
    with hosted() as (port, _):
        by_size = {
            size: run_ranks(_counted, 8, port, size, str(tmp_path), init=False) for size in (4, 2)
        }
    for size, sent in by_size.items():
        leaders = [count for rank, count in enumerate(sent) if rank % size == 0]
        others = [count for rank, count in enumerate(sent) if rank % size]
        assert not any(others), "only leaders talk to the store"
        # An arrival and a wait each; the last to come removes the round before instead of waiting.
        assert sum(leaders) <= 10 * (2 * len(leaders) + 2)


def _led_missing(
    rank: int, world_size: int, port: int, folder: str, gone: list[int], how: str
) -> Any:
    client, here = connect(port), world_size - len(gone)
    _led(client, rank, world_size, 2, LONG)
    if rank in gone and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank in gone:
        await_ranks(folder, "told", here)
        return attempt(lambda: _led(client, rank, world_size, 2, LONG))
    # Twice: who has come by the end of the first is not missing in the second.
    attempt(lambda: _led(client, rank, world_size, 2, 1.0))
    all_at(folder, "arrived", rank, here)
    told = attempt(lambda: _led(client, rank, world_size, 2, 1.5))
    all_at(folder, "told", rank, here)
    if how == "late":
        assert attempt(lambda: _led(client, rank, world_size, 2, LONG))[0] == ""
    return told


@pytest.mark.parametrize(
    ("gone", "how"),
    [([3], "late"), ([2], "late"), ([3], "killed"), ([2], "killed"), ([2, 3], "killed")],
)
def test_the_missing_are_named_rank_by_rank(gone: list[int], how: str, tmp_path: Path) -> None:
    """A rank, a leader or a whole host that does not come is named by every other rank."""
    with hosted() as (port, _):
        results = try_ranks(_led_missing, 6, port, str(tmp_path), gone, how, init=False)
    for result in results:
        if result.rank in gone:
            if how == "late":
                assert result.value[0] == "", result.value
            continue
        assert result.ok, result.error or result.stderr[-2000:]
        name, text, took = result.value
        assert name == "BarrierTimeout", (result.rank, text, result.stderr[-2000:])
        assert f"missing_ranks=[{', '.join(map(str, gone))}]" in text, (result.rank, text)
        assert took < 2.6
