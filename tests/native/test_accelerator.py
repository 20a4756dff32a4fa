"""The simulated accelerator itself: the tests of devices are only as good as it is."""

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
    """Run the checks in a process of their own; return "" or a traceback for each."""
    import accelerator

    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler here")
    accelerator.MODULE.prebuild()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "accelerator_checks.py")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results: dict[str, str] = json.loads(done.stdout)
    return results


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(CHECKS))
def test_the_simulator_sees(name: str, ended: dict[str, str]) -> None:
    """The log, the timelines and the status show the requests that a check makes of the device."""
    assert not ended[name], ended[name]
