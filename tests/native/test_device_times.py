"""How long ops take on a device (RANKCALL_DEVICE_TIMES=1), on the simulated accelerator."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
PROGRAMS = (
    "one_after_the_other",
    "all_at_once",
    "not_waited_for",
    "hung",
    "captured",
    "failing",
    "many",
)
OP_MS = 5.0

Seen = dict[str, Any]


@pytest.fixture(scope="module", params=["own", "caller"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Return what the programs saw, on one of the back ends."""
    import accelerator

    from rankcall.capture.native import RECORDER

    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler here")
    accelerator.MODULE.prebuild()
    RECORDER.prebuild()
    folder = tmp_path_factory.mktemp("times")
    (folder / "shm").mkdir()
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            str(HERE / "device_times.py"),
            request.param,
            str(folder / "run"),
        ],
        env={**os.environ, "RANKCALL_SHM": str(folder / "shm")},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    observed: Seen = json.loads(done.stdout)
    return observed


def test_each_op_is_timed(seen: Seen) -> None:
    """The events around an op, and the caller's wait, give the time that the device took."""
    assert seen["one_after_the_other"]["times"] == pytest.approx([OP_MS] * 4)


def test_ops_behind_one_another_are_timed_one_by_one(seen: Seen) -> None:
    """An op's time begins when the one before it has ended, not when it was enqueued."""
    assert seen["all_at_once"]["times"] == pytest.approx([OP_MS] * 10)


def test_an_op_that_is_not_waited_for_has_no_time(seen: Seen) -> None:
    """No event follows it on the caller's stream."""
    assert seen["not_waited_for"]["times"] == [None]


def test_a_hung_op_has_no_time_and_is_in_flight(seen: Seen) -> None:
    """Device times do not close a record: the back end's status does."""
    assert seen["hung"]["times"] == [pytest.approx(OP_MS), None, None, None]
    assert seen["hung"]["in flight"] == 4  # the last one is the op that made rankcall poll


def test_a_capture_is_left_alone(seen: Seen) -> None:
    """The issuing thread touches no event while it captures."""
    assert seen["captured"]["invalidated by"] == 0
    assert seen["captured"]["times"] == [pytest.approx(OP_MS), None]


def test_events_that_fail_cost_times_only(seen: Seen) -> None:
    """An op whose events fail is still followed, and the next one is timed again."""
    assert seen["failing"]["times"] == [None, None, None, pytest.approx(OP_MS)]
    assert seen["failing"]["in flight"] == 3


def test_outstanding_ops_are_not_all_queried(seen: Seen) -> None:
    """There is one query for each stream and op, however many are outstanding."""
    assert seen["many"]["queries"] <= 200


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_rules_hold(seen: Seen, program: str) -> None:
    """No other thread touches the device, no stream of the pool is used, nothing is waited for."""
    assert seen[program]["others"] == {}
    assert seen[program]["shared"] == {}
    assert seen[program]["synchronised"] == 0
