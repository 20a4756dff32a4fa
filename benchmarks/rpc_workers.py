"""Start one RPC group of many workers on this machine; print descriptors and times.

One worker is real: it calls ``init_rpc``, and then every other worker. The others are agents in a
few processes, a thread each; they start as workers do, but share their process's Python. So the
times are upper bounds. The group is started once with all workers on this host, and once with the
real one as if on another host: then it reaches every other over TCP and CURVE in ``init_rpc``.

    python benchmarks/rpc_workers.py [--workers N] [--json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

CROWDS = 4  # processes that the other workers share
START_S = 300.0


def options(port: int) -> Any:
    """Return the options of every worker."""
    from rankcall import rpc

    return rpc.construct_rpc_backend_options(
        rpc.BackendType.ZMQ,
        rpc_timeout=START_S,
        init_method=f"tcp://127.0.0.1:{port}",
        num_worker_threads=1,
        heartbeat_timeout=60.0,
    )


def crowd(ranks: range, count: int, port: int, pipe: Connection) -> None:
    """Be several workers of the group, a thread each, until told to end."""
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed.rpc import (
        _is_current_rpc_agent_set,
        _reset_current_rpc_agent,
        _set_and_start_rpc_agent,
        api,
    )

    from rankcall.rpc import rank_claims
    from rankcall.rpc.backends.zmq import static_start
    from rankcall.rpc.backends.zmq.agent_module import agent_module, zmq_library
    from rankcall.rpc.backends.zmq.worker import ZmqWorker
    from rankcall.rpc.static_group import StaticMembership

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    agent_module()
    starting = threading.Lock()

    def start(agent: Any) -> None:
        with starting:  # torch has one current agent for each process, and serves calls with it
            if _is_current_rpc_agent_set():
                _reset_current_rpc_agent()  # type: ignore[no-untyped-call]
            _set_and_start_rpc_agent(agent)

    class OwnEpochs(dict[str, int]):
        """A process takes part in an epoch once. Here, each thread is a worker of its own."""

        def get(self, *_: Any) -> None:  # type: ignore[override]
            return None

    rank_claims._last_epochs = OwnEpochs()
    api._init_rpc_states = start
    static_start._reach = lambda *_: None  # only the real worker reaches every other
    workers, errors = [], []

    def join(rank: int) -> None:
        try:
            store = PrefixStore("rpc/static", TCPStore("127.0.0.1", port, is_master=False))
            deadline = time.monotonic() + START_S
            membership = StaticMembership(store, f"w{rank}", rank, count)
            membership.claim_rank(deadline)
            worker = ZmqWorker(f"w{rank}", rank, zmq_library(), options(port))
            workers.append(worker)
            static_start.join_static(worker, membership, deadline)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
            # At once: the real worker may wait for this one until its own deadline.
            print(f"worker w{rank}: {errors[-1]}", file=sys.stderr, flush=True)

    pipe.send("ready")
    pipe.recv()
    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send(errors)
    pipe.recv()
    for worker in workers:
        worker.dir.close()
    os._exit(0)


def descriptors() -> int:
    """Return how many file descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


def timed(call: Callable[[], Any]) -> float:
    """Return how long a call takes, in s."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def real_worker(count: int, port: int, pipe: Connection) -> None:
    """Be the one worker that is measured."""
    import torch

    from rankcall import rpc
    from rankcall.rpc.backends.zmq.agent_module import agent_module

    torch.set_num_threads(1)
    agent_module()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the parent's
    pipe.send("ready")
    pipe.recv()

    def call_all() -> None:
        answers = [rpc.rpc_async(f"w{rank}", pow, args=(2, rank % 60)) for rank in range(1, count)]
        assert [answer.wait() for answer in answers] == [
            2 ** (rank % 60) for rank in range(1, count)
        ]

    before = descriptors()
    figures = {"start_s": timed(lambda: rpc.init_rpc("w0", "ZMQ", 0, count, options(port)))}
    figures["descriptors_at_start"] = descriptors() - before
    figures["first_calls_s"] = timed(call_all)
    figures["descriptors"] = descriptors() - before
    figures["second_calls_s"] = timed(call_all)
    pipe.send(figures)
    pipe.recv()
    os._exit(0)


def run(count: int, is_elsewhere: bool) -> dict[str, float]:
    """Start a group of so many workers; return the real one's figures."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    jobs: list[tuple[Callable[..., None], tuple[Any, ...]]] = [(real_worker, (count, store.port))]
    for number in range(CROWDS):
        jobs.append((crowd, (range(1 + number, count, CROWDS), count, store.port)))
    pipes, processes = [], []
    try:
        for number, (job, args) in enumerate(jobs):
            os.environ["RANKCALL_HOST"] = f"node-{'b' if number and is_elsewhere else 'a'}"
            pipe, theirs = context.Pipe()
            processes.append(context.Process(target=job, args=(*args, theirs), daemon=True))
            processes[-1].start()
            pipes.append(pipe)
        for pipe in pipes:
            pipe.recv()
        for pipe in pipes:
            pipe.send("go")
        figures: dict[str, float] = pipes[0].recv()
        errors = [error for pipe in pipes[1:] for error in pipe.recv()]
        assert not errors, errors[:3]
        for pipe in pipes:
            pipe.send("end")
        for process in processes:
            process.join(60)
    finally:
        for process in processes:
            process.kill()
    return figures


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ["RANKCALL_RPC_SECRET"] = os.urandom(16).hex()
    figures: dict[str, float] = {"workers": arguments.workers}
    with tempfile.TemporaryDirectory(prefix="rankcall-bench-", dir="/dev/shm") as folder:
        os.environ["RANKCALL_SHM"] = folder
        for where in ("one_host", "two_hosts"):
            for name, value in run(arguments.workers, where == "two_hosts").items():
                figures[f"{where}_{name}"] = round(value, 3)
    if arguments.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:32} {value:10.3f}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    main()
