"""Measure NCCL on simulated devices, and what recording adds to it: torch's ProcessGroupNCCL.

``all_reduce_8b_us``: from the call to the end on the device, of an all_reduce of eight bytes, with
the ranks in step. ``all_reduce_8b_queued_us``: the same operation where the host runs ahead, per
operation. ``all_reduce_64mib_gbs``: bytes of the tensor over the time of the operation.
``copy_gbs`` is what one core copies in the same process, which bounds it: both ranks copy their
data in and the other's out, and add. Each rank has a core of its own if there are two: Linux may
move both to one, where an operation of eight bytes takes three times as long.

``nccl_native_added_us``: what recording adds to an all_reduce, on the thread that issues it.
``nccl_device_times_added_us``: what device times add to that. ``nccl_python_added_us``: what the
Python capture adds. ``nccl_native_async_added_us`` is the same with ``async_op=True`` and a wait.
The device is idle whenever a call is timed: a thread of a simulated device would take a core and
locks from it, which no GPU does.

Medians over the rounds, and in each of them over its calls. Needs a CUDA build of torch and no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "devices" / "src"))

from simulated_devices import DevicesError, environment  # noqa: E402

GOALS = {
    "all_reduce_8b_us": "at most 100",
    "all_reduce_64mib_gbs": "at least 1",
    "nccl_native_added_us": "at most 0.4",
    "nccl_device_times_added_us": "at most 1.0",
    "nccl_python_added_us": "at most 20",
}
DEADLINE_S = 300

RANK = """
import json, os, statistics, time
rank, cores = int(os.environ["RANK"]), sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cores[rank % len(cores)]})  # also of all threads to come
import torch, torch.distributed as dist
torch.cuda.set_device(rank)
store = dist.FileStore(os.environ["RENDEZVOUS"], 2)
dist.init_process_group("nccl", store=store, rank=rank, world_size=2)

def timed(function):
    torch.cuda.synchronize(); begin = time.perf_counter(); function(); torch.cuda.synchronize()
    return time.perf_counter() - begin

small, large = torch.zeros(2, device="cuda"), torch.zeros(16 << 20, device="cuda")
for _ in range(3): dist.all_reduce(large)
big = [timed(lambda: dist.all_reduce(large)) for _ in range(11)]
for _ in range(200): dist.all_reduce(small); torch.cuda.synchronize()
in_step = [timed(lambda: dist.all_reduce(small)) for _ in range(2000)]
def many():
    for _ in range(200): dist.all_reduce(small)
queued = [timed(many) / 200 for _ in range(10)]
source, target = torch.zeros(16 << 20), torch.zeros(16 << 20)
copies = [timed(lambda: target.copy_(source)) for _ in range(5)]
if rank == 0:
    print(json.dumps({
        "all_reduce_8b_us": round(statistics.median(in_step) * 1e6, 1),
        "all_reduce_8b_queued_us": round(statistics.median(queued) * 1e6, 1),
        "all_reduce_64mib_gbs": round((64 << 20) / statistics.median(big) / 1e9, 2),
        "copy_gbs": round((64 << 20) / statistics.median(copies) / 1e9, 2),
    }), flush=True)
dist.destroy_process_group()
"""

# One rank: nothing is waited for, so what recording adds shows.
RECORDING = """
import json, os, statistics, time
import torch, torch.distributed as dist
from overhead import recording
torch.cuda.set_device(0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.zeros(2, device="cuda")
def in_stream(): dist.all_reduce(tensor)
def on_its_own(): dist.all_reduce(tensor, async_op=True).wait()
def of_a_call(call, calls=600):
    taken = []
    for _ in range(calls + 60):
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        call()
        taken.append(time.perf_counter_ns() - begin)
    return statistics.median(taken[60:]) / 1e3
def added(call, capture, times="0"):
    os.environ["RANKCALL_DEVICE_TIMES"] = times
    found = []
    for _ in range(25):
        before = of_a_call(call)
        with recording(capture)():
            during = of_a_call(call)
        found.append(during - (before + of_a_call(call)) / 2)
    return statistics.median(found)
if CAPTURE == "python":
    # Against a process that never recorded: its kernels stay, and cost microseconds themselves.
    before = statistics.median(of_a_call(in_stream) for _ in range(25))
    with recording("python")():
        during = statistics.median(of_a_call(in_stream) for _ in range(25))
    figures = {"nccl_python_added_us": round(during - before, 1)}
else:
    native = added(in_stream, "native")
    figures = {
        "nccl_native_added_us": round(native, 2),
        "nccl_native_async_added_us": round(added(on_its_own, "native"), 2),
        "nccl_device_times_added_us": round(added(in_stream, "native", "1") - native, 2),
    }
print(json.dumps(figures), flush=True)
dist.destroy_process_group()
"""


def main() -> int:
    """Print the figures; a goal that is missed is no error."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    try:
        variables = environment(gpus=2) | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    except DevicesError as error:
        print(error, file=sys.stderr)
        return 2
    figures = measure(RANK, 2, variables)
    for capture in ("native", "python"):
        figures |= measure(f"CAPTURE = {capture!r}\n{RECORDING}", 1, variables)
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:28} {value:>8}" + (f"   (goal: {GOALS[name]})" if name in GOALS else ""))
    return 0


def measure(program: str, size: int, variables: dict[str, str]) -> dict[str, float]:
    """Run a program on some ranks and return what rank 0 measured."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", program],
                env=variables
                | {
                    "PYTHONPATH": path,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(size),
                    "RENDEZVOUS": os.path.join(folder, "store"),
                },
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            outputs = [rank.communicate(timeout=DEADLINE_S)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    return {
        str(name): float(value) for name, value in json.loads(outputs[0].splitlines()[-1]).items()
    }


if __name__ == "__main__":
    sys.exit(main())
