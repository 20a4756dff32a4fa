"""Jobs of frameworks that train on devices, started by their launchers below ``rankcall exec``.

``make frameworks-for-nccl`` installs the frameworks. A test whose framework is missing is skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl
import pytest
from attach_programs import LIGHTNING
from framework_programs import DEEPSPEED, TRANSFORMERS
from launch import RANKCALL, Ended, run_program
from launchers import digests, hang_of, line_of, run_of
from ports import free_port

from rankcall.run.load import load

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(1200)]
TIMEOUT_S = 500
BIN = RANKCALL.parent


@dataclass(frozen=True)
class Job:
    """A script, its launcher, and what tells the script to train on devices, and to hang."""

    script: str
    command: tuple[str, ...]
    on_devices: dict[str, str] = field(default_factory=lambda: {"DEVICE": "cuda"})
    to_hang: dict[str, str] = field(default_factory=lambda: {"FAULT": "hang"})


JOBS = {
    "lightning": Job(LIGHTNING, (sys.executable, "job.py"), {"DEVICE": "gpu"}, {"HANG": "1"}),
    "deepspeed": Job(
        DEEPSPEED,
        ("deepspeed", "--num_gpus=2", "--master_addr=127.0.0.1", "--master_port={port}", "job.py"),
    ),
    "transformers": Job(TRANSFORMERS, ("torchrun", "--standalone", "--nproc-per-node=2", "job.py")),
}


@pytest.fixture(params=JOBS)
def job(request: pytest.FixtureRequest, devices: None) -> Job:
    """The job of each framework."""
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed: make frameworks-for-nccl")
    return JOBS[request.param]


def start(job: Job, folder: Path, *options: str, **env: str) -> Ended:
    """Run a job to its end, below ``rankcall exec`` with options, or without if there are none."""
    from simulated_devices import environment

    folder.mkdir()
    (folder / "job.py").write_text(job.script)
    port = str(free_port())
    recorded = (str(RANKCALL), "exec", *options, "--") if options else ()
    variables = {
        **environment(gpus=2, memory="1GiB"),
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        **job.on_devices,
        **env,
    }
    command = (*recorded, *(part.format(port=port) for part in job.command))
    return run_program(*command, cwd=folder, env=variables, timeout=TIMEOUT_S)


def test_nothing_changes_and_each_op_has_its_end(job: Job, capture: str, tmp_path: Path) -> None:
    """The weights are the same to the bit, and the ops on devices have completed."""
    usual = start(job, tmp_path / "without")
    ended = start(job, tmp_path / "with", f"--capture={capture}", "--hang-after=120")
    assert (usual.status, ended.status) == (0, 0), usual.err + ended.err
    assert len(digests(usual)) == 2, usual.err
    assert digests(ended) == digests(usual)
    records = load(run_of(ended)).records
    on_devices = records.filter(records["device"].cast(pl.String).str.starts_with("cuda"))
    assert set(on_devices["rank"]) == {0, 1}
    assert {"all_reduce"} <= set(on_devices["op"])
    without_end = on_devices.filter(on_devices["completed_ns"].is_null())
    assert without_end.is_empty(), without_end


def test_a_rank_that_hangs_is_named(job: Job, capture: str, tmp_path: Path) -> None:
    """The watcher names rank 1 and the line of its script, and ends the job."""
    options = (f"--capture={capture}", "--hang-after=10", "--on-hang=abort")
    ended = start(job, tmp_path / "job", *options, **job.to_hang)
    assert ended.status != 0
    verdict = json.loads((hang_of(run_of(ended)) / "verdict.json").read_text())
    (finding,) = verdict["findings"]
    assert (finding["kind"], finding["ranks"], finding["victims"]) == ("missing", [1], [0])
    assert f"job.py:{line_of(job.script, '# the hang')} in " in finding["summary"]
