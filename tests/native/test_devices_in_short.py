"""The few claims about devices that ``make test`` checks; test_devices.py checks them all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)  # the accelerator is compiled first

HERE = Path(__file__).parent
PROGRAMS = ("stuck_collective", "captured")


def test_a_device_is_left_alone_and_a_hang_is_seen(tmp_path: Path) -> None:
    """Streams, events and captures are as without recording; a hung op stays in flight."""
    import accelerator

    from rankcall.capture.native import RECORDER

    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler here")
    accelerator.MODULE.prebuild()
    RECORDER.prebuild()
    off, on = (_run(tmp_path, how) for how in ("off", "native"))
    for program in PROGRAMS:
        for charge in ("calls", "contexts", "dependencies", "stuck", "invalidated by"):
            assert on[program].get(charge) == off[program].get(charge), (program, charge)
        assert on[program]["by other threads"] == {}
    assert on["stuck_collective"]["hung"] == [["all_reduce", number] for number in range(2, 34)]
    assert on["stuck_collective"]["well"] == []
    assert on["captured"]["after"] == []


def _run(folder: Path, how: str) -> dict[str, dict[str, Any]]:
    (folder / how).mkdir()
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            str(HERE / "device_programs.py"),
            "own",
            how,
            str(folder / how / "run"),
            *PROGRAMS,
        ],
        env={**os.environ, "RANKCALL_SHM": str(folder / how)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen: dict[str, dict[str, Any]] = json.loads(done.stdout)
    assert set(seen) == set(PROGRAMS)
    assert not any("error" in report for report in seen.values()), seen
    return seen
