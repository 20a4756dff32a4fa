"""What tracing adds to a collective on the training thread, by sink; how fast runs are exported.

A one-element all_reduce on the fake process group, back to back from a Python loop: nothing is
communicated, so what is added shows, and the trace thread has some 200,000 ops a second to
describe. Added over a process without rankcall: recording is in each figure. The sinks take turns,
each between two measurements without rankcall; the median of the differences counts. Beside them
the work of the classic monitor: inspect.stack() and a JSON line a call.

    python benchmarks/trace.py [--json] [--rounds N] [--calls N] [--ranks N] [--collectives N]
                               [--repeat N]
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from overhead import fake_call, per_call_us, recording

Figures = dict[str, float]
Switch = Callable[[], AbstractContextManager[object]]


def with_sink(make: Callable[[], Any]) -> Switch:
    """Return a switch for native recording traced to a sink."""
    from rankcall import trace

    @contextlib.contextmanager
    def switch() -> Iterator[None]:
        with recording("native")(), trace.enable("ALL", False, [make()]):
            yield

    return switch


def null_tool(folder: Path) -> Path:
    """Compile a tool that listens to NVTX and does nothing."""
    from rankcall.capture.native import nvtx_headers

    library = folder / "null.so"
    source = Path(__file__).with_name("nvtx_null.cpp")
    flags = ["-O2", "-std=c++17", "-shared", "-fPIC", f"-I{nvtx_headers()}"]
    subprocess.run(["c++", *flags, str(source), "-o", str(library)], check=True, timeout=60)
    return library


def otel_sink() -> Any:
    """Return a sink for the SDK's in-memory reader and exporter."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from rankcall import trace

    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(InMemorySpanExporter()))
    return trace.OpenTelemetry(MeterProvider([InMemoryMetricReader()]), tracers)


@contextlib.contextmanager
def monitored() -> Iterator[None]:
    """Put a function before dist.all_reduce that does the classic monitor's work."""
    import torch.distributed as dist

    plain = dist.all_reduce
    out = open(os.devnull, "w")  # noqa: SIM115  # closed below

    def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Any:
        frame = next(frame for frame in inspect.stack()[1:] if "torch" not in frame.filename)
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        description = {
            "name": "all_reduce",
            "rank": dist.get_rank(),
            "source_line": f"{frame.filename}:{frame.lineno}",
            "message_size": tensor.nelement() * tensor.element_size(),
            "device": tensor.device.index if tensor.device.index is not None else "cpu",
            "timestamp": int(time.time()),
            "gpu_serial": os.environ.get("GPU_SERIAL", "unknown"),
            "vm_id": os.environ.get("VM_ID", "unknown"),
            "group_ranks": members,
        }
        out.write(json.dumps(description) + "\n")
        return plain(tensor, op=op, group=group)

    dist.all_reduce = all_reduce  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.all_reduce = plain
        out.close()


def training_figures(rounds: int, calls: int, folder: Path) -> dict[str, list[float]]:
    """Measure recording alone, every sink, and the classic monitor's work, in this process.

    Returns what each adds, round by round. The ways take turns, each between two measurements
    without: what the machine does meanwhile meets all of them.
    """
    from rankcall import trace

    os.environ["NVTX_INJECTION64_PATH"] = str(null_tool(folder))
    call = fake_call()
    ways: dict[str, tuple[Switch, int]] = {
        "monitor_style": (monitored, max(1, calls // 100)),
        "recording": (recording("native"), calls),
        "jsonl": (with_sink(lambda: trace.JsonLines(folder / "x.jsonl")), calls),
        "nvtx": (with_sink(trace.Nvtx), calls),
        "prometheus": (with_sink(lambda: trace.Prometheus(0)), calls),
        "otel": (with_sink(otel_sink), calls),
        "parquet": (with_sink(lambda: trace.Parquet(folder / "history")), calls),
    }
    added: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        before = _settled_us(call, calls)
        for name, (switched, times) in ways.items():
            with switched():
                during = _settled_us(call, times)
            after = _settled_us(call, calls)
            added[name].append(during - (before + after) / 2)
            before = after
    return added


def _settled_us(call: Callable[[], object], calls: int) -> float:
    """Return the microseconds a call takes, after some that do not count."""
    per_call_us(call, max(1, calls // 5))
    return per_call_us(call, calls)


def spread(values: list[float]) -> float:
    """Return how far the median of rounds may be off: half the quartiles' distance, by root n."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else [0.0] * 3
    return float((high - low) / 2 / len(values) ** 0.5)


_EXPORTS = (
    "export_parquet_records_per_s",
    "export_perfetto_records_per_s",
    "html_seconds",
    "html_mib",
)


def export_figures(ranks: int, collectives: int, repeat: int) -> Figures:
    """Export a synthetic run; benchmarks/export.py has more of that, and its peers."""
    import export

    measured = export.measure(ranks, collectives, repeat)
    return {name: measured[name] for name in _EXPORTS}


def main() -> None:
    """Measure, and print one JSON object or a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--collectives", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=1, help="of the exports; the median counts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rankcall-bench-") as name:
        added = training_figures(options.rounds, options.calls, Path(name))
    figures = {
        f"{name}_added_us": statistics.median(differences) for name, differences in added.items()
    }
    figures |= export_figures(options.ranks, options.collectives, options.repeat)
    rounded = {name: round(value, 3) for name, value in figures.items()}
    if options.json:
        print(json.dumps(rounded))
        return
    for name, value in rounded.items():
        good_to = f" +- {spread(added[name[:-9]]):.3f}" if name.endswith("_added_us") else ""
        print(f"{name:32} {value:14,.3f}{good_to}")


if __name__ == "__main__":
    main()
