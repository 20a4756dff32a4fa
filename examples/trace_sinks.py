"""Trace a small training job to every sink: files, metrics, spans, marks, a table of its own.

    torchrun --nproc-per-node 2 examples/trace_sinks.py [--folder trace-demo] [--steps 30]

Sinks whose packages are not installed are left out, and said so. To see what Prometheus would see:
``curl http://127.0.0.1:9463/metrics`` while it runs.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rankcall
from rankcall import trace


class SlowestLines:
    """A sink of one's own: which source lines wait longest for the network."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = defaultdict(float)

    def open(self, origin: trace.Origin) -> None:
        """Note whose they are."""
        self.rank = origin.rank

    def write(self, descriptions: trace.Descriptions) -> None:
        """Add up; runs on rankcall's thread."""
        for description in descriptions:
            self.totals[f"{description['name']} at {description['source_line']}"] += (
                description["duration_ms"] or 0.0
            )

    def close(self) -> None:
        """Print the three slowest, on rank 0."""
        slowest = sorted(self.totals.items(), key=lambda item: -item[1])[:3]
        for line, ms in slowest if self.rank == 0 else []:
            print(f"{ms:8.1f} ms  {line}", flush=True)


class Scalars:
    """Stands in for TensorBoard's SummaryWriter."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w")

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Write one value."""
        self.file.write(f"{step}\t{tag}\t{value:.6g}\n")


def sinks(folder: Path, rank: int, port: int) -> list[Any]:
    """Return one sink of each kind."""
    chosen: list[Any] = [
        trace.JsonLines(folder / "rank-{rank}.jsonl", max_mib=16, keep=2),
        trace.Parquet(folder / "history"),
        trace.StepTotals(Scalars(folder / f"scalars-{rank}.tsv")),
        SlowestLines(),
    ]
    made: dict[str, Any] = {
        "prometheus": lambda: trace.PrometheusNode(port),
        "otel": lambda: trace.OpenTelemetry(span_every=10),
    }
    for name, make in made.items():
        if name == "otel" and "OTEL_EXPORTER_OTLP_ENDPOINT" not in os.environ:
            continue  # there is no collector to send to
        try:
            chosen.append(make())
        except rankcall.errors.ExtraMissingError as error:
            print(f"without {name}: {error}", flush=True)
    if "NVTX_INJECTION64_PATH" in os.environ:  # a profiler listens
        chosen.append(trace.Nvtx())
    return chosen


def train(steps: int) -> None:
    """Train a little model, with a sub-group, objects and point-to-point messages besides."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(torch.nn.Linear(256, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(32, 256)).square().mean().backward()
        optimizer.step()
        if step % 10 == 0:
            counts = [None] * world
            dist.all_gather_object(counts, {"rank": rank, "step": step})
            ops = [
                dist.P2POp(dist.isend, torch.ones(1000), (rank + 1) % world),
                dist.P2POp(dist.irecv, torch.empty(1000), (rank - 1) % world),
            ]
            for work in dist.batch_isend_irecv(ops) if world > 1 else []:
                work.wait()


def main() -> None:
    """Arm tracing, train, and let the sinks finish."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("trace-demo"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--port", type=int, default=9463, help="of Prometheus; 0: a free one")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    rank = int(os.environ.get("RANK", "0"))
    with trace.enable("ALL", sinks=sinks(options.folder, rank, options.port)):
        dist.init_process_group("gloo")
        train(options.steps)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
