"""What recording adds to a collective on the training thread, beside the tools that do likewise.

A one-element all_reduce on the fake process group: nothing is communicated, so what is added
shows. Paired rounds: without, with, without, with ... The figure is the median of the differences.

    python benchmarks/overhead.py [--json] [--rounds N] [--calls N]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

Figures = dict[str, float]


def per_call_us(call: Callable[[], object], calls: int) -> float:
    """Return the microseconds a call takes, over ``calls`` calls."""
    began = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - began) / calls / 1e3


def added_us(
    call: Callable[[], object],
    switched: Callable[[], contextlib.AbstractContextManager[object]],
    rounds: int,
    calls: int,
) -> tuple[float, float]:
    """Return the median of what ``switched`` adds to a call, and the median without it."""
    plain, added = [], []
    for _ in range(rounds):
        per_call_us(call, calls // 10)
        before = per_call_us(call, calls)
        with switched():
            per_call_us(call, calls // 10)
            during = per_call_us(call, calls)
        per_call_us(call, calls // 10)
        after = per_call_us(call, calls)
        plain.append((before + after) / 2)
        added.append(during - (before + after) / 2)
    return statistics.median(added), statistics.median(plain)


def recording(
    kind: str, call_sites: bool = True
) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Return a switch for rankcall's own recording."""
    import rankcall

    @contextlib.contextmanager
    def switch() -> Iterator[None]:
        with (
            tempfile.TemporaryDirectory(prefix="rankcall-bench-") as folder,
            rankcall.enable(folder, capture=kind, call_sites=call_sites),
        ):
            yield

    return switch


@contextlib.contextmanager
def hooked() -> Iterator[None]:
    """Record natively with an end hook registered."""
    from rankcall import hooks

    seen = [0]

    def count(status: hooks.CollectiveStatus) -> None:
        seen[0] += 1

    with recording("native")(), hooks.register_collective_end_hook(count):
        yield


@contextlib.contextmanager
def profiler() -> Iterator[None]:
    """Profile the CPU side with torch.profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]):
        yield


@contextlib.contextmanager
def comm_debug() -> Iterator[None]:
    """Count with torch's CommDebugMode."""
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode():  # type: ignore[no-untyped-call]
        yield


def fake_call(device: str = "cpu") -> Callable[[], object]:
    """Start the fake process group and return a one-element all_reduce on it."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    tensor = torch.ones(1, device=device)
    return lambda: dist.all_reduce(tensor)


def calls_of(sites: int, call: Callable[[], object]) -> list[Callable[[], object]]:
    """Return functions that make the same call, each from a line and a code object of its own."""
    lines = "\n".join("  lambda: call()," for _ in range(sites))
    space: dict[str, Any] = {"call": call}
    exec(compile(f"calls = [\n{lines}\n]", "many_sites.py", "exec"), space)
    calls: list[Callable[[], object]] = space["calls"]
    return calls


@contextlib.contextmanager
def busy_thread() -> Iterator[None]:
    """Keep a Python thread busy, so that whoever needs the GIL may have to wait for it.

    By default a wait takes 5 ms, which is 2,000 calls: a few of them would be the whole figure.
    """
    over = threading.Event()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)

    def spin() -> None:
        while not over.is_set():
            pass

    thread = threading.Thread(target=spin, name="busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=10)
        sys.setswitchinterval(interval)


def many_sites_added_us(call: Callable[[], object], rounds: int) -> float:
    """Return what recording adds to a call if 2,000 lines take turns beside a busy thread."""
    calls = calls_of(2000, call)

    def all_calls() -> None:
        for each in calls:
            each()

    with busy_thread():
        added, _ = added_us(all_calls, recording("native"), rounds, 10)
    return added / len(calls)


def measure(rounds: int, calls: int) -> Figures:
    """Measure every way in this process."""
    import torch

    call = fake_call()
    ways: dict[str, tuple[Callable[[], contextlib.AbstractContextManager[object]], int, int]] = {
        "native": (recording("native"), rounds, calls),
        "native_nocallsite": (recording("native", call_sites=False), rounds, calls),
        "native_hooked": (hooked, rounds, calls),
        "profiler": (profiler, max(3, rounds // 4), calls // 4),
        "commdebug": (comm_debug, max(3, rounds // 4), calls // 20),
    }
    figures: Figures = {}
    for name, (switched, times, each) in ways.items():
        figures[f"{name}_added_us"], figures["plain_us"] = added_us(call, switched, times, each)
    figures["native_many_sites_added_us"] = many_sites_added_us(call, rounds)
    if torch.cuda.is_available():
        tensor = torch.ones(1, device="cuda")

        def on_device() -> object:
            return torch.distributed.all_reduce(tensor)

        figures["native_cuda_added_us"], _ = added_us(on_device, recording("native"), rounds, calls)
    return figures


_CHILD = """
import os, statistics, sys, tempfile, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # Gloo hands over between threads
import torch, torch.distributed as dist
backend, capture, calls = sys.argv[1], sys.argv[2], int(sys.argv[3])
if backend == "fake":
    from torch.testing._internal.distributed.fake_pg import FakeStore
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
else:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
tensor = torch.ones(1)
if capture != "off":
    import rankcall
    folder = tempfile.TemporaryDirectory(prefix="rankcall-bench-")
    rankcall.enable(folder.name, capture=capture)
took = []
for _ in range(22):
    began = time.perf_counter_ns()
    for _ in range(calls // 20):
        dist.all_reduce(tensor)
    took.append((time.perf_counter_ns() - began) / (calls // 20) / 1e3)
print(statistics.median(took[2:]))
dist.destroy_process_group()
if capture != "off":
    rankcall.disable()
"""


def child_figures(rounds: int, calls: int) -> Figures:
    """Measure what can be switched only once in a process, each time in a process of its own.

    The Python capture's kernels stay, and still cost something when it is off. Flight Recorder
    reads its switch once; it does not record the fake group, so rankcall is measured beside it on
    a Gloo group of one.
    """
    added: dict[str, list[float]] = {
        "python_added_us": [],
        "flight_recorder_added_us": [],
        "native_gloo_added_us": [],
    }
    for _ in range(rounds):
        python = _child_call_us("fake", "python", calls) - _child_call_us("fake", "off", calls)
        added["python_added_us"].append(python)
        plain = _child_call_us("gloo", "off", calls)
        recorder = _child_call_us("gloo", "off", calls, flight_recorder_entries=2000)
        added["flight_recorder_added_us"].append(recorder - plain)
        added["native_gloo_added_us"].append(_child_call_us("gloo", "native", calls) - plain)
    return {name: statistics.median(values) for name, values in added.items()}


def _child_call_us(
    backend: str, capture: str, calls: int, flight_recorder_entries: int = 0
) -> float:
    switches = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, backend, capture, str(calls)],
        env={**os.environ, **dict.fromkeys(switches, str(flight_recorder_entries))},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return float(done.stdout)


def main() -> None:
    """Measure, and print one JSON object or a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=4000)
    options = parser.parse_args()
    figures = measure(options.rounds, options.calls)
    figures |= child_figures(7, options.calls)
    for name in ("flight_recorder", "profiler", "commdebug"):
        if figures["native_added_us"] > 0:
            ratio = figures[f"{name}_added_us"] / figures["native_added_us"]
            figures[f"{name}_over_native"] = ratio
    figures = {name: round(value, 3) for name, value in sorted(figures.items())}
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:32} {value:10.3f}")


if __name__ == "__main__":
    main()
