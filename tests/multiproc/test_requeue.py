"""The batch script of the guide, in a Slurm cluster of one node: which jobs come back."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm

PAGE = Path(__file__).parents[2] / "docs/guides/hand-over.md"
WAIT_S = 240.0
TRAIN = """
import os, signal, sys, time
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if "{fault}" == "launcher" and "SLURM_RESTART_COUNT" not in os.environ:
    if dist.get_rank() == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)  # the kernel ends this process with its launcher
if "{fault}" == "program":
    raise ValueError("bad batch")
dist.destroy_process_group()
"""

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(900)]


class Cluster:
    """A cluster, in which the guide's script runs."""

    def __init__(self, env: dict[str, str]) -> None:
        tools = f"{Path(sys.executable).parent}:{slurm.SEARCH}"
        self._env = {**os.environ, **env, "PATH": tools, "OMP_NUM_THREADS": "1"}

    def ask(self, *command: str, cwd: Path | None = None) -> str:
        """Return what a command of Slurm's says."""
        asked = subprocess.run(
            command, cwd=cwd, env=self._env, capture_output=True, text=True, timeout=60
        )
        return asked.stdout.strip()

    def run(self, folder: Path, fault: str) -> dict[str, str]:
        """Run the guide's script to its end; return what Slurm knows of the job."""
        text = PAGE.read_text()
        script = re.search(r"<!-- file: job.sh -->\n```bash\n(.*?)```", text, re.DOTALL)
        assert script is not None
        (folder / "job.sh").write_text(script[1])
        (folder / "train.py").write_text(TRAIN.replace("{fault}", fault))
        number = self.ask("sbatch", "--parsable", "--export=ALL", "job.sh", cwd=folder)
        deadline = time.monotonic() + WAIT_S
        while True:
            told = self.ask("scontrol", "show", "job", number)
            job = dict(re.findall(r"(\w+)=(\S+)", told))
            if job.get("JobState") in ("COMPLETED", "FAILED"):
                return job
            logs = "\n".join(log.read_text() for log in folder.glob("slurm-*.out"))
            assert time.monotonic() < deadline, f"{told}\n{logs}"
            time.sleep(0.2)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Return a cluster of one node."""
    programs = (*slurm.PROGRAMS, "sbatch", "scontrol")
    absent = [name for name in programs if shutil.which(name, path=slurm.SEARCH) is None]
    if absent or os.geteuid():
        pytest.skip(f"needs root, and make setup-integrations: {', '.join(absent)}")
    with slurm.cluster(credentials_s=30) as env:
        yield Cluster(env)


@pytest.mark.parametrize(
    ("fault", "state", "restarts", "outcome"),
    [("launcher", "COMPLETED", "1", "done"), ("program", "FAILED", "0", "repeats")],
)
def test_which_jobs_come_back(
    fault: str, state: str, restarts: str, outcome: str, tmp_path: Path, cluster: Cluster
) -> None:
    """One whose launcher was killed does, and one whose program fails again does not."""
    job = cluster.run(tmp_path, fault)
    logs = "\n".join(log.read_text() for log in tmp_path.glob("slurm-*.out"))
    assert (job["JobState"], job["Restarts"]) == (state, restarts), logs
    [written] = (tmp_path / "runs").glob("*/outcome.json")
    assert json.loads(written.read_text())["outcome"] == outcome
    if fault == "program":
        assert job["ExitCode"] == "65:0"
