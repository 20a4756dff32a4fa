"""``python -m rankcall.rpc.check``: test and time RPC between hosts before a job depends on it.

Run it on every host with the same store address. Each worker times calls to every other; rank 0
prints a table. If workers are missing, it exits with 1 and their names.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

from rankcall import rpc
from rankcall.errors import RankcallError
from rankcall.process import host_name

_LARGE = 16 << 20  # bytes: enough that a line's bandwidth shows, and not its latency
_SMALL_CALLS, _LARGE_CALLS = 50, 5  # of which the median is taken


def main(arguments: list[str] | None = None) -> int:
    """Run the check and return the exit code."""
    options = _parser().parse_args(arguments)
    rank, world_size = options.rank, options.world_size
    try:
        made = rpc.construct_rpc_backend_options(
            rpc.BackendType[options.backend],
            rpc_timeout=options.timeout,
            init_method=f"tcp://{options.store}",
        )
        rpc.init_rpc(f"worker-{rank}", options.backend, rank, world_size, made)
        try:
            if rank == 0:
                _print(_gather(world_size))
        finally:
            rpc.shutdown(timeout=options.timeout)
    except (RankcallError, RuntimeError) as error:
        print(f"rankcall.rpc.check: rank {rank} on {host_name()}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rankcall.rpc.check",
        description="Time RPC between workers, and name those that cannot be reached.",
    )
    parser.add_argument("store", metavar="HOST:PORT", help="the address of rank 0's store")
    parser.add_argument("--rank", type=int, default=int(os.environ.get("RANK", 0)))
    parser.add_argument("--world-size", type=int, default=int(os.environ.get("WORLD_SIZE", 1)))
    parser.add_argument("--backend", default="ZMQ", help="ZMQ (default) or TENSORPIPE")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for each step")
    return parser


def _gather(world_size: int) -> list[tuple[str, str, str, float, float]]:
    """Return a row for each ordered pair: from, its host, to, µs a call, GB/s one way."""
    rows = []
    for sender in range(world_size):  # one after the other: they would slow each other down
        host, figures = rpc.rpc_sync(f"worker-{sender}", _measure, args=(sender, world_size))
        rows += [(f"worker-{sender}", host, to, small, speed) for to, small, speed in figures]
    return rows


def _measure(me: int, world_size: int) -> tuple[str, list[tuple[str, float, float]]]:
    """Time calls to every other worker; run on each worker in turn."""
    import torch

    large = torch.ones(_LARGE, dtype=torch.uint8)
    figures = []
    for other in range(world_size):
        to = f"worker-{other}"
        if other == me and world_size > 1:
            continue
        small_s = _median(to, max, (1, 2), _SMALL_CALLS)
        large_s = _median(to, torch.numel, (large,), _LARGE_CALLS)
        figures.append((to, small_s * 1e6, _LARGE / large_s / 1e9))
    return host_name(), figures


def _median(to: str, function: Any, args: tuple[Any, ...], count: int) -> float:
    times = []
    for _ in range(count + 1):  # the first connects
        began = time.perf_counter()
        rpc.rpc_sync(to, function, args=args)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _print(rows: list[tuple[str, str, str, float, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("from", "host", "to", "round trip, µs", "16 MiB one way, GB/s")
    for sender, host, to, small, speed in rows:
        table.add_row(sender, host, to, f"{small:.0f}", f"{speed:.2f}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
