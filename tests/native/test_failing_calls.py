"""Each system call of ours fails once, and changes no job.

Those that touch a file of rankcall, those that start a process or a thread, and those on sockets.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.multiproc
PHASES = ("record", "exec", "run", "report", "verdict", "serve", "page")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the library that is preloaded."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    target = tmp_path_factory.mktemp("library") / "failing_calls.so"
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    command += [str(HERE / "failing_calls.cpp"), "-o", str(target), "-ldl"]
    subprocess.run(command, check=True, timeout=200)
    return target


def run_cases(
    library: Path, folder: Path, phase: str, cases: int, *name: str
) -> list[dict[str, Any]]:
    """Return what each case did; the first is without a failure."""
    folder.mkdir()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("RANKCALL_")
    }
    done = subprocess.run(
        [
            sys.executable,
            HERE / "failing_calls_program.py",
            library,
            folder,
            phase,
            str(cases),
            *name,
        ],
        env={**environment, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=7000,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def records_of(report: str) -> int:
    """Return the number of records in a report."""
    found = re.search(r"([\d,]+) records, none dropped", report)
    return int(found[1].replace(",", "")) if found else 0


def check(library: Path, folder: Path, phase: str, cases: int, *name: str) -> set[str]:
    """Check what all cases of a phase did; return the calls that failed."""
    first, *rest = run_cases(library, folder / phase, phase, cases, *name)
    assert first["status"] == 0, first
    assert rest, first
    if phase == "record":
        plain, *_ = run_cases(library, folder / "without", "without", 1)
        assert plain["calls"] == 0
        assert first["out"] == plain["out"]
    for case in rest:
        # asyncio writes one of its own if it cannot make an event loop.
        assert "Traceback" not in case["err"] or "BaseEventLoop.__del__" in case["err"], case
        assert case["status"] == 0, case
        if phase == "report":
            assert case["out"].rpartition("statuses")[2].strip() in STATUSES, case
            assert records_of(case["after"]) == records_of(first["after"]) > 0, case
        elif not cannot_begin(phase, case):
            assert without_link(case["out"]) == without_link(first["out"]), case
    return {case["failed"] for case in rest}


def without_link(out: str) -> str:
    """Return what a command printed, without the link to its page, which is never the same."""
    return re.sub(r"^http://127.0.0.1:\d+/#token=\S+$", "LINK", out, flags=re.MULTILINE)


def cannot_begin(phase: str, case: dict[str, Any]) -> bool:
    """Return whether a command could not start what it is for, and said so."""
    if phase == "exec":  # it cannot start the command: what a shell returns then
        return bool(case["failed"] in ("fork", "pipe2") and case["out"] == "status 126\n")
    said = re.search(r"^rankcall: error: \S", case["err"], re.MULTILINE)
    has_begun = "/ 200" in case["out"]
    return phase == "page" and bool(said) and not has_begun


# A command is done, done with problems, or could not read the run, and never a traceback.
STATUSES = {f"[{report}, {diagnose}]" for report in range(3) for diagnose in range(3)}


@pytest.mark.parametrize(
    "phase",
    [
        "record",
        "exec",
        "page",
        *(pytest.param(name, marks=pytest.mark.slow) for name in PHASES[2:-1]),
    ],
)
def test_some_calls_that_fail(library: Path, tmp_path: Path, phase: str) -> None:
    """A sample of calls fails, each with an error of its own; the job, or the command, ends well.

    A command that fails loses no record: the next one reads them.
    """
    assert len(check(library, tmp_path, phase, 4)) >= 2


def test_threads_that_cannot_be_started(library: Path, tmp_path: Path) -> None:
    """A job goes on and ends as without rankcall, whichever of its threads is refused."""
    assert check(library, tmp_path, "record", 9, "pthread_create") == {"pthread_create"}


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("phase", PHASES)
def test_each_call_that_fails(library: Path, tmp_path: Path, phase: str) -> None:
    """The same for every call, with ENOSPC, EMFILE, EIO, EACCES and ENOMEM."""
    assert len(check(library, tmp_path, phase, 0)) >= 3
