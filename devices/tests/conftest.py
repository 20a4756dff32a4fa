"""Fixtures of the tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from simulated_devices.testing import Jobs, Zygote

sys.path.insert(0, str(Path(__file__).parent))  # runtime.py


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """The process that forks all ranks of the session."""
    process = Zygote(gpus=4, memory="2GiB")
    yield process
    process.close()


@pytest.fixture
def jobs(zygote: Zygote, tmp_path: Path) -> Iterator[Jobs]:
    """Starts the jobs of a test."""
    with Jobs(zygote, tmp_path) as started:
        yield started
