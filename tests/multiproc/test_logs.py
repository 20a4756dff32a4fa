"""Logs that the installed torch writes now: a fault is planted under torchrun, and diagnosed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankcall.analysis.logs import diagnose_logs

# Rank 2 of 4 does something wrong after the first collective.
PROGRAM = """
import datetime, os, signal, sys
import torch
import torch.distributed as dist

fault = sys.argv[1]
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=90))
tensor = torch.ones(8)
dist.all_reduce(tensor)
if dist.get_rank() == 2:
    if fault == "raise":
        raise ValueError("bad sample")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "size":
        tensor = torch.ones(9)
    if fault == "op":
        dist.broadcast(tensor, 0)
dist.all_reduce(tensor)
"""
DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
DEBUG = {"size": DETAIL, "op": DETAIL}
FAULTS = {"raise": "dead", "kill": "dead", "size": "mismatch", "op": "desync"}


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("size", marks=pytest.mark.slow),
        pytest.param("raise", marks=pytest.mark.slow),
        pytest.param("kill", marks=pytest.mark.slow),
        pytest.param("op", marks=pytest.mark.slow),
    ],
)
def test_the_log_of_a_job_under_torchrun(tmp_path: Path, fault: str) -> None:
    """The verdict names the rank with the fault, from what torch and torchrun wrote."""
    script, log = tmp_path / "job.py", tmp_path / "job.log"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    with log.open("wb") as out:
        done = subprocess.run(
            [*command, str(script), fault],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **DEBUG.get(fault, {})},
            timeout=300,
            check=False,
        )
    assert done.returncode == 1, log.read_text()
    (finding,) = diagnose_logs([log]).findings
    assert (finding.kind, finding.ranks) == (FAULTS[fault], (2,)), log.read_text()
    assert finding.confidence in ("likely", "possible")
