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
import time
from collections.abc import Callable, Iterator
from typing import Any

Figures = dict[str, float]
# Within one process, recording is compared with recording switched off, whose kernels stay and
# pass ops on. What these add is measured apart, and added.
OURS = ("native", "native_nocallsite", "native_hooked", "native_many_sites")


def per_call_us(
    call: Callable[[], object], calls: int, clock: Callable[[], int] = time.perf_counter_ns
) -> float:
    """Return the microseconds a call takes, over ``calls`` calls."""
    began = clock()
    for _ in range(calls):
        call()
    return (clock() - began) / calls / 1e3


def added_us(
    call: Callable[[], object],
    switched: Callable[[], contextlib.AbstractContextManager[object]],
    rounds: int,
    calls: int,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> tuple[float, float]:
    """Return the median of what ``switched`` adds to a call, and the median without it."""
    plain, added = [], []
    for _ in range(rounds):
        per_call_us(call, calls // 10)
        before = per_call_us(call, calls, clock)
        with switched():
            per_call_us(call, calls // 10)
            during = per_call_us(call, calls, clock)
        per_call_us(call, calls // 10)
        after = per_call_us(call, calls, clock)
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


def all_reduces(sites: int) -> list[Callable[[], object]]:
    """Return functions that issue an all_reduce, each from a line and a code object of its own."""
    import torch
    import torch.distributed as dist

    lines = "\n".join("  lambda: all_reduce(tensor)," for _ in range(sites))
    space: dict[str, Any] = {"all_reduce": dist.all_reduce, "tensor": torch.ones(1)}
    exec(compile(f"calls = [\n{lines}\n]", "many_sites.py", "exec"), space)
    calls: list[Callable[[], object]] = space["calls"]
    return calls


def many_sites_added_us(rounds: int) -> float:
    """Return what recording adds to a call if 2,000 lines take turns.

    Without a busy thread beside it: torch releases the GIL at each call, and a busy Python thread
    then makes each call, recorded or not, wait for tens of microseconds to milliseconds. What
    could make it worse is that recording takes the GIL itself; tests/native/test_callsite.py
    counts that it does so at no known line.
    """
    calls = all_reduces(2000)

    def all_calls() -> None:
        for call in calls:
            call()

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
    for name, (switched, times, calls_per_round) in ways.items():
        figures[f"{name}_added_us"], figures["plain_us"] = added_us(
            call, switched, times, calls_per_round
        )
    figures["native_many_sites_added_us"] = many_sites_added_us(rounds)
    if torch.cuda.is_available():
        tensor = torch.ones(1, device="cuda")

        def on_device() -> object:
            return torch.distributed.all_reduce(tensor)

        figures["native_cuda_added_us"], _ = added_us(on_device, recording("native"), rounds, calls)
    return figures


_CALL = """
import os, statistics, sys, tempfile, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # Gloo hands over between threads
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
chunks, calls, backend, how = 20, int(sys.argv[1]) // 20, sys.argv[2], sys.argv[3]
store = FakeStore() if backend == "fake" else dist.HashStore()
dist.init_process_group(backend, rank=0, world_size=8 if backend == "fake" else 1, store=store)
tensor = torch.ones(1)
if how != "plain":
    import rankcall
    folder = tempfile.TemporaryDirectory(prefix="rankcall-bench-")
    rankcall.enable(folder.name, capture="native" if how == "off" else how)
    if how == "off":
        rankcall.disable()
took = []
for _ in range(chunks + 2):
    began = time.perf_counter_ns()
    for _ in range(calls):
        dist.all_reduce(tensor)
    took.append((time.perf_counter_ns() - began) / calls / 1e3)
print(statistics.median(took[2:]))
dist.destroy_process_group()
if how in ("native", "python"):
    rankcall.disable()
"""


def gloo_figures(rounds: int, calls: int) -> Figures:
    """Measure Flight Recorder, and rankcall beside it, on a Gloo group of one.

    Flight Recorder does not record the fake group, and its switch is read once: each figure is a
    process of its own.
    """
    added: dict[str, list[float]] = {"flight_recorder_added_us": [], "native_gloo_added_us": []}
    for _ in range(rounds):
        plain = _call_us(calls, "gloo", "plain", "0")
        added["flight_recorder_added_us"].append(_call_us(calls, "gloo", "plain", "2000") - plain)
        added["native_gloo_added_us"].append(_call_us(calls, "gloo", "native", "0") - plain)
    return {name: statistics.median(values) for name, values in added.items()}


def python_added_us(rounds: int, calls: int) -> float:
    """Return what the Python capture adds, against a process that never recorded.

    Its kernels stay, too, and cost several microseconds even if they only pass ops on.
    """
    added = []
    for _ in range(rounds):
        before = _call_us(calls, "fake", "plain", "0")
        python = _call_us(calls, "fake", "python", "0")
        added.append(python - (before + _call_us(calls, "fake", "plain", "0")) / 2)
    return statistics.median(added)


def switched_off_added_us(rounds: int, calls: int) -> float:
    """Return what is left of recording after it was switched off: its kernels pass ops on.

    A process that never recorded is compared with one that did, because kernels stay.
    """
    added = []
    for _ in range(rounds):
        before = _call_us(calls, "fake", "plain", "0")
        off = _call_us(calls, "fake", "off", "0")
        added.append(off - (before + _call_us(calls, "fake", "plain", "0")) / 2)
    return statistics.median(added)


def _call_us(calls: int, backend: str, how: str, entries: str) -> float:
    switches = {"TORCH_FR_BUFFER_SIZE": entries, "TORCH_NCCL_TRACE_BUFFER_SIZE": entries}
    done = subprocess.run(
        [sys.executable, "-c", _CALL, str(calls), backend, how],
        env={**os.environ, **switches},
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
    figures |= gloo_figures(7, options.calls)
    figures["python_added_us"] = python_added_us(7, options.calls)
    off = figures["switched_off_added_us"] = switched_off_added_us(7, 10 * options.calls)
    for name in OURS:
        figures[f"{name}_added_us"] += max(0.0, off)
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
