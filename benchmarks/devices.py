"""Measure NCCL on simulated devices: two ranks, torch's own ProcessGroupNCCL.

``all_reduce_8b_us``: from the call to the end on the device, of an all_reduce of eight bytes, with
the ranks in step. ``all_reduce_8b_queued_us``: the same operation where the host runs ahead, per
operation. ``all_reduce_64mib_gbs``: bytes of the tensor over the time of the operation.
``copy_gbs`` is what one core copies in the same process, which bounds it: both ranks copy their
data in and the other's out, and add.

Medians over the rounds; goals are 100 us and 1 GB/s. Needs a CUDA build of torch and no GPU.
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

GOALS = {"all_reduce_8b_us": "at most 100", "all_reduce_64mib_gbs": "at least 1"}
DEADLINE_S = 300

RANK = """
import json, os, statistics, time
import torch, torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
store = dist.FileStore(os.environ["RENDEZVOUS"], 2)
dist.init_process_group("nccl", store=store, rank=rank, world_size=2)

def timed(function):
    torch.cuda.synchronize(); begin = time.perf_counter(); function(); torch.cuda.synchronize()
    return time.perf_counter() - begin

small, large = torch.zeros(2, device="cuda"), torch.zeros(16 << 20, device="cuda")
for _ in range(200): dist.all_reduce(small); torch.cuda.synchronize()
in_step = [timed(lambda: dist.all_reduce(small)) for _ in range(2000)]
def many():
    for _ in range(200): dist.all_reduce(small)
queued = [timed(many) / 200 for _ in range(10)]
for _ in range(3): dist.all_reduce(large)
big = [timed(lambda: dist.all_reduce(large)) for _ in range(11)]
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
    figures = measure(variables)
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:28} {value:>8}" + (f"   (goal: {GOALS[name]})" if name in GOALS else ""))
    return 0


def measure(variables: dict[str, str]) -> dict[str, float]:
    """Run two ranks and return what rank 0 measured."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK],
                env=variables
                | {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "RENDEZVOUS": os.path.join(folder, "store"),
                },
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
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
