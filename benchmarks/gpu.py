"""Check recording on real devices, and print a table to paste.

Runs the list in docs/performance.md ("What to run first on a GPU"). Each check runs in processes of
its own. What the machine lacks is skipped with the reason; the exit status is 1 if a check failed.

    python benchmarks/gpu.py [--only NAME ...] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CHECK_SECONDS = 600
COMPLETION_SECONDS = 2.0  # within which the end of an op is to be known
OPS = 1000


@dataclass(frozen=True)
class Check:
    """One line of the table. ``run`` returns whether all is well, and what to write down."""

    name: str
    gpus: int  # how many it needs
    run: Callable[[], tuple[bool, str]]


@dataclass(frozen=True)
class Line:
    """How one check ended: ``result`` is "ok", "failed" or "skipped"."""

    name: str
    result: str
    detail: str


# --- one process of a job ---


@contextmanager
def nccl_group() -> Iterator[Any]:
    """Initialise NCCL in this process: one rank, or as the environment says."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    tensor = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(tensor)  # makes the communicator
    torch.cuda.synchronize()
    try:
        yield tensor
    finally:
        dist.destroy_process_group()


@contextmanager
def recorded(capture: str = "native") -> Iterator[Any]:
    """Record into a folder that is removed afterwards."""
    import rankcall

    with (
        tempfile.TemporaryDirectory(prefix="rankcall-gpu-") as folder,
        rankcall.enable(Path(folder) / "run", capture=capture) as recording,
    ):
        yield recording


def seconds_until_ended(limit: float = 30.0) -> float:
    """Return how long it takes until no op is in flight; ``limit`` if there still is one."""
    from rankcall import hooks

    began = time.monotonic()
    while hooks.pending() and time.monotonic() - began < limit:
        time.sleep(0.01)
    return time.monotonic() - began


# --- the checks ---


def versions() -> tuple[bool, str]:
    """Tell what is there. Runs without a GPU, too."""
    import torch

    parts = [f"Python {sys.version.split()[0]}", f"torch {torch.__version__}"]
    if torch.version.cuda:
        parts.append(f"CUDA {torch.version.cuda}")
    if torch.version.hip:
        parts.append(f"ROCm {torch.version.hip}")
    if torch.cuda.is_available():
        nccl: Any = torch.cuda.nccl
        parts.append("NCCL " + ".".join(map(str, nccl.version())))
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        parts += [f"{names.count(name)} x {name}" for name in sorted(set(names))]
    else:
        parts.append("no GPU")
    return True, ", ".join(parts)


def marked_tests() -> tuple[bool, str]:
    """Run the tests that need a GPU."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-o",
        "addopts=--import-mode=importlib",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    return done.returncode == 0, last.strip("= ")


def overhead() -> tuple[bool, str]:
    """Measure what recording adds to a one-element all_reduce over NCCL."""
    import torch
    import torch.distributed as dist
    from overhead import added_us, recording

    figures = []
    with nccl_group():
        element = torch.ones(1, device="cuda")
        for capture in ("native", "python"):
            added, plain = added_us(lambda: dist.all_reduce(element), recording(capture), 5, OPS)
            torch.cuda.synchronize()
            figures.append(f"{capture} {added:+.2f} µs")
    return True, f"{', '.join(figures)} a call of {plain:.1f} µs"


def graph_capture() -> tuple[bool, str]:
    """Capture a collective into a CUDA graph with recording on, with ops in flight beside it."""
    import torch
    import torch.distributed as dist

    from rankcall import hooks

    results = []
    for recording in (False, True):
        with nccl_group() as tensor:
            switch = recorded() if recording else nullcontext()
            with switch:
                tensor.fill_(2)
                for _ in range(100):
                    dist.all_reduce(tensor, async_op=True)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    dist.all_reduce(tensor)
                    tensor.add_(1)
                    # Two looks at the status fall into the capture.
                    time.sleep(2.5 if recording else 0)
                for _ in range(3):
                    graph.replay()
                torch.cuda.synchronize()
                results.append(tensor[:4].tolist())
                seconds = seconds_until_ended() if recording else 0.0
                pending = len(hooks.pending()) if recording else 0
    same = results[0] == results[1]
    detail = (
        f"replays {'equal' if same else 'differ'}, {pending} ops in flight after {seconds:.1f} s"
    )
    return same and not pending, detail


def completions() -> tuple[bool, str]:
    """Compare the records with what NCCL's watchdog says, and time how soon ends are known."""
    import torch
    import torch.distributed as dist

    import rankcall

    c10d: Any = torch._C._distributed_c10d
    dump = getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return False, "this torch has no _dump_nccl_trace_json"
    with nccl_group() as tensor, recorded() as recording:
        for number in range(20):
            dist.all_reduce(tensor, async_op=bool(number % 2))
        torch.cuda.synchronize()
        took = seconds_until_ended()
        status = json.loads(dump(includeCollectives=False)).get("pg_status", {})
        rows = rankcall.load(recording.path).records.select("status", "abandoned").to_dicts()
    completed = sum(row["status"] == "completed" for row in rows)
    detail = f"{completed} of {len(rows)} completed, known after {took:.2f} s; pg_status {status}"
    return completed == len(rows) and took < COMPLETION_SECONDS, detail


def memory() -> tuple[bool, str]:
    """Compare the memory of a job with recording off and on, on all devices."""
    import torch
    import torch.distributed as dist

    def peak_mib() -> tuple[float, list[float]]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(OPS):
            work = dist.all_reduce(torch.ones(1 << 18, device="cuda"), async_op=True)
            work.wait()
        torch.cuda.synchronize()
        devices = range(torch.cuda.device_count())
        used = [(total - free) / 2**20 for free, total in map(torch.cuda.mem_get_info, devices)]
        return torch.cuda.max_memory_allocated() / 2**20, used

    with nccl_group():
        peak_mib()
        peak_off, used_off = peak_mib()
        with recorded():
            time.sleep(2.5)  # until rankcall's thread has looked
            peak_on, used_on = peak_mib()
    grown = [on - off for off, on in zip(used_off, used_on, strict=True)]
    detail = (
        f"peak {peak_off:.1f} MiB off, {peak_on:.1f} on; "
        f"used on each device {', '.join(f'{mib:+.0f}' for mib in grown)} MiB"
    )
    return peak_on <= peak_off * 1.01 and all(mib < 32 for mib in grown), detail


def durations() -> tuple[bool, str]:
    """Compare device times, which are experimental, with torch.profiler's kernels."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    import rankcall

    os.environ["RANKCALL_DEVICE_TIMES"] = "1"
    with nccl_group(), recorded() as recording:
        large = torch.ones(1 << 24, device="cuda")
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(20):
                dist.all_reduce(large)
            torch.cuda.synchronize()
        time.sleep(0.01)
        dist.all_reduce(large)  # which asks for the times of those before it
        torch.cuda.synchronize()
        seconds_until_ended()
        ours = rankcall.load(recording.path).records["device_ms"].drop_nulls().to_list()
    kernels = [
        event.device_time / 1e3 for event in profiled.events() or [] if "nccl" in event.name.lower()
    ]
    if not ours or not kernels:
        return False, f"{len(ours)} durations recorded, {len(kernels)} kernels profiled"
    ratio = statistics.median(ours) / max(statistics.median(kernels), 1e-9)
    detail = (
        f"median {statistics.median(ours):.3f} ms, profiler {statistics.median(kernels):.3f} ms, "
        f"ratio {ratio:.2f}"
    )
    return 0.8 < ratio < 1.25, detail


def hang_verdict() -> tuple[bool, str]:
    """Hang two ranks: rank 1 does not issue what rank 0 waits for. Ask ``rankcall diagnose``."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="rankcall-gpu-") as folder:
        run_dir = f"{folder}/run"
        common = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": "2",
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank-of-hang", run_dir],
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
            )
            for rank in (0, 1)
        ]
        try:
            return verdict(run_dir)
        finally:
            for process in ranks:
                process.send_signal(signal.SIGKILL)
                process.wait()


def verdict(run_dir: str) -> tuple[bool, str]:
    """Ask what hangs until there is an answer."""
    deadline = time.monotonic() + 120
    findings: list[dict[str, Any]] = []
    while time.monotonic() < deadline and not findings:
        time.sleep(1.0)
        done = subprocess.run(
            [sys.executable, "-m", "rankcall", "diagnose", run_dir, "--json", "--hang-after", "5"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if done.returncode < 2 and done.stdout:
            findings = json.loads(done.stdout)["findings"]
    named = [(finding["kind"], finding["ranks"]) for finding in findings]
    return [ranks for _, ranks in named] == [[1]], f"verdict {named}"


def rank_of_hang(run_dir: str) -> None:
    """Be one of the two ranks: all but rank 1 issue a collective that rank 1 never joins."""
    import torch.distributed as dist

    import rankcall

    with nccl_group() as tensor:
        rankcall.enable(run_dir)
        for _ in range(5):
            dist.all_reduce(tensor)
        if dist.get_rank() != 1:
            dist.all_reduce(tensor)
        sys.stdin.readline()  # until the parent kills this process


CHECKS = (
    Check("versions and devices", 0, versions),
    Check("tests marked gpu", 1, marked_tests),
    Check("overhead of recording", 1, overhead),
    Check("CUDA graph with a collective", 1, graph_capture),
    Check("ends of ops", 1, completions),
    Check("memory", 1, memory),
    Check("device times against the profiler", 1, durations),
    Check("hang verdict", 2, hang_verdict),
)


# --- the table ---


def what_lacks(check: Check) -> str:
    """Return why a check cannot run here; "" if it can."""
    import torch

    if not check.gpus:
        return ""
    if not torch.cuda.is_available():
        return "no GPU"
    if torch.cuda.device_count() < check.gpus:
        return f"needs {check.gpus} GPUs, {torch.cuda.device_count()} here"
    if not torch.distributed.is_nccl_available():
        return "this torch has no NCCL"
    return ""


def run_check(check: Check) -> Line:
    """Run a check in a process of its own."""
    lacks = what_lacks(check)
    if lacks:
        return Line(check.name, "skipped", lacks)
    # A session of its own, so that nothing that the check has started outlives its time-out.
    process = subprocess.Popen(
        [sys.executable, __file__, "--run", check.name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=CHECK_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Line(check.name, "failed", f"took longer than {CHECK_SECONDS} s")
    last = (out.strip().splitlines() or [""])[-1]
    try:
        is_well, detail = json.loads(last)
    except ValueError:
        reason = (err.strip().splitlines() or ["no output"])[-1]
        return Line(check.name, "failed", f"exit status {process.returncode}: {reason}")
    return Line(check.name, "ok" if is_well else "failed", detail)


def table(lines: list[Line]) -> str:
    """Return the lines as a Markdown table."""
    rows = [(line.name, line.result, line.detail.replace("|", "\\|")) for line in lines]
    return "\n".join(
        "| " + " | ".join(row) + " |"
        for row in [("check", "result", "figures, or the reason"), ("---",) * 3, *rows]
    )


def main() -> int:
    """Run the checks and print how they ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[check.name for check in CHECKS])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--rank-of-hang", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of_hang:
        rank_of_hang(options.rank_of_hang)
        return 0
    if options.run:
        print(json.dumps(next(check for check in CHECKS if check.name == options.run).run()))
        return 0
    chosen = [check for check in CHECKS if not options.only or check.name in options.only]
    lines = [run_check(check) for check in chosen]
    print(json.dumps([vars(line) for line in lines]) if options.json else table(lines))
    return int(any(line.result == "failed" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
