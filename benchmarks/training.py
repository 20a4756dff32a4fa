"""What recording costs a real training job: the digits model, DDP over Gloo, several ranks.

One training goes on and on. Recording is switched on and off in turn, so that whatever else the
machine does falls on both alike; now and then, the profiler is. A block is some epochs, behind one
that is not timed because of what a switch starts. A ratio is that of a block to the mean of the
plain ones before and after it; figures are medians. ``plain_ratio_median`` is that of plain blocks,
and would be 1 on a machine without noise. ``cpu_ratio_median`` is that of the CPU time of a
process. Memory is that of separate jobs.

    python benchmarks/training.py [--json] [--ranks N] [--rounds N] [--epochs N]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from jobs import example, told_by_ranks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

Way = Callable[[], contextlib.AbstractContextManager[object]]


class Training:
    """A training that can go on for some epochs at any time."""

    def __init__(self, digits: ModuleType) -> None:
        torch.manual_seed(0)
        self._digits, images = digits, digits.digits()[0]
        self._model = DistributedDataParallel(digits.network())
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=3e-3)
        sampler: DistributedSampler[Any] = DistributedSampler(images, seed=0)
        self._batches = DataLoader(images, batch_size=digits.BATCH, sampler=sampler)

    def go_on(self, epochs: int) -> tuple[float, float]:
        """Train; return the seconds that the slowest rank took, and the most CPU time of a rank."""
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(epochs):
            self._digits.train_epoch(self._model, self._optimizer, self._batches)
        took = torch.tensor([time.perf_counter() - began, time.process_time() - cpu])
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        return float(took[0]), float(took[1])

    def block(self, epochs: int) -> tuple[float, float]:
        """Train; time all epochs but one more at the beginning."""
        self.go_on(1)
        return self.go_on(epochs)


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Record with the defaults, as ``rankcall run`` does."""
    import rankcall

    with rankcall.enable(os.environ["BENCH_RUN_DIR"]):
        yield


@contextlib.contextmanager
def profiled() -> Iterator[None]:
    """Profile the CPU side with torch.profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]):
        yield


@contextlib.contextmanager
def viewed(link: str) -> Iterator[None]:
    """Show the job to a viewer: rank 0 opens the stream of a page's changes, and leaves it unread.

    Recording is on all the time. ``link`` is what ``rankcall serve`` prints.
    """
    if dist.get_rank():
        yield
        return
    address, _, token = link.partition("#token=")
    stream = urllib.request.Request(f"{address}events")
    stream.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(stream, timeout=60):
        yield


def memory_mib() -> float:
    """Return this process's resident memory, shared pages in their share where the kernel tells."""
    for name in ("smaps_rollup", "status"):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/self/{name}").read_text()
            match = re.search(r"^(?:Pss|VmRSS):\s+(\d+) kB", text, re.MULTILINE)
            if match:
                return int(match[1]) / 1024
    raise OSError("neither smaps_rollup nor status tells this process's memory")


def be_rank(options: argparse.Namespace) -> dict[str, Any]:
    """Run as one rank: train by turns, or once for the memory it takes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = Training(example())
    if options.memory:
        with recorded() if options.memory == "recorded" else contextlib.nullcontext():
            training.block(4)
            figures: dict[str, Any] = {"memory_mib": memory_mib(), "ring_mib": ring_mib()}
    elif options.viewed:
        with recorded():
            figures = {
                "ratios": rounds(training, options, {"viewed": lambda: viewed(options.viewed)})
            }
    else:
        ways: dict[str, Way] = {"recorded": recorded, "profiled": profiled}
        figures = {"ratios": rounds(training, options, ways)}
    dist.destroy_process_group()
    return figures


def ring_mib() -> float:
    """Return the size of this rank's ring; 0 without recording."""
    rings = Path(os.environ["RANKCALL_SHM"]).rglob(f"*.{os.getpid()}.ring")
    return sum(ring.stat().st_size for ring in rings) / 2**20


def rounds(
    training: Training, options: argparse.Namespace, ways: dict[str, Way]
) -> dict[str, list[float]]:
    """Return each way's ratios to the plain blocks before and after it, and the plain seconds.

    The ratios of CPU time have ``_cpu`` behind the name of the way. The first way has its turn in
    every round; in every twentieth, the other ways and one more plain block have theirs.
    """
    first, *others = ways
    ways = {**ways, "plain": contextlib.nullcontext}
    training.block(4)  # warms up
    before = training.block(options.epochs)
    ratios: dict[str, list[float]] = defaultdict(list)
    for number in range(options.rounds):
        for name in (first, *(() if number % 20 else (*others, "plain"))):
            with ways[name]():
                took = training.block(options.epochs)
            after = training.block(options.epochs)
            for kind, seconds, *beside in zip(("", "_cpu"), took, before, after, strict=True):
                ratios[name + kind].append(seconds / statistics.mean(beside))
            ratios["plain_s"].append(after[0])
            before = after
    return ratios


def job(options: argparse.Namespace, folder: str, memory: str = "") -> list[dict[str, Any]]:
    """Run one job of several ranks and return what each told."""
    arguments = ["--rank", "--memory", memory]
    arguments += ["--rounds", str(options.rounds), "--epochs", str(options.epochs)]
    env = {"RANKCALL_SHM": folder, "BENCH_RUN_DIR": f"{folder}/run"}
    return told_by_ranks(__file__, arguments, options.ranks, env)


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Run all jobs and return the figures."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="rankcall-bench-", dir=base) as folder:
        ratios = job(options, folder)[0]["ratios"]
        memory = {
            way: [figures for _ in range(3) for figures in job(options, folder, way)]
            for way in ("plain", "recorded")
        }
    added = statistics.median(figures["memory_mib"] for figures in memory["recorded"])
    added -= statistics.median(figures["memory_mib"] for figures in memory["plain"])
    return {
        "ratio_median": statistics.median(ratios["recorded"]),
        "ratio_min": min(ratios["recorded"]),
        "ratio_max": max(ratios["recorded"]),
        "plain_ratio_median": statistics.median(ratios["plain"]),
        "cpu_ratio_median": statistics.median(ratios["recorded_cpu"]),
        "plain_cpu_ratio_median": statistics.median(ratios["plain_cpu"]),
        "profiler_ratio_median": statistics.median(ratios["profiled"]),
        "plain_s_median": statistics.median(ratios["plain_s"]),
        "ring_mib_per_rank": memory["recorded"][0]["ring_mib"],
        "rss_added_mib": added,
    }


def main() -> None:
    """Measure, and print one JSON object or a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--viewed", default="", help=argparse.SUPPRESS)
    parser.add_argument("--memory", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        print(json.dumps(be_rank(options)))
        return
    figures = {name: round(value, 4) for name, value in measure(options).items()}
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:24} {value:10.4f}")


if __name__ == "__main__":
    main()
