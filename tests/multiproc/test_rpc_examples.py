"""The examples of RPC run to their end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiproc
EXAMPLE = Path(__file__).parents[2] / "examples" / "parameter_server.py"


@pytest.mark.parametrize("backend", ["ZMQ", pytest.param("TENSORPIPE", marks=pytest.mark.slow)])
def test_the_parameter_server(backend: str) -> None:
    """The model fits in the end; on ZMQ, also though a trainer is killed."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--backend", backend],
        capture_output=True,
        text=True,
        timeout=300,  # its processes import torch one after the other
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith(f"{backend}: pushes {{'trainer")
    killed_after = 30 if backend == "ZMQ" else 120
    for pushes in ("'trainer1': 30", f"'trainer2': {killed_after}", "'trainer3': 120"):
        assert pushes in done.stdout
