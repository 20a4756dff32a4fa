"""Leaders that speak for their hosts, and stores that outlive their host, with real processes."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import Any

import pytest
from hosting import attempt, connect, hosted
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


def _counted(rank: int, world_size: int, port: int, size: int) -> int:
    client = connect(port)
    for _ in range(2):
        _led(client, rank, world_size, size, 30)
    before = _sent(client)
    for _ in range(10):
        _led(client, rank, world_size, size, 30)
    return _sent(client) - before


def test_operations_grow_with_hosts() -> None:
    """Eight ranks cost the store what their leaders send: on two hosts as much as on two ranks."""
    with hosted() as (port, _):
        by_size = {size: run_ranks(_counted, 8, port, size, init=False) for size in (4, 2)}
    for size, sent in by_size.items():
        leaders = [count for rank, count in enumerate(sent) if rank % size == 0]
        others = [count for rank, count in enumerate(sent) if rank % size]
        assert not any(others), "only leaders talk to the store"
        # An arrival and a wait each; the last to come removes the round before instead of waiting.
        assert sum(leaders) <= 10 * (2 * len(leaders) + 2)


def _led_missing(rank: int, world_size: int, port: int, gone: list[int], how: str) -> Any:
    client = connect(port)
    _led(client, rank, world_size, 2, 30)
    if rank in gone:
        if how == "late":
            time.sleep(2.5)
            return attempt(lambda: _led(client, rank, world_size, 2, 10))
        os.kill(os.getpid(), signal.SIGKILL)
    told = attempt(lambda: _led(client, rank, world_size, 2, 1.5))
    if how == "late":
        assert attempt(lambda: _led(client, rank, world_size, 2, 10))[0] == ""
    return told


@pytest.mark.parametrize(
    ("gone", "how"),
    [([3], "late"), ([2], "late"), ([3], "killed"), ([2], "killed"), ([2, 3], "killed")],
)
def test_the_missing_are_named_rank_by_rank(gone: list[int], how: str) -> None:
    """A rank, a leader or a whole host that does not come is named by every other rank."""
    with hosted() as (port, _):
        results = try_ranks(_led_missing, 6, port, gone, how, init=False)
    for result in results:
        if result.rank in gone:
            if how == "late":
                assert result.value[0] == "", result.value
            continue
        name, text, took = result.value
        assert name == "BarrierTimeout", (result.rank, text, result.stderr[-2000:])
        assert f"missing_ranks=[{', '.join(map(str, gone))}]" in text, (result.rank, text)
        assert took < 2.6


def _failing_over(rank: int, world_size: int, hosts: list[str], first: int) -> Any:
    from rankcall import store

    client = store.failover(hosts, serve=1 if rank == 1 else None, connect_timeout=5)
    got = []
    for turn in range(6):
        if turn == 3 and rank == 0:
            os.kill(first, signal.SIGKILL)
        client.barrier(world_size, "steps", 30, rank)
        got.append(client.synchronize(b"%d" % (rank + turn), rank, world_size, "x", 30))
    client.barrier(world_size, "end", 30, rank)
    if rank == 1:
        time.sleep(0.5)  # it hosts the store that the others read from last
    assert got == [[b"%d" % (one + turn) for one in range(world_size)] for turn in range(6)]
    return client.moves


def test_survivors_go_on_with_the_next_host() -> None:
    """The store's host is killed in mid-job; every barrier and exchange comes true."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        standby = free.getsockname()[1]
    with hosted() as (port, pid):
        hosts = [f"127.0.0.1:{port}", f"127.0.0.1:{standby}"]
        assert run_ranks(_failing_over, 4, hosts, pid, init=False) == [1] * 4


def test_no_host_is_left() -> None:
    """When nobody answers, the error lists whom it asked."""
    from rankcall import StoreLost, store

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(StoreLost, match=f"no store is left of 127.0.0.1:{port}"):
        store.failover([f"127.0.0.1:{port}"], connect_timeout=0.5)
    for hosts in ([], ["nowhere"], ["a:0"], ["a:x"]):
        with pytest.raises(ValueError, match="host"):
            store.failover(hosts)
