"""Fixtures of tests with several processes."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Any]:
    """Return a function that mounts a tmpfs with options; skip the test if that is not allowed."""
    mounts: list[Path] = []

    def mount(options: str) -> Path:
        place = tmp_path / f"mount-{len(mounts)}"
        place.mkdir()
        command = shutil.which("mount")
        done = command and subprocess.run(
            [command, "-t", "tmpfs", "-o", options, "tmpfs", str(place)],
            capture_output=True,
            check=False,
        )
        if not done or done.returncode:
            pytest.skip("a tmpfs cannot be mounted here")
        mounts.append(place)
        return place

    yield mount
    for place in mounts:
        subprocess.run(["umount", "-l", str(place)], check=True)
