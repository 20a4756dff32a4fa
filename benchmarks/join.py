"""What Join costs while inputs are even: rankcall's and torch's, beside plain DDP, over Gloo.

Every way to train has a model of its own and trains a few batches by turns, in an order shuffled
anew in each cycle, so that whatever else the machine does falls on all alike. A ratio is that of a
way's time in a cycle and the plain one's of the same cycle; figures are medians over the cycles.
The plain way is there twice: how far its ratio to itself is from 1 says how far to trust the rest.
A turn is 8 batches: one window where rankcall does not know the lengths, its exchange included.

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
    """One way to train: a model of its own, inside its own context, on batches that go on."""

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
    """Run as one rank: each way's turns, in the same order on every rank."""
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
    return {"took": {name: each[WARM_UP:] for name, each in took.items()}, "added": added}


def issued(way: Way) -> int:
    """Return how many collectives one more turn issues, by the group's own counter."""
    group: Any = dist.group.WORLD
    before: int = group._get_sequence_number_for_group()
    way.turn()
    after: int = group._get_sequence_number_for_group()
    return after - before


def job(model: str, ranks: int, cycles: int) -> dict[str, Any]:
    """Run one job of several ranks and return what rank 0 told."""
    return told_by_ranks(__file__, ["--model", model, "--cycles", str(cycles)], ranks)[0]


def figures(model: str, ranks: int, cycles: int) -> dict[str, Any]:
    """Return one configuration's figures."""
    told = job(model, ranks, cycles)
    took = told["took"]
    found: dict[str, Any] = {"model": model, "ranks": ranks}
    for name in WAYS:
        key = "plain_vs_plain" if name == "plain_again" else name
        if name != "plain_again":
            found[f"{key}_ms"] = round(statistics.median(took[name]) / TURN * 1e3, 4)
        if name != "plain":
            pairs = zip(took[name], took["plain"], strict=True)
            found[f"{key}_ratio"] = round(statistics.median(a / b for a, b in pairs), 4)
    found["collectives_added_per_step"] = told["added"]
    return found


def measure(cycles: int) -> dict[str, Any]:
    """Measure every configuration; the worst of them at the top."""
    each = [figures(model, ranks, cycles) for model, ranks in CONFIGURATIONS]
    worst: dict[str, Any] = dict(max(each, key=lambda found: found["rankcall_known_ratio"]))
    del worst["model"], worst["ranks"]
    for key in ("rankcall_known_ratio", "rankcall_unknown_ratio", "torch_join_ratio"):
        worst[key] = max(found[key] for found in each)
    worst["collectives_added_per_step"] = max(found["collectives_added_per_step"] for found in each)
    worst["plain_vs_plain_ratio"] = max(
        (found["plain_vs_plain_ratio"] for found in each), key=lambda ratio: abs(ratio - 1)
    )
    return {**worst, "configurations": each}


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
    found = measure(options.cycles)
    if options.json:
        print(json.dumps(found))
        return
    for configuration in found.pop("configurations"):
        print(", ".join(f"{name} {value}" for name, value in configuration.items()))
    for name, value in found.items():
        print(f"worst {name:28} {value:10.4f}")


if __name__ == "__main__":
    main()
