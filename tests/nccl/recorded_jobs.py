"""Jobs on simulated devices whose ranks record themselves."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import polars as pl
from simulated_devices import Fault, FaultFolder
from simulated_devices.testing import Job, Jobs, Zygote

import rankcall
from rankcall.errors import RankcallError
from rankcall.run.paths import trusted_live_dirs

# Against hangs alone. With 50 busy processes on two cores, a job of some seconds took 100.
LIMIT_S = 240.0
# What every rank executes before its program. `wait_told` waits for `RecordedJob.tell`.
PRELUDE = """
import rankcall
if os.environ.get("RANKCALL_CAPTURE") != "off": recording = rankcall.enable()
def wait_told(name): wait_until(lambda: os.path.exists(os.environ["JOB"] + "/" + name), 230)
"""


@dataclass
class RecordedJob:
    """A job, its run directory, and the folder in which its faults are ordered."""

    job: Job
    run_dir: Path
    faults: FaultFolder

    def tell(self, name: str) -> None:
        """Let the ranks go on that are in ``wait_told(name)``."""
        (self.job.folder / name).touch()

    def load(self) -> rankcall.Run:
        """Read the run: a job that still runs, or one that has ended."""
        return rankcall.load(self.run_dir)

    def records(self, **wanted: Any) -> pl.DataFrame:
        """Return the records, in issue order; ``wanted`` are values of their columns."""
        return self.load().records.filter(**wanted).sort("rank", "index")

    def wait_for(self, condition: Callable[[pl.DataFrame], object]) -> pl.DataFrame:
        """Wait until the records fulfil a condition, while the job runs; return them."""
        rows = pl.DataFrame()
        while time.monotonic() < self.job.deadline:
            with contextlib.suppress(RankcallError):  # no ring is there yet, or whole
                rows = self.records()
                if condition(rows):
                    return rows
            time.sleep(0.05)
        raise AssertionError(f"waited in vain:\n{_unfinished(rows)}\n{self.job.report()}")

    def after_a_look(self) -> pl.DataFrame:
        """Return the records once each rank has looked once more at what its devices completed.

        A look follows a heartbeat at least every second.
        """
        latest = max(self._heartbeats()) + 2_000_000_000
        return self.wait_for(lambda _: min(self._heartbeats()) > latest)

    def _heartbeats(self) -> list[int]:
        return [head.header.python_heartbeat_ns for head in self.load().heads]

    def command(
        self, *arguments: str, timeout: float = LIMIT_S, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of rankcall on the run, for example ``diagnose --json``."""
        return subprocess.run(
            [sys.executable, "-m", "rankcall", arguments[0], str(self.run_dir), *arguments[1:]],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env=env,
        )


class RecordedJobs:
    """Starts the recorded jobs of one test; see ``simulated_devices.testing.Jobs``."""

    def __init__(self, jobs: Jobs, folder: Path) -> None:
        self._jobs, self._folder = jobs, folder
        self._started: list[RecordedJob] = []

    def start(
        self,
        size: int,
        code: str,
        *,
        timeout: float = LIMIT_S,
        faults: Sequence[Fault] = (),
        **variables: str,
    ) -> RecordedJob:
        """Start a program on ``size`` ranks, all of which record it from its first line on.

        The ``faults`` are ordered before.
        """
        run_dir = self._folder / f"run-{len(self._started)}"
        folder = FaultFolder(self._folder / f"faults-{len(self._started)}")
        for fault in faults:
            folder.order(fault)
        common = {
            "SIMULATED_DEVICES_FAULTS": str(folder.folder),
            "RANKCALL_RUN_DIR": str(run_dir),
        }
        job = self._jobs.start(size, code, timeout=timeout, **common | variables)
        self._started.append(RecordedJob(job, run_dir, folder))
        return self._started[-1]

    def run(
        self, size: int, code: str, *, timeout: float = LIMIT_S, **variables: str
    ) -> RecordedJob:
        """Run a program on ``size`` ranks, each of which must end with status 0."""
        recorded = self.start(size, code, timeout=timeout, **variables)
        recorded.job.succeed()
        return recorded

    def remove_rings(self) -> None:
        """Remove the live rings that killed ranks have left."""
        for recorded in self._started:
            for rings in trusted_live_dirs(recorded.run_dir):
                shutil.rmtree(rings)


def _unfinished(rows: pl.DataFrame) -> str:
    """Return the records without an end, for the report of a failed test."""
    if rows.is_empty():
        return "no records"
    columns = ["rank", "index", "op", "seq", "peer", "status", "abandoned", "enqueued_ns"]
    with pl.Config(tbl_rows=100, tbl_cols=-1, tbl_width_chars=200):
        found = rows.filter(rows["completed_ns"].is_null()).select(columns)
        return f"of {len(rows)} records, these have no end:\n{found}"


def start_zygote(**variables: str) -> Zygote:
    """Start the process that forks the ranks; ``variables`` are added to its environment.

    Raises:
        DevicesError: The installed torch cannot run on simulated devices.
    """
    return Zygote(gpus=4, memory="1GiB", base=os.environ | variables)


def torch_version() -> tuple[int, int]:
    """Return the major and the minor number of the installed torch, without importing it."""
    major, minor = version("torch").split(".")[:2]
    return int(major), int(minor)


# What torch's watchdog of NCCL writes if a call is late.
TIMED_OUT = (
    "Operation timed out after"
    if torch_version() >= (2, 15)
    else "Watchdog caught collective operation timeout"
)
