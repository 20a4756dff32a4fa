"""Fixtures of the tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from jobs import Jobs, Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """The process that forks all ranks of the session."""
    process = Zygote(gpus=4, memory="2GiB")
    yield process
    process.close()


def shared_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("simulated-devices-")}


@pytest.fixture
def jobs(zygote: Zygote, tmp_path: Path) -> Iterator[Jobs]:
    """Starts jobs; after the test, none of their processes and none of their shared files is left."""
    started = Jobs(zygote, tmp_path)
    before = shared_files()
    yield started
    started.close()
    left = shared_files() - before
    assert not left, f"files were left in /dev/shm: {left}"
