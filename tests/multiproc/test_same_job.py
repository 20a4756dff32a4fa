"""A program behaves the same whether or not it is recorded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from samejob.compare import Difference, differences, memory_differences
from samejob.harness import Harness, RunReport
from samejob.modes import MODES, OFF
from samejob.programs import PROGRAMS

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]


@pytest.fixture(scope="session")
def harness() -> Iterator[Harness]:
    """Return the process that forks ranks, shared by all tests here."""
    made = Harness(Path(os.environ["RANKCALL_SHM"]))
    yield made
    made.close()
