"""The simulated accelerator itself: a test of a claim about devices is worth what it is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from accelerator_checks import CHECKS

pytestmark = pytest.mark.slow  # building it takes half a minute, once

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def ended() -> dict[str, str]:
    """Return how each check ended, in a process of their own: "" or its traceback."""
    import accelerator

    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler here")
    accelerator.MODULE.prebuild()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "accelerator_checks.py")],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results: dict[str, str] = json.loads(done.stdout)
    return results


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(CHECKS))
def test_the_simulator_sees(name: str, ended: dict[str, str]) -> None:
    """What a check does on the device is in the log, the timelines and the status."""
    assert not ended[name], ended[name]
