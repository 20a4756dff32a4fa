"""Stores that outlive their host, with real processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hosting import all_at, attempt, hosted, stop
from ports import free_port
from ranks import run_ranks

pytestmark = pytest.mark.multiproc
LONG = 60.0


def _failing_over(rank: int, world_size: int, hosts: list[str], first: int, folder: str) -> Any:
    from rankcall import store

    client = store.failover(hosts, connect_timeout=5)
    answers = []
    for turn in range(6):
        if turn == 3 and rank == 0:
            os.kill(first, signal.SIGKILL)
        client.barrier(world_size, "steps", 30, rank)
        answers.append(client.synchronize(b"%d" % (rank + turn), rank, world_size, "x", 30))
    client.barrier(world_size, "end", 30, rank)
    all_at(folder, "done", rank, world_size)  # rank 1 hosts the store that they read from last
    assert answers == [
        [b"%d" % (member + turn) for member in range(world_size)] for turn in range(6)
    ]
    return client.moves


def test_survivors_go_on_with_the_next_host(tmp_path: Path) -> None:
    """The store's host is killed in mid-job; every barrier and exchange comes true."""
    with hosted() as (port, pid), hosted() as (standby, _):
        hosts = [f"127.0.0.1:{port}", f"127.0.0.1:{standby}"]
        assert run_ranks(_failing_over, 4, hosts, pid, str(tmp_path), init=False) == [1] * 4


def _host_stopped(
    rank: int, world_size: int, hosts: list[str], first: int, folder: str, how: str
) -> Any:
    from rankcall import store

    client = store.failover(hosts, connect_timeout=5)
    client.barrier(world_size, "steps", LONG, rank)
    all_at(folder, "passed", rank, world_size)
    if rank == 0:
        stop(first)
    all_at(folder, "stopped", rank, world_size)
    outcomes = []
    if how == "by all":
        outcomes.append(attempt(lambda: client.barrier(world_size, "steps", 2.0, rank)))
    elif rank == 0:  # rank 1 has not called meanwhile, and finds the host as it was
        outcomes.append(attempt(lambda: client.barrier(world_size, "steps", 2.0, rank)))
        os.kill(first, signal.SIGCONT)
    all_at(folder, "told", rank, world_size)
    if how == "by one" and rank == 1:
        outcomes.append(attempt(lambda: client.barrier(world_size, "steps", 2.0, rank)))
        outcomes.append(attempt(lambda: client.barrier(world_size, "other", 0.5, rank)))
    answers = []
    for turn in range(2):
        client.barrier(world_size, "steps" if how == "by all" else "on", LONG, rank)
        answers.append(client.synchronize(b"%d" % (rank + turn), rank, world_size, "x", LONG))
    assert answers == [
        [b"%d" % (member + turn) for member in range(world_size)] for turn in range(2)
    ]
    all_at(folder, "done", rank, world_size)
    return client.moves, outcomes


@pytest.mark.parametrize("how", ["by all", "by one"])
def test_a_host_that_is_stopped_is_left(how: str, tmp_path: Path) -> None:
    """In time, by all, also by those for whom it goes on meanwhile."""
    with hosted() as (port, pid), hosted() as (standby, _):
        hosts = [f"127.0.0.1:{port}", f"127.0.0.1:{standby}"]
        results = run_ranks(_host_stopped, 2, hosts, pid, str(tmp_path), how, init=False)
    for moves, outcomes in results:
        assert moves == 1
        for name, text, took in outcomes:
            assert name in ("", "StoreLostError", "BarrierTimeout"), text
            assert took < 3
    assert results[0][1][0][0] == "StoreLostError"


def test_no_host_is_left() -> None:
    """If no host answers, the error lists the hosts that were tried."""
    from rankcall import store
    from rankcall.errors import StoreLostError

    port = free_port()
    with pytest.raises(StoreLostError, match=f"no store is left of 127.0.0.1:{port}"):
        store.failover([f"127.0.0.1:{port}"], connect_timeout=0.5)
    for hosts in ([], ["nowhere"], ["a:0"], ["a:x"]):
        with pytest.raises(ValueError, match="host"):
            store.failover(hosts)
