"""Dynamic groups: workers join and leave in any order, and some are killed."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from lag import stopwatch
from ranks import run_ranks, try_ranks
from rpcgroup import aside, come_up, names
from world import wait_until

pytestmark = pytest.mark.multiproc


def _all_call_all(rank: int, world_size: int, first_leaves_first: bool) -> Any:
    """All join at once, each calls each, and they leave in turn."""
    from rankcall import rpc

    come_up(rank, None, "ZMQ")
    store = aside()
    store.add("together", 1)
    wait_until(lambda: int(store.add("together", 0)) == world_size)
    assert len(names()) == world_size
    powers = [rpc.rpc_sync(f"w{to}", pow, args=(rank, to)) for to in range(world_size)]
    store.add("called", 1)
    wait_until(lambda: int(store.add("called", 0)) == world_size)
    turn = rank if first_leaves_first else world_size - 1 - rank
    wait_until(lambda: int(store.add("left", 0)) == turn)
    wait_until(lambda: len(names()) == world_size - turn)
    rpc.shutdown(timeout=120)
    store.add("left", 1)
    return powers


@pytest.mark.parametrize("first_leaves_first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_join_together_and_leave_in_turn(first_leaves_first: bool) -> None:
    """Every worker can call every other; one that leaves is gone for the rest; any may be first."""
    powers = run_ranks(_all_call_all, 4, first_leaves_first, init=False, timeout=240)
    assert powers == [[rank**to for to in range(4)] for rank in range(4)]


def _one_is_killed(rank: int, world_size: int) -> Any:
    """Rank 1 dies without a word; the others go on, and one of its name joins after it."""
    from rankcall import rpc

    store = aside()
    if rank == 2:
        store.wait(["killed"])
        began = time.monotonic()
        come_up(1, None, "ZMQ", "w1")
        joined_s = time.monotonic() - began
        assert rpc.rpc_sync("w0", pow, args=(3, 2)) == 9
        store.set("joined", "")
        rpc.shutdown(timeout=120)
        return joined_s
    come_up(rank, None, "ZMQ")
    store.add("together", 1)
    wait_until(lambda: int(store.add("together", 0)) == 2)
    if rank == 1:
        store.set("there", str(os.getpid()))
        time.sleep(600)
    store.wait(["there"])
    assert rpc.rpc_sync("w1", pow, args=(2, 3)) == 8
    pending = rpc.rpc_async("w1", time.sleep, args=(600,))
    os.kill(int(store.get("there")), signal.SIGKILL)
    with stopwatch() as took, pytest.raises(RuntimeError) as caught:
        pending.wait()
    failed_s = took[0]
    store.set("killed", "")
    store.wait(["joined"])
    rpc.shutdown(timeout=120)
    return failed_s, str(caught.value)


def test_a_killed_member_is_replaced() -> None:
    """Its calls fail within seconds, and a worker of its name and rank can join at once."""
    results = try_ranks(_one_is_killed, 3, init=False, timeout=240)
    first, killed, second = results
    assert killed.exitcode == -signal.SIGKILL
    assert first.ok, first.error or first.stderr
    assert second.ok, second.error or second.stderr
    failed_s, message = first.value
    assert failed_s < 5
    assert second.value < 15
    assert "worker 'w1' is gone: its process" in message


def _same_name(rank: int, world_size: int) -> Any:
    """The second of a name is refused, can join under another, and join again after leaving."""
    from rankcall import rpc

    store = aside()
    if rank == 0:
        come_up(0, None, "ZMQ")
        store.set("there", "")
        store.wait(["done"])
        rpc.shutdown(timeout=120)
        return None
    store.wait(["there"])
    name, number = ("w0", 1) if rank == 1 else ("w2", 0)
    with pytest.raises(RuntimeError, match="is not unique") as caught:
        come_up(number, None, "ZMQ", name)
    if rank == 2:
        store.set("refused", "")
        return str(caught.value)
    store.wait(["refused"])
    for _ in range(2):
        come_up(1, None, "ZMQ")
        assert rpc.rpc_sync("w0", pow, args=(3, 2)) == 9
        assert names() == {"w0", "w1"}
        rpc.shutdown(timeout=120)
    store.set("done", "")
    return str(caught.value)


def test_a_failed_join_leaves_nothing_behind() -> None:
    """The error says that the name or rank is taken; the same process may join again."""
    _, by_name, by_rank = run_ranks(_same_name, 3, init=False, timeout=240)
    assert by_name.startswith("worker name 'w0' is not unique")
    assert by_rank == "rank 0 of worker 'w2' is not unique: worker 'w0' has it"
