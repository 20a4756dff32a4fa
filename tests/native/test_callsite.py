"""The call-site walk, under every supported Python that is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "src" / "rankcall" / "capture" / "native"
VERSIONS = ["3.10", "3.11", "3.12", "3.13"]


def interpreter(version: str) -> str | None:
    """Return a Python of this version that runs, if there is one (TEST_PYTHONS: more places)."""
    if version == f"{sys.version_info[0]}.{sys.version_info[1]}":
        return sys.executable
    places = os.environ.get("TEST_PYTHONS", "").split(os.pathsep)
    program = shutil.which(f"python{version}", path=os.pathsep.join([*places, os.environ["PATH"]]))
    if program is None:
        return None
    runs = subprocess.run([program, "-c", ""], capture_output=True, check=False).returncode == 0
    return program if runs else None


@pytest.mark.parametrize("version", VERSIONS)
def test_walk_finds_the_line(version: str, tmp_path: Path) -> None:
    """The walk agrees with the interpreter, and outlives threads, code objects and the end."""
    python = interpreter(version)
    compiler = shutil.which("c++")
    if python is None or compiler is None:
        pytest.skip(f"no Python {version} with headers, or no compiler, here")
    include = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['include'])"], text=True
    ).strip()
    if not Path(include, "Python.h").exists():
        pytest.skip(f"Python {version} has no headers here")
    command = [compiler, "-std=c++17", "-O2", "-shared", "-fPIC", "-pthread"]
    command += ["-Wall", "-Wextra", "-Werror"]
    command += ["-Wno-missing-field-initializers", f"-isystem{include}", f"-I{NATIVE}"]
    command += [str(HERE / "callsite_probe.cpp"), "-o", str(tmp_path / "callsite_probe.so")]
    subprocess.run(command, check=True, timeout=240)
    done = subprocess.run(
        [python, str(HERE / "callsite_checks.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " ok, " in done.stdout
    assert "walk at exit: returned, site 0" in done.stdout
