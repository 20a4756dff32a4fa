"""How fast hooks are told, how soon after a quiet time, and whether what they miss is counted.

On the fake process group, so that nothing but the recording and the delivery takes time. A C++ loop
(driver.cpp) issues what a Python thread could not issue fast enough.

    python benchmarks/hooks.py [--json] [--events N] [--rate PER_S] [--seconds S]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from rankcall import hooks

Figures = dict[str, float | bool]
_WAIT_S = 60.0


def build_driver() -> ModuleType:
    """Compile driver.cpp (cached by torch) and return it."""
    from torch.utils.cpp_extension import load

    source = str(Path(__file__).with_name("driver.cpp"))
    flags = ["-O2", "-w", "-DUSE_DISTRIBUTED"]
    driver: ModuleType = load("rankcall_bench_driver", [source], extra_cflags=flags)
    return driver


class Counter:
    """A hook that counts, and tells when it has seen enough. ``gate`` holds it up at first."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.seen = 0
        self.dropped = 0
        self._gate = gate

    def __call__(self, status: hooks.CollectiveStatus) -> None:
        if self._gate is not None:
            self._gate.wait(_WAIT_S)
        self.seen += 1
        self.dropped += status.drop_count

    def wait(self, enough: Callable[[], bool]) -> None:
        """Wait until there is enough; the counting thread is not slowed by it."""
        deadline = time.monotonic() + _WAIT_S
        while not enough() and time.monotonic() < deadline:
            time.sleep(0.005)


def all_events(counter: Counter) -> tuple[hooks.Handle, hooks.Handle]:
    """Register for starts and ends."""
    return (
        hooks.register_collective_start_hook(counter),
        hooks.register_collective_end_hook(counter),
    )


def events_per_s(driver: ModuleType, tensor: torch.Tensor, events: int) -> float:
    """Fill a large ring while the hook is held up, then let it go and time it."""
    gate = threading.Event()
    counter = Counter(gate)
    handles = all_events(counter)
    driver.drive(dist.group.WORLD, tensor, events // 2, 0)
    began = time.perf_counter()
    gate.set()
    counter.wait(lambda: counter.seen + counter.dropped >= events)
    took = time.perf_counter() - began
    for handle in handles:
        handle.remove()
    assert counter.dropped == 0, "the ring was too small for the measurement"
    return events / took


def idle_latencies_ms(tensor: torch.Tensor, times: int) -> list[float]:
    """Issue one op after at least 10 ms of quiet; from its end to the moment the hook runs."""
    latencies: list[float] = []
    notified = threading.Event()

    def ended(status: hooks.CollectiveStatus) -> None:
        now = time.monotonic_ns()
        assert status.record is not None
        latencies.append((now - status.record["completed_ns"]) / 1e6)
        notified.set()

    with hooks.register_collective_end_hook(ended):
        for _ in range(times):
            time.sleep(0.015)
            notified.clear()
            dist.all_reduce(tensor)
            assert notified.wait(_WAIT_S)
    return latencies


def paced(driver: ModuleType, tensor: torch.Tensor, rate: float, seconds: float) -> Figures:
    """Produce events at a steady rate; return how many were lost and the rate that was held."""
    counter = Counter()
    handles = all_events(counter)
    ops = int(rate * seconds / 2)
    took = driver.drive(dist.group.WORLD, tensor, ops, int(2e9 / rate))
    counter.wait(lambda: counter.seen + counter.dropped >= 2 * ops)
    for handle in handles:
        handle.remove()
    return {"lost": 2 * ops - counter.seen, "paced_events_per_s": 2 * ops / took}


def lapped(driver: ModuleType, tensor: torch.Tensor, ops: int) -> Figures:
    """Produce faster than any hook can follow; delivered and dropped must add up."""
    counter = Counter()
    handles = all_events(counter)
    took = driver.drive(dist.group.WORLD, tensor, ops, 0)
    counter.wait(lambda: counter.seen + counter.dropped >= 2 * ops)
    driver.drive(dist.group.WORLD, tensor, 1, 0)  # what was dropped last is told with this one
    counter.wait(lambda: counter.seen + counter.dropped >= 2 * ops + 2)
    for handle in handles:
        handle.remove()
    return {
        "drop_count_exact": counter.seen + counter.dropped == 2 * ops + 2,
        "unpaced_events_per_s": 2 * ops / took,
        "unpaced_dropped": counter.dropped,
    }


def with_capacity(records: int | None) -> None:
    """Set the ring size of the recordings to come."""
    if records is None:
        os.environ.pop("RANKCALL_CAPACITY", None)
    else:
        os.environ["RANKCALL_CAPACITY"] = str(records)


def measure(events: int, rate: float, seconds: float) -> Figures:
    """Measure everything in this process."""
    driver = build_driver()
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    tensor = torch.ones(1)
    with_capacity(events)
    drains = [events_per_s(driver, tensor, events) for _ in range(5)]
    # The large ring here too: the default one holds 0.1 s at this rate, and a machine that others
    # use as well can keep any thread waiting for longer.
    without_loss = paced(driver, tensor, rate, seconds)
    with_capacity(None)
    latencies = idle_latencies_ms(tensor, 200)
    figures: Figures = {
        "events_per_s": statistics.median(drains),
        "idle_latency_ms_p50": statistics.median(latencies),
        "idle_latency_ms_p99": statistics.quantiles(latencies, n=100)[98],
        **without_loss,
        **lapped(driver, tensor, events),
    }
    dist.destroy_process_group()
    return figures


def main() -> None:
    """Measure, and print one JSON object or a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--events", type=int, default=1 << 18, help="of the drain")
    parser.add_argument("--rate", type=float, default=300_000, help="events/s of the paced run")
    parser.add_argument("--seconds", type=float, default=3.0, help="of the paced run")
    options = parser.parse_args()
    figures = measure(options.events, options.rate, options.seconds)
    figures = {
        name: value if isinstance(value, bool) else round(value, 3)
        for name, value in figures.items()
    }
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:24} {value:>16,}")


if __name__ == "__main__":
    main()
