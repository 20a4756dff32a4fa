"""Run PyTorch's own RPC tests on a back end, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

SUITE = Path(__file__).parents[1] / "upstream" / "rpc_suite.py"
JOBS = 3  # most tests wait most of the time
Outcomes = dict[str, str]


def run_suite(backend: str, only: Sequence[str] = (), timeout: float = 2800) -> Outcomes:
    """Return each test's outcome: ``passed``, ``failed``, ``skipped: why``."""
    with tempfile.TemporaryDirectory(prefix="rankcall-rpc-") as folder:
        out, log = Path(folder) / "outcomes.json", Path(folder) / "log"
        command = [sys.executable, str(SUITE), "--backend", backend, "--out", str(out)]
        command += ["--jobs", str(JOBS)]
        env = {**os.environ, "TEMP_DIR": folder, "RANKCALL_SHM": folder}
        with log.open("w") as file:
            done = subprocess.run(
                [*command, *(["--only", *only] if only else [])],
                cwd=folder,
                env=env,
                stdout=file,
                stderr=file,
                timeout=timeout,
                check=False,
            )
        outcomes: Outcomes = {}
        with suppress(OSError):
            outcomes = json.loads(out.read_text())
        if done.returncode or "failed" in outcomes.values():
            print(log.read_text(errors="replace")[-8000:])
        assert done.returncode == 0
        return outcomes


def run_twice(backend: str) -> Outcomes:
    """Run all, and what failed once more: PyTorch's own tests time out on a busy machine."""
    outcomes = run_suite(backend)
    again = [name for name, outcome in outcomes.items() if outcome == "failed"]
    return {**outcomes, **run_suite(backend, again)} if again else outcomes


def failed(outcomes: Outcomes) -> list[str]:
    """Return the names of the tests that failed."""
    return sorted(name for name, outcome in outcomes.items() if outcome == "failed")


def count(outcomes: Outcomes) -> str:
    """Return how many there are of each outcome."""
    counts = Counter(outcome.partition(":")[0] for outcome in outcomes.values())
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
