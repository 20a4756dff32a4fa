"""Drive the RPC agent in two processes; run under a sanitizer by test_rpc_sanitized.py.

In each round the workers come up, on one host or on two, and several threads of each call the
other with tensors of all sizes. Some calls time out, some answers come after the end of the agent,
and a tensor outlives it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from rankcall import rpc

ROUNDS, THREADS, CALLS = 4, 3, 25
SIZES = (1, 1000, 16_384, 16_385, 300_000)  # of 4 bytes; 16,384 is 64 KiB
promised: list[torch.futures.Future[Any]] = []


def echo(tensor: Any) -> Any:
    """Return a tensor."""
    return tensor


def late(size: int) -> Any:
    """Return a tensor after the caller has given the call up."""
    time.sleep(0.15)
    return torch.ones(size)


@rpc.functions.async_execution
def later() -> Any:
    """Return a future that completes after the end of the agent."""
    promised.append(torch.futures.Future())
    return promised[-1]


def call(other: str, seed: int, kept: list[Any]) -> None:
    """Call the other worker, and check what comes back."""
    for i in range(CALLS):
        sent = torch.full((SIZES[(seed + i) % len(SIZES)],), float(i))
        received = rpc.rpc_sync(other, echo, args=(sent,), timeout=60)
        assert torch.equal(sent, received)
        kept.append(received)
        if len(kept) > 5:
            kept.pop(0)
        if i % 10 == 3:
            with contextlib.suppress(RuntimeError):
                rpc.rpc_sync(other, late, args=(20_000,), timeout=0.05)
                raise AssertionError("the call did not time out")


def work(rank: int, store_port: int, *ports: int) -> None:
    """Be one of the two workers."""
    torch.set_num_threads(1)
    kept: list[Any] = []
    store = TCPStore("127.0.0.1", store_port, is_master=rank == 0)
    for number, port in enumerate(ports):
        os.environ["RANKCALL_HOST"] = f"node-{rank * (number % 2)}"
        options = rpc.construct_rpc_backend_options(
            rpc.BackendType.ZMQ, rpc_timeout=300, init_method=f"tcp://127.0.0.1:{port}"
        )
        rpc.init_rpc(f"w{rank}", "ZMQ", rank, 2, options)
        other = f"w{1 - rank}"
        threads = [threading.Thread(target=call, args=(other, i, kept)) for i in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=400)
            assert not thread.is_alive()
        unanswered = rpc.rpc_async(other, later, timeout=100)
        while not promised:
            time.sleep(0.01)
        store.add(f"round {number}", 1)
        while int(store.add(f"round {number}", 0)) < 2:
            time.sleep(0.01)
        rpc.shutdown(graceful=False)
        promised.pop().set_result(torch.ones(20_000))
        del unanswered
    for tensor in kept:
        assert bool((tensor == tensor[0]).all())


def main() -> None:
    """Start the two workers and wait for them."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
    from ports import free_port

    ports = [str(free_port()) for _ in range(1 + ROUNDS)]
    workers = [subprocess.Popen([sys.executable, __file__, str(rank), *ports]) for rank in range(2)]
    try:
        assert [worker.wait(timeout=500) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
    print("ok")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(*map(int, sys.argv[1:]))
    else:
        main()
