"""Measure barriers and exchanges over one TCPStore, beside torch's elastic store utilities.

Real clients: processes with a few threads each, every thread a rank with a connection of its own,
made beforehand. Blocks of ours and of the model alternate; a block is some barriers in a row, its
time the time from the first rank's start to the last one's end. The model gets a new prefix each
time, because it needs one; ours uses one over and over, with names (``rank``) and clean-up on.
``missing_seconds`` is how long after its timeout the slowest rank held the complete list.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import queue
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

# torch looks up the name of every address it connects to, a thousand times here: ask nobody.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns each time that nobody was asked

from torch.distributed import TCPStore
from torch.distributed.elastic.utils import store as model

from rankcall import store as ours
from rankcall.c10d.own_connections import state_of
from rankcall.errors import BarrierTimeout

Figures = dict[str, Any]
TIMEOUT_S = 300.0
NAMING_TIMEOUT_S = 5.0
DATA = bytes(64)


def serve(pipe: Connection) -> None:
    """Host the store, and nothing else, until told to end."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    while pipe.recv() == "keys":
        pipe.send(store.num_keys())


class Rank(threading.Thread):
    """One rank: a thread with a client, which does one job after another."""

    def __init__(self, rank: int, port: int) -> None:
        super().__init__(daemon=True)
        self.rank = rank
        self.jobs: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.store = TCPStore(
            "127.0.0.1",
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=TIMEOUT_S),
        )

    def run(self) -> None:
        while True:
            job = self.jobs.get()
            try:
                self.results.put(job())
            except BaseException as error:
                self.results.put(error)


def work(pipe: Connection, ranks: range, port: int) -> None:
    """Be some of the ranks; do what comes down the pipe on each, at once."""
    gc.freeze()  # a collection of what was inherited would copy all of it, in every process
    threads = [Rank(rank, port) for rank in ranks]
    for thread in threads:
        thread.start()
    pipe.send("ready")
    while True:
        name, arguments = pipe.recv()
        if name == "end":
            return
        for thread in threads:
            thread.jobs.put(partial(JOBS[name], thread, *arguments))
        results = [thread.results.get() for thread in threads]
        failed = [result for result in results if isinstance(result, BaseException)]
        if failed:
            raise failed[0]
        pipe.send(results)


def block(rank: Rank, which: str, size: int, first: int, count: int) -> tuple[float, float]:
    """Go through some barriers or exchanges; return when this rank began and ended."""
    began = time.monotonic()
    for turn in range(first, first + count):
        if which == "our barrier":
            ours.barrier(rank.store, size, f"b{size}", TIMEOUT_S, rank.rank)
        elif which == "model barrier":
            model.barrier(rank.store, size, f"m{size}/{turn}", TIMEOUT_S, rank.rank)
        elif which == "our synchronize":
            ours.synchronize(rank.store, DATA, rank.rank, size, f"b{size}", TIMEOUT_S)
        else:
            model.synchronize(rank.store, DATA, rank.rank, size, f"s{size}/{turn}", TIMEOUT_S)
    return began, time.monotonic()


def late(rank: Rank, size: int, missing: list[int]) -> tuple[float, bool]:
    """Come to a barrier where some do not; return how long after the timeout all were named."""
    if rank.rank in missing:
        return 0.0, True
    began = time.monotonic()
    try:
        ours.barrier(rank.store, size, "missing", NAMING_TIMEOUT_S, rank.rank)
    except BarrierTimeout as error:
        took = time.monotonic() - began - NAMING_TIMEOUT_S
        return took, list(error.missing_ranks) == missing
    raise AssertionError("a barrier passed without some ranks")


class Counted:
    """A client that counts its round trips; the store does not answer ``set`` and ``append``."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.round_trips = 0

    def __getattr__(self, name: str) -> Any:
        self.round_trips += name not in ("set", "append")
        return getattr(self._client, name)


def count(rank: Rank) -> None:
    """Count the round trips of this rank's own connections from now on."""
    for link in state_of(rank.store).idle:
        link._client = Counted(link._client)


def sent(rank: Rank) -> int:
    """Return the round trips of this rank's own connections."""
    return sum(link._client.round_trips for link in state_of(rank.store).idle)


def clean(rank: Rank, size: int, prefix: str) -> None:
    """Say that this rank has no more use for a prefix."""
    ours.clean_up(rank.store, rank.rank, size, prefix)


JOBS: dict[str, Callable[..., Any]] = {
    job.__name__: job for job in (block, late, count, sent, clean)
}


class World:
    """A store and its ranks, in processes of their own."""

    def __init__(self, size: int, per_process: int) -> None:
        self.size = size
        context = get_context("fork")
        self._server, theirs = context.Pipe()
        self._processes = [context.Process(target=serve, args=(theirs,), daemon=True)]
        self._processes[0].start()
        port = self._server.recv()
        self._pipes = []
        for start in range(0, size, per_process):
            mine, theirs = context.Pipe()
            ranks = range(start, min(size, start + per_process))
            process = context.Process(target=work, args=(theirs, ranks, port), daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(mine)
        for pipe in self._pipes:
            pipe.recv()

    def all(self, job: str, *arguments: Any) -> list[Any]:
        """Do a job on every rank at once; return the results in rank order."""
        for pipe in self._pipes:
            pipe.send((job, arguments))
        return [result for pipe in self._pipes for result in pipe.recv()]

    def keys(self) -> int:
        """Return how many keys the store has."""
        self._server.send("keys")
        return int(self._server.recv())

    def seconds(self, which: str, first: int, count: int) -> float:
        """Time a block: seconds for one of its barriers or exchanges."""
        times = self.all("block", which, self.size, first, count)
        began, ended = min(start for start, _ in times), max(end for _, end in times)
        return float(ended - began) / count

    def close(self) -> None:
        """End all processes."""
        for pipe in self._pipes:
            pipe.send(("end", ()))
        self._server.send("end")
        for process in self._processes:
            process.join(20)


def compare(world: World, kind: str, blocks: int, count: int) -> tuple[float, float]:
    """Return the medians of ours and the model's, of alternating blocks, in seconds."""
    times: dict[str, list[float]] = {"our": [], "model": []}
    for turn in range(-1, blocks):
        order = ("our", "model") if turn % 2 else ("model", "our")
        for implementation in order:
            took = world.seconds(f"{implementation} {kind}", turn * count, count)
            if turn >= 0:  # the first block connects
                times[implementation].append(took)
    return statistics.median(times["our"]), statistics.median(times["model"])


def measure(size: int, blocks: int, per_process: int) -> Figures:
    """Measure a world of one size."""
    world = World(size, per_process)
    count = max(2, min(20, 1024 // size))
    barrier = compare(world, "barrier", blocks, count)
    exchange = compare(world, "synchronize", blocks, max(2, count // 2))
    world.all("count")
    world.seconds("our barrier", 0, count)
    trips = sum(world.all("sent")) / (size * count)
    figures = {
        "barrier_ratio": barrier[0] / barrier[1],
        "barrier_ms": barrier[0] * 1e3,
        "model_barrier_ms": barrier[1] * 1e3,
        "synchronize_ratio": exchange[0] / exchange[1],
        "synchronize_ms": exchange[0] * 1e3,
        "model_synchronize_ms": exchange[1] * 1e3,
        "round_trips": trips,
    }
    world.close()
    return figures


def name_missing(size: int, missing: list[int], per_process: int) -> Figures:
    """Let some of a world not come; then use it properly and clean up."""
    world = World(size, per_process)
    empty = world.keys()
    outcomes = world.all("late", size, missing)
    for _ in range(3):
        world.seconds("our barrier", 0, 2)
        world.seconds("our synchronize", 0, 2)
    world.all("clean", size, f"b{size}")
    world.all("clean", size, "missing")
    figures = {
        "missing_seconds": max(took for took, _ in outcomes),
        "missing_named_share": sum(named for _, named in outcomes) / size,
        "keys_left": world.keys() - empty,
    }
    world.close()
    return figures


def rounded(figures: Any) -> Any:
    """Round for reading."""
    if isinstance(figures, dict):
        return {name: rounded(value) for name, value in figures.items()}
    return round(figures, 3) if isinstance(figures, float) else figures


def main() -> None:
    """Measure, and print one JSON object or a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--clients", type=int, nargs="*", default=[16, 64, 256, 1024])
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--per-process", type=int, default=16)
    parser.add_argument("--missing-of", type=int, default=512)
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    clients = {
        str(size): measure(size, options.blocks, max(2, min(options.per_process, size // 4)))
        for size in options.clients
    }
    figures: Figures = {"clients": clients}
    size = options.missing_of
    missing = [0, *range(3, size, max(1, size // 39))][:40]
    figures.update(name_missing(size, missing, options.per_process))
    figures["round_trips"] = max(
        [world_figures["round_trips"] for world_figures in clients.values()], default=None
    )
    if options.json:
        print(json.dumps(rounded(figures)))
        return
    for name, value in rounded(figures).items():
        print(f"{name}: {json.dumps(value, indent=1)}")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
