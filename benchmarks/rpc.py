"""Time calls through rankcall's ZMQ back end and through torch's TensorPipe, side by side.

Two processes a back end, all on this host; the back ends take turns, round by round, so that a
noisy machine disturbs both. No name server is asked. `send`: a tensor goes, a number comes back;
`echo`: it comes back too; `swap`: another tensor of its size comes back.
Prints medians in µs (JSON with --json) and ratios, ours over theirs; and how long it takes on ZMQ
to fetch and keep thousands of tensors, which should grow in step with their number.

    python benchmarks/rpc.py [--rounds N] [--join-rounds N] [--json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

# torch looks up the names of addresses when it connects. A name server that drops some of many
# requests at once would add five seconds to a join, on both back ends.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns each time that none was asked

BACKENDS = ("zmq", "tensorpipe")
SIZES = {"4mib": 4 << 20, "64mib": 64 << 20}
# The number of calls that one round of each measurement times.
CALLS = {"small": 200}
CALLS |= {f"4mib_{way}": 20 for way in ("send", "echo", "swap")}
CALLS |= {f"64mib_{way}": 4 for way in ("send", "echo", "swap")}
OUTSTANDING = (1, 64)
KEPT = (4000, 16_000)  # tensors of 64 KiB, 500 to a call
CALLS_A_BURST = 512
JOINERS = 16


def add(a: int, b: int) -> int:
    """Be a small call."""
    return a + b


def take(tensor: Any) -> int:
    """Receive a tensor."""
    return len(tensor)


def echo(tensor: Any) -> Any:
    """Receive a tensor and send it back."""
    return tensor


_own: dict[int, Any] = {}  # tensors of this process, by their length


def swap(tensor: Any) -> Any:
    """Receive a tensor and send another one back."""
    return _own[len(tensor)]


def worker(backend: str, rank: int, store: str, pipe: Connection) -> None:
    """Be one of the two processes of a back end; rank 0 measures on request."""
    import torch

    from rankcall import rpc

    torch.set_num_threads(1)
    options = rpc.construct_rpc_backend_options(
        rpc.BackendType[backend.upper()], init_method=f"file://{store}"
    )
    rpc.init_rpc(f"w{rank}", backend.upper(), rank, 2, options)
    tensors = {name: torch.ones(size // 4) for name, size in SIZES.items()}
    _own.update({len(tensor): tensor for tensor in tensors.values()})
    if rank == 0:
        for name in iter(pipe.recv, None):
            pipe.send(measure(name, tensors))
    rpc.shutdown()


def make_many(count: int) -> Any:
    """Return tensors of 64 KiB."""
    import torch

    return [torch.ones(1 << 14) for _ in range(count)]


def keep_many(count: int) -> float:
    """Return how many seconds it takes to fetch so many tensors and keep them."""
    from rankcall import rpc

    kept = []
    began = time.perf_counter()
    for _ in range(count // 500):
        kept.append(rpc.rpc_sync("w1", make_many, args=(500,)))
    return time.perf_counter() - began


def measure(name: str, tensors: dict[str, Any]) -> float:
    """Return the median time of a call, in µs, or the calls a second."""
    from rankcall import rpc

    if name.startswith("calls_per_s_"):
        return burst(int(name.removeprefix("calls_per_s_")))
    if name.startswith("kept_"):
        return keep_many(int(name.removeprefix("kept_")))
    if name == "small":
        return median(lambda: rpc.rpc_sync("w1", add, args=(3, 4)), CALLS[name])
    size, how = name.split("_")
    function = {"send": take, "echo": echo, "swap": swap}[how]
    return median(lambda: rpc.rpc_sync("w1", function, args=(tensors[size],)), CALLS[name])


def median(call: Callable[[], Any], count: int) -> float:
    """Return the median time of a call in µs."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def burst(outstanding: int) -> float:
    """Return calls a second with so many under way at any time."""
    from rankcall import rpc

    began = time.perf_counter()
    under_way = [rpc.rpc_async("w1", add, args=(3, 4)) for _ in range(outstanding)]
    for i in range(CALLS_A_BURST):
        under_way[i % outstanding].wait()
        under_way[i % outstanding] = rpc.rpc_async("w1", add, args=(3, 4))
    for future in under_way:
        future.wait()
    return (CALLS_A_BURST + outstanding) / (time.perf_counter() - began)


def run(rounds: int) -> dict[str, float]:
    """Measure everything on both back ends, in turns, and return it by its key."""
    context = multiprocessing.get_context("spawn")
    names = [*CALLS, *(f"calls_per_s_{outstanding}" for outstanding in OUTSTANDING)]
    figures: dict[str, list[float]] = {f"{b}_{name}": [] for b in BACKENDS for name in names}
    with tempfile.TemporaryDirectory(prefix="rankcall-bench-") as folder:
        pipes, processes = {}, []
        for backend in BACKENDS:
            pipes[backend], theirs = context.Pipe()
            for rank in range(2):
                args = (backend, rank, os.path.join(folder, backend), theirs)
                processes.append(context.Process(target=worker, args=args, daemon=True))
                processes[-1].start()
        for round_number in range(rounds + 1):
            for name in names:
                for backend in BACKENDS:
                    pipes[backend].send(name)
                    value = pipes[backend].recv()
                    if round_number:  # the first warms connections and memory up
                        figures[f"{backend}_{name}"].append(value)
        seconds_to_keep = {}
        for count in KEPT:
            pipes["zmq"].send(f"kept_{count}")
            seconds_to_keep[f"kept_{count}_seconds"] = round(pipes["zmq"].recv(), 2)
        for backend in BACKENDS:
            pipes[backend].send(None)
        for process in processes:
            process.join(30)
    result = {key: round(statistics.median(values), 1) for key, values in figures.items()}
    for name in CALLS:
        ratio = result[f"zmq_{name}"] / result[f"tensorpipe_{name}"]
        result[f"ratio_{name}"] = round(ratio, 3)
    return result | seconds_to_keep


def joiner(rank: int, count: int, ours: bool, port: int, pipe: Connection) -> None:
    """Be one of `count` workers that come up one by one, when told, and go when all are there."""
    import torch.distributed.rpc as torch_rpc

    from rankcall import rpc

    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the parent's
    os.environ.pop("WORLD_SIZE", None)
    method = f"tcp://127.0.0.1:{port}"
    if ours:
        options = rpc.construct_rpc_backend_options(rpc.BackendType.ZMQ, init_method=method)
    else:
        options = rpc.TensorPipeRpcBackendOptions(init_method=method)
    pipe.send("ready")
    pipe.recv()
    if ours:
        rpc.init_rpc(f"w{rank}", "ZMQ", rank, None, options)
    else:
        torch_rpc.init_rpc(f"w{rank}", rank=rank, rpc_backend_options=options)  # type: ignore[no-untyped-call]
    pipe.send("joined")
    pipe.recv()
    os._exit(0)


def time_to_join(count: int, ours: bool) -> float:
    """Return how many seconds `count` processes take to become one dynamic group."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(count):
        pipe, theirs = context.Pipe()
        args = (rank, count, ours, store.port, theirs)
        processes.append(context.Process(target=joiner, args=args, daemon=True))
        processes[-1].start()
        pipes.append(pipe)
    for pipe in pipes:
        pipe.recv()
    began = time.perf_counter()
    for pipe in pipes:
        pipe.send("go")
    for pipe in pipes:
        pipe.recv()
    took = time.perf_counter() - began
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send("end")
        process.join(10)
    return took


def dynamic_join_ratio(count: int, rounds: int) -> dict[str, float]:
    """Return both times to bring a dynamic group up, medians in s, and theirs over ours."""
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(time_to_join(count, ours=True))
        theirs.append(time_to_join(count, ours=False))
    zmq, tensorpipe = statistics.median(ours), statistics.median(theirs)
    return {
        f"zmq_dynamic_join_s_{count}": round(zmq, 3),
        f"tensorpipe_dynamic_join_s_{count}": round(tensorpipe, 3),
        f"dynamic_join_ratio_{count}": round(tensorpipe / zmq, 2),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--join-rounds", type=int, default=1, help="0 leaves the joins out")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = run(options.rounds)
    if options.join_rounds:  # torch's own takes a minute and more where processors are few
        result.update(dynamic_join_ratio(JOINERS, options.join_rounds))
    if options.json:
        print(json.dumps(result))
        return
    for name in CALLS:
        ours, theirs = result[f"zmq_{name}"], result[f"tensorpipe_{name}"]
        ratio = result[f"ratio_{name}"]
        print(f"{name:12} {ours:10.1f} µs  TensorPipe {theirs:10.1f}  {ratio:.2f}x")
    if options.join_rounds:
        ratio = result[f"dynamic_join_ratio_{JOINERS}"]
        print(f"{JOINERS} workers join {ratio:.1f} times as fast as torch's dynamic group")
    for count in KEPT:
        print(f"{count} tensors fetched and kept in {result[f'kept_{count}_seconds']} s")
    for outstanding in OUTSTANDING:
        ours, theirs = (result[f"{backend}_calls_per_s_{outstanding}"] for backend in BACKENDS)
        print(f"{outstanding:3} under way {ours:10.0f} calls/s  TensorPipe {theirs:10.0f}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # TensorPipe warns of every end
    main()
