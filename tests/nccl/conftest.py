"""Fixtures of the tests on simulated devices. ``make test-nccl`` has what they need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from recorded_jobs import RecordedJobs
    from simulated_devices.testing import Zygote

_HAS_ALL = "`make test-nccl` has all that these tests need"


@pytest.fixture(scope="session")
def devices() -> None:
    """Without a CUDA build of torch, or without simulated devices for it, skip."""
    try:
        from simulated_devices import DevicesError, environment
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed: {_HAS_ALL}")
    try:
        environment()
    except DevicesError as error:
        pytest.skip(f"{error} {_HAS_ALL}")


@pytest.fixture(scope="session")
def zygote(devices: None) -> Iterator[Zygote]:
    """The process that forks all ranks of the session."""
    from recorded_jobs import start_zygote

    process = start_zygote()
    yield process
    process.close()


@pytest.fixture
def jobs(zygote: Zygote, tmp_path: Path) -> Iterator[RecordedJobs]:
    """Starts jobs whose ranks are recorded."""
    from recorded_jobs import PRELUDE, RecordedJobs
    from simulated_devices.testing import Jobs

    with Jobs(zygote, tmp_path, PRELUDE) as started:
        recorded = RecordedJobs(started, tmp_path)
        yield recorded
    recorded.remove_rings()


@pytest.fixture(scope="session")
def counting_zygote(devices: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """The process that forks all ranks whose calls of CUDA are counted."""
    from cuda_calls import can_count, compile_counter
    from recorded_jobs import start_zygote

    if not can_count():
        pytest.skip("the counter of CUDA's calls needs x86-64 and a C compiler")
    counter = compile_counter(tmp_path_factory.mktemp("counter"))
    process = start_zygote(LD_PRELOAD=str(counter))
    yield process
    process.close()


@pytest.fixture
def counted_jobs(counting_zygote: Zygote, tmp_path: Path) -> Iterator[RecordedJobs]:
    """Starts jobs whose ranks are recorded, and whose calls of CUDA are counted."""
    from cuda_calls import PRELUDE as COUNTING
    from recorded_jobs import PRELUDE, RecordedJobs
    from simulated_devices.testing import Jobs

    with Jobs(counting_zygote, tmp_path, COUNTING + PRELUDE) as started:
        recorded = RecordedJobs(started, tmp_path)
        yield recorded
    recorded.remove_rings()


@pytest.fixture(params=["native", "python"])
def capture(request: pytest.FixtureRequest) -> str:
    """The capture that the ranks record with: pass it as ``RANKCALL_CAPTURE``."""
    name: str = request.param
    return name
