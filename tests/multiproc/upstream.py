"""Run PyTorch's own Gloo tests with recording off and on, and say what came out differently."""

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

SUITE = Path(__file__).parents[1] / "upstream" / "c10d_suite.py"
OFF, ON = "", "native"
Outcomes = dict[str, str]


def run_suite(record: str, names: Sequence[str] = (), timeout: float = 1500) -> Outcomes:
    """Return each test's outcome: ``passed``, ``failed``, ``skipped: why``."""
    with tempfile.TemporaryDirectory(prefix="rankcall-upstream-") as folder:
        out, log = Path(folder) / "outcomes.json", Path(folder) / "log"
        command = [sys.executable, str(SUITE), "--out", str(out), "--record", record]
        env = {**os.environ, "TEMP_DIR": folder, "UPSTREAM_RUN_DIR": f"{folder}/run"}
        env["RANKCALL_SHM"] = f"{folder}/shm"
        with log.open("w") as file:
            try:
                done = subprocess.run(
                    [*command, *(["--only", *names] if names else [])],
                    cwd=folder,
                    env=env,
                    stdout=file,
                    stderr=file,
                    timeout=timeout,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                raise AssertionError(f"{error}\n{_end_of(log)}") from error
        outcomes: Outcomes = {}
        with suppress(OSError):
            outcomes = json.loads(out.read_text())
        assert done.returncode == 0, _end_of(log)
        if "failed" in outcomes.values() and os.environ.get("UPSTREAM_LOG"):
            print(log.read_text())
        return outcomes


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-6000:]


def different(off: Outcomes, on: Outcomes) -> list[str]:
    """Return the names of the tests whose outcomes differ."""
    return sorted(name for name in off.keys() | on.keys() if off.get(name) != on.get(name))


def compare(names: Sequence[str] = ()) -> tuple[str, list[str]]:
    """Run all tests, or those named, both ways; return a summary and the differences.

    A test that differs runs once more both ways: on a busy machine PyTorch's tests can time out.
    """
    off, on = run_suite(OFF, names), run_suite(ON, names)
    lines = [f"{len(off)} tests", f"recording off: {_count(off)}", f"recording on:  {_count(on)}"]
    again = different(off, on)
    if again:
        lines.append(f"differed and ran again: {', '.join(again)}")
        off, on = run_suite(OFF, again), run_suite(ON, again)
    left = [f"{name}: {off.get(name)} without, {on.get(name)} with" for name in different(off, on)]
    return "\n".join([*lines, *(left or ["same outcomes"])]), left


def _count(outcomes: Outcomes) -> str:
    counts = Counter(outcome.partition(":")[0] for outcome in outcomes.values())
    return ", ".join(f"{counts[name]} {name}" for name in ("passed", "skipped", "failed"))
