"""Settings for all tests, and the guard that no test leaves anything behind."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    # The same examples every time: `make test` must not fail by chance.
    "short",
    max_examples=100,
    derandomize=True,
    deadline=None,
    database=None,
)
settings.register_profile(
    "long", max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("short")

# PYTEST_*: set by pytest around each phase. The rest: set by importing torch or polars, once.
_NOT_OURS = ("PYTEST_", "TORCH", "KINETO_", "KMP_", "CUDA_", "_RJEM_")
_ENDING_S = 60.0  # for a thread to end, even one that cannot connect


def pytest_configure(config: pytest.Config) -> None:
    """Keep the tests' rings apart from those of jobs that run on this machine meanwhile."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = tempfile.mkdtemp(prefix="rankcall-tests-", dir=base)
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    # Those that are meant for the tests.
    test_options = (
        *("RANKCALL_REGEN_GOLDEN", "RANKCALL_RPC_RANDOM_SECONDS"),
        *("RANKCALL_FUZZ_SECONDS", "RANKCALL_KEEP_CORPORA"),
    )
    for name in [name for name in os.environ if name.startswith("RANKCALL_")]:
        if name not in test_options:
            del os.environ[name]
    os.environ["RANKCALL_SHM"] = folder
    # torch looks up the name of every address that it connects to. If no name server answers, each
    # look-up takes ten seconds; with this option it takes one.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Without a GPU, skip a test that needs one. Only such a test imports torch here.

    A test with a longer timeout than most gets no dump of stacks before it. Such a dump reads the
    frames of threads that run meanwhile, and has ended a fuzzer in the midst of a line.
    """
    timeout = item.get_closest_marker("timeout")
    if timeout and timeout.args[0] > float(item.config.getini("faulthandler_timeout")):
        faulthandler.cancel_dump_traceback_later()
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no GPU here")


def _native_threads() -> set[str]:
    """Return our native threads of this process, by id and name."""
    threads = set()
    for task in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            name = task.read_text().strip()
            if name.startswith("rankcall"):
                threads.add(f"{name} (native thread {task.parent.name})")
    return threads


def _live_files() -> set[str]:
    folder = Path(os.environ["RANKCALL_SHM"])
    return {str(file) for file in folder.rglob("*") if not file.is_dir()}


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(_NOT_OURS)}


def _records() -> bool:
    session = sys.modules.get("rankcall.capture.session")
    return session is not None and session.current() is not None


def _left_threads(before: set[threading.Thread], native: set[str]) -> list[str]:
    deadline = time.monotonic() + _ENDING_S
    while True:
        left = [repr(thread) for thread in set(threading.enumerate()) - before]
        left += sorted(_native_threads() - native)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def nothing_outlives_a_test() -> Iterator[None]:
    """Fail a test that leaves a thread, a live ring, a variable or a recording behind."""
    threads, native = set(threading.enumerate()), _native_threads()
    files, env, recorded = _live_files(), _environment(), _records()
    yield
    left = _left_threads(threads, native)
    left += [f"file {name}" for name in sorted(_live_files() - files)]
    after = _environment()
    changed = sorted(key for key in env.keys() | after.keys() if env.get(key) != after.get(key))
    left += [f"variable {key}={after.get(key)}" for key in changed]
    for key in changed:  # or the next tests would fail as well
        os.environ.pop(key, None)
        if key in env:
            os.environ[key] = env[key]
    if _records() != recorded:
        left.append("a recording")
    session = sys.modules.get("rankcall.capture.session")
    if left and session is not None:
        session.disable()
    assert not left, "outlived the test: " + "; ".join(left)


@pytest.fixture(autouse=True)
def figures_add_up(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check the figures of each run that real ranks record in a test."""
    is_asked_for = "tmp_path" in request.fixturenames and request.node.get_closest_marker(
        "multiproc"
    )
    folder = request.getfixturevalue("tmp_path") if is_asked_for else None
    yield
    if folder is not None:
        from figures import check_all_below

        check_all_below(folder)
