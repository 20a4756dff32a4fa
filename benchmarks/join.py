"""The cost of Join while inputs are even: rankcall's and torch's, beside plain DDP, over Gloo.

Each way to train has its own model. In each cycle, every way trains 8 batches, in an order that is
shuffled for each cycle, so that other load on the machine falls on all ways alike. A ratio divides
the time of a way in a cycle by that of plain DDP in the same cycle; the figures are medians over
the cycles. Plain DDP runs twice: the distance of its ratio to itself from 1 is the error of the
other ratios. If lengths are unknown, 8 batches are one window, with its exchange.

    python benchmarks/join.py [--json] [--cycles N]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from jobs import example, told_by_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel

from rankcall.join import Join

TURN = 8
WARM_UP = 4  # cycles
WAYS = ("plain", "plain_again", "torch_join", "rankcall_known", "rankcall_unknown")
CONFIGURATIONS = (("mlp", 2), ("mlp", 4), ("digits", 2), ("digits", 4))


def mlp() -> nn.Module:
    """Return four layers of 64 x 64."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)])


def workload(name: str) -> tuple[Callable[[], nn.Module], tuple[Tensor, Tensor]]:
    """Return how to make a model, and a batch with its targets."""
    if name == "mlp":
        return mlp, (torch.randn(32, 64), torch.randint(64, (32,)))
    digits = example()
    images, labels = digits.digits()[0][: digits.BATCH]
    return digits.network, (images, labels)


class Way:
    """One way to train: its own model, inside its own context, on one long row of batches."""

    def __init__(
        self, name: str, make: Callable[[], nn.Module], batch: Any, batches: int, stack: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(make())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.left: Iterator[Any] = iter([batch] * batches)
        if name == "torch_join":
            stack.enter_context(TorchJoin([self.model]))
        elif name.startswith("rankcall"):
            join = stack.enter_context(Join([self.model]))
            self.left = iter(
                join.batches([batch] * batches if name == "rankcall_known" else self.left)
            )

    def turn(self) -> float:
        """Train on some batches; return the seconds it took."""
        dist.barrier()
        began = time.perf_counter()
        for _ in range(TURN):
            images, labels = next(self.left)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(images), labels).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        return time.perf_counter() - began


def be_rank(options: argparse.Namespace) -> dict[str, Any]:
    """Run as one rank: train each way by turns, in the same order on every rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    make, batch = workload(options.model)
    cycles = options.cycles + WARM_UP
    took: dict[str, list[float]] = {name: [] for name in WAYS}
    shuffled = random.Random(0)
    with contextlib.ExitStack() as stack:
        batches = (cycles + 1) * TURN
        ways = {name: Way(name, make, batch, batches, stack) for name in WAYS}
        for _ in range(cycles):
            for name in shuffled.sample(WAYS, len(WAYS)):
                took[name].append(ways[name].turn())
        counts = {name: issued(way) for name, way in ways.items()}
        for way in ways.values():
            assert next(way.left, None) is None, "every rank uses up its batches"
    dist.destroy_process_group()
    added = (counts["rankcall_known"] - counts["plain"]) / TURN
    return {"took": {name: times[WARM_UP:] for name, times in took.items()}, "added": added}


def issued(way: Way) -> int:
    """Return how many collectives one more turn issues, from the group's own counter."""
    group: Any = dist.group.WORLD
    before: int = group._get_sequence_number_for_group()
    way.turn()
    after: int = group._get_sequence_number_for_group()
    return after - before


def job(model: str, ranks: int, cycles: int) -> dict[str, Any]:
    """Run one job of several ranks and return the result of rank 0."""
    return told_by_ranks(__file__, ["--model", model, "--cycles", str(cycles)], ranks)[0]


def figures(model: str, ranks: int, cycles: int) -> dict[str, Any]:
    """Return one configuration's figures."""
    result = job(model, ranks, cycles)
    took = result["took"]
    row: dict[str, Any] = {"model": model, "ranks": ranks}
    for name in WAYS:
        key = "plain_vs_plain" if name == "plain_again" else name
        if name != "plain_again":
            row[f"{key}_ms"] = round(statistics.median(took[name]) / TURN * 1e3, 4)
        if name != "plain":
            pairs = zip(took[name], took["plain"], strict=True)
            row[f"{key}_ratio"] = round(statistics.median(a / b for a, b in pairs), 4)
    row["collectives_added_per_step"] = result["added"]
    return row


def measure(cycles: int) -> dict[str, Any]:
    """Measure every configuration; the worst of them at the top."""
    rows = [figures(model, ranks, cycles) for model, ranks in CONFIGURATIONS]
    worst: dict[str, Any] = dict(max(rows, key=lambda row: row["rankcall_known_ratio"]))
    del worst["model"], worst["ranks"]
    for key in (
        "rankcall_known_ratio",
        "rankcall_unknown_ratio",
        "torch_join_ratio",
        "collectives_added_per_step",
    ):
        worst[key] = max(row[key] for row in rows)
    worst["plain_vs_plain_ratio"] = max(
        (row["plain_vs_plain_ratio"] for row in rows), key=lambda ratio: abs(ratio - 1)
    )
    return {**worst, "configurations": rows}


def main() -> None:
    """Measure, and print one JSON object or a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--model", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:
        print(json.dumps(be_rank(options)))
        return
    measurements = measure(options.cycles)
    if options.json:
        print(json.dumps(measurements))
        return
    for configuration in measurements.pop("configurations"):
        print(", ".join(f"{name} {value}" for name, value in configuration.items()))
    for name, value in measurements.items():
        print(f"worst {name:28} {value:10.4f}")


if __name__ == "__main__":
    main()
