"""What Flight Recorder dumps that torch's NCCL back end writes say."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from recorded_jobs import TIMED_OUT, RecordedJobs, torch_version

BATCHES = """
import torch._C._distributed_c10d as c10d
rankcall.disable()
init(); x = torch.ones(64, device="cuda"); y = torch.ones(64, device="cuda")
def batch():
    ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)]
    for work in dist.batch_isend_irecv(ops): work.wait()
"""
# `batches_are_over` asks for what the watchdog has found: an entry of a batch ends with the batch.
_READ = "_dump_fr_trace(backend='nccl2')" if torch_version() >= (2, 15) else "_dump_nccl_trace()"
DUMP = f"""
import pickle
def batches_are_over():
    entries = pickle.loads(c10d.{_READ})["entries"]
    ends = entries[-1:] if {torch_version() >= (2, 15)} else [
        entry for entry in entries if entry["profiling_name"] == "nccl:coalesced"]
    return len(entries) >= 8 and all(entry["state"] == "completed" for entry in ends)
def dump():
    with open(f"{{os.environ['DUMPS']}}/rank_{{rank}}", "wb") as file: file.write(c10d.{_READ})
"""


def diagnose(dumps: Path, *options: str) -> str:
    """Return what a diagnosis of the dumps alone prints."""
    done = subprocess.run(
        [sys.executable, "-m", "rankcall", "diagnose", str(dumps), *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout


def diagnosed(dumps: Path) -> list[tuple[str, list[int]]]:
    """Return what a diagnosis of the dumps alone finds."""
    found: list[dict[str, Any]] = json.loads(diagnose(dumps, "--json"))["findings"]
    return [(one["kind"], one["ranks"]) for one in found]


@pytest.mark.parametrize("first", ["", "dist.all_reduce(x)"])
@pytest.mark.parametrize("late", [None, 0, 1])
def test_batches(jobs: RecordedJobs, tmp_path: Path, late: int | None, first: str) -> None:
    """Batches of sends and receives that are over are no trouble; whoever is late to one is named.

    A batch before any collective has the number 0. The back end of torch 2.15 takes a batch for
    complete when it is issued, so that its dumps do not show which one hangs.
    """
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    job = jobs.start(
        2,
        BATCHES
        + DUMP
        + f"""
{first}
for _ in range(4): batch()
torch.cuda.synchronize(); wait_until(batches_are_over)
if {late} == 1 - rank: batch()
issued = time.monotonic(); wait_until(lambda: time.monotonic() > issued + 2)  # else it is young
dump(); say("dumped"); wait_told("end"); os._exit(0)
""",
        TORCH_FR_BUFFER_SIZE="100",
        DUMPS=str(dumps),
    )
    for rank in (0, 1):
        job.job.wait_for("dumped", rank)
    ends_are_told = torch_version() < (2, 15)
    assert diagnosed(dumps) == ([("missing", [late])] if late is not None and ends_are_told else [])
    text = diagnose(dumps)
    assert text.startswith("nothing found") == (not ends_are_told), text
    job.tell("end")
    job.job.succeed()


def test_dumps_of_a_real_watchdog_name_the_missing_rank(jobs: RecordedJobs, tmp_path: Path) -> None:
    """torch's watchdog times out and writes its dumps; a diagnosis of them alone names rank 1.

    That of torch 2.15 writes one on the rank that timed out alone, so rank 1 has none.
    """
    count = 1 if torch_version() >= (2, 15) else 2
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    prefix = str(dumps / "nccl_trace_rank_")
    job = jobs.start(
        2,
        """
        rankcall.disable()
        init(timeout=8); x = torch.ones(4, device="cuda")
        for count in range(5):
            if count < 4 or rank == 0: dist.all_reduce(x); torch.cuda.synchronize()
        wait_told("end"); os._exit(0)
        """,
        TORCH_FR_BUFFER_SIZE="100",
        TORCH_NCCL_DUMP_ON_TIMEOUT="1",
        TORCH_FR_DUMP_TEMP_FILE=prefix,
        TORCH_NCCL_DEBUG_INFO_TEMP_FILE=prefix,
    )
    job.job.wait_for(TIMED_OUT, 0)
    while len(list(dumps.iterdir())) < count or diagnosed(dumps) != [("missing", [1])]:
        assert time.monotonic() < job.job.deadline, (diagnose(dumps), job.job.report())
        time.sleep(0.1)
    job.job.kill()  # the watchdog would wait for a minute before it ends the process
    job.job.wait()
