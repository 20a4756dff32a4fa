"""Recording of a job on devices, tested on the simulated accelerator.

Each program of device_programs.py runs with recording off, native and in Python, on both kinds of
back end; the runs are compared. Nothing here has run on a GPU: ``make gpu`` is for that.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # each process runs for half a minute

HERE = Path(__file__).parent
BACKENDS = ("own", "caller")
CAPTURES = ("native", "python")
# A program's observations of the device: recording must not change any of them.
CHARGES = ("calls", "by other threads", "contexts", "dependencies", "stuck", "invalidated by")
CHARGED_PROGRAMS = (
    "stuck_collective",
    "synchronous",
    "captured",
    "coalesced_collectives",
    "batched_messages",
    "second_device",
    "failing_events",
    "no_status",
)

Seen = dict[str, Any]
_seen: dict[tuple[str, str], dict[str, Seen] | str] = {}  # a text if the programs did not run

every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_capture = pytest.mark.parametrize("capture", CAPTURES)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Compile before the first program's time-out begins."""
    import accelerator

    from rankcall.capture.native import RECORDER

    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler here")
    accelerator.MODULE.prebuild()
    RECORDER.prebuild()


def start(script: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start one of the scripts beside this file."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", str(HERE / script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finish(process: subprocess.Popen[str], seconds: float = 60.0) -> str:
    """Wait until a script ends well, and return what it printed."""
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
        process.wait(30)
    assert process.returncode == 0, out + err
    return out


@pytest.fixture(scope="module")
def run_programs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that runs all programs once for a back end and a way to record."""

    def run(backend: str, recording: str, program: str) -> Seen:
        key = backend, recording
        if key not in _seen:
            folder = tmp_path_factory.mktemp(f"{backend}-{recording}")
            process = start(
                "device_programs.py",
                backend,
                recording,
                str(folder / "run"),
                env={**os.environ, "RANKCALL_SHM": str(folder)},  # its ring stays there
            )
            try:
                _seen[key] = json.loads(finish(process, 300))
            except (AssertionError, subprocess.TimeoutExpired) as error:
                _seen[key] = str(error)
        programs = _seen[key]
        assert isinstance(programs, dict), programs
        seen = programs[program]
        assert "error" not in seen, seen["error"]
        return seen

    return run


def states(records: list[Seen]) -> list[str]:
    """Return how each record ended."""
    return ["abandoned" if record["abandoned"] else record["status"] for record in records]


@every_backend
@every_capture
@pytest.mark.parametrize("program", CHARGED_PROGRAMS)
def test_the_device_cannot_tell(
    program: str, backend: str, capture: str, run_programs: Any
) -> None:
    """Streams wait for the same streams, and events, devices and memory are used the same."""
    off, on = (run_programs(backend, how, program) for how in ("off", capture))
    assert {name: on[name] for name in CHARGES if name in on} == {
        name: off[name] for name in CHARGES if name in off
    }
    assert on["by other threads"] == {}


@every_backend
@every_capture
def test_a_hang_leaves_in_flight_what_is_behind_it(
    backend: str, capture: str, run_programs: Any
) -> None:
    """All 32 ops behind a stuck collective are in flight, and no op of another group is."""
    seen = run_programs(backend, capture, "stuck_collective")
    assert seen["hung"] == [["all_reduce", number] for number in range(2, 34)]
    assert seen["well"] == []


@every_backend
@every_capture
def test_ends_come_from_the_watchdog(backend: str, capture: str, run_programs: Any) -> None:
    """An op is in flight until the back end says otherwise; no start or duration is made up."""
    seen = run_programs(backend, capture, "ends")
    issued = [["all_reduce", number] for number in (2, 3, 4)]
    assert seen["before"] == issued
    assert seen["unseen"] == issued
    assert seen["partly"] == issued[2:]
    assert seen["after"] == []
    assert states(seen["records"]) == ["completed"] * 4
    for record in seen["records"]:
        assert record["completed_ns"] > record["enqueued_ns"]
        assert record["started_ns"] is None
        assert record["device_ms"] is None


@every_backend
@every_capture
def test_synchronous_ops_are_followed(backend: str, capture: str, run_programs: Any) -> None:
    """An op without a Work, like NCCL's synchronous ones, is in flight until it has completed."""
    seen = run_programs(backend, capture, "synchronous")
    assert seen["before"] == [["all_reduce", number] for number in (2, 3, 4)]
    assert seen["after"] == []
    assert states(seen["records"]) == ["completed"] * 4


@every_backend
@every_capture
def test_a_capture_is_left_alone(backend: str, capture: str, run_programs: Any) -> None:
    """A capture stays valid; its ops are closed without an end; earlier ops end as usual."""
    seen = run_programs(backend, capture, "captured")
    assert seen["invalidated by"] == 0
    assert seen["replayed"] == 2
    assert seen["after"] == []
    assert states(seen["records"]) == ["completed"] * 4 + ["abandoned"] * 2
    assert all(record["completed_ns"] is None for record in seen["records"][4:])


@every_backend
@every_capture
@pytest.mark.parametrize("program", ["coalesced_collectives", "batched_messages"])
def test_coalesced_ops_do_not_end_early(
    program: str, backend: str, capture: str, run_programs: Any
) -> None:
    """Ops of one launch have no end until the launch has one; then none is in flight."""
    seen = run_programs(backend, capture, program)
    assert len(seen["records"]) == 2
    assert seen["before"] == []
    assert seen["after"] == []
    assert set(states(seen["records"])) <= {"completed", "abandoned"}


@every_backend
@every_capture
def test_messages_end(backend: str, capture: str, run_programs: Any) -> None:
    """Sends are followed like collectives."""
    seen = run_programs(backend, capture, "messages")
    assert seen["before"] == [["send", number] for number in (1, 2, 3)]
    assert seen["after"] == []
    assert states(seen["records"]) == ["completed"] * 3


@every_backend
@every_capture
def test_a_message_s_number_is_not_a_collective_s(
    backend: str, capture: str, run_programs: Any
) -> None:
    """The end of a send does not end a hung collective with the same number."""
    seen = run_programs(backend, capture, "message_beside_a_hang")
    assert seen["completed"] == 1
    collective, _ = seen["records"]
    assert collective["op"] == "all_reduce"
    assert collective["status"] == "enqueued"
    assert collective["completed_ns"] is None


@every_backend
@every_capture
@pytest.mark.parametrize("program", ["both_kinds", "both_kinds_between_looks"])
def test_a_healthy_group_with_both_kinds_does_not_look_hung(
    program: str, backend: str, capture: str, run_programs: Any
) -> None:
    """A completed op does not stay in flight, though both kinds' numbers share one field."""
    seen = run_programs(backend, capture, program)
    assert seen["after"] == []
    assert set(states(seen["records"])) <= {"completed", "abandoned"}


@every_backend
@every_capture
def test_a_rank_stays_on_its_device(backend: str, capture: str, run_programs: Any) -> None:
    """A rank on device 1 makes no context on device 0, and its ops are followed."""
    seen = run_programs(backend, capture, "second_device")
    assert seen["contexts"] == [1]
    assert len(seen["before"]) == 3
    assert seen["after"] == []


@every_backend
@every_capture
def test_only_threads_that_issue_touch_the_device(
    backend: str, capture: str, run_programs: Any
) -> None:
    """None of rankcall's threads calls the device, and each thread's ops are followed."""
    seen = run_programs(backend, capture, "several_threads")
    assert seen["foreign"] == []
    assert seen["in flight"] == [8, 8]
    assert seen["after"] == [[], []]


@every_backend
@every_capture
def test_a_device_error_hides_no_op(backend: str, capture: str, run_programs: Any) -> None:
    """Ops are in flight on a device that can no longer make events."""
    seen = run_programs(backend, capture, "failing_events")
    assert len(seen["in flight"]) == 3


@every_backend
@every_capture
@pytest.mark.parametrize("program", ["no_status", "another_back_end"])
def test_what_cannot_be_known_is_not_claimed(
    program: str, backend: str, capture: str, run_programs: Any
) -> None:
    """Ops of a back end without a status are neither in flight nor completed."""
    seen = run_programs(backend, capture, program)
    assert seen["after"] == []
    assert set(states(seen["records"])) == {"abandoned"}
    assert all(record["completed_ns"] is None for record in seen["records"])


@every_backend
@every_capture
def test_many_ops_in_flight_cost_nothing(backend: str, capture: str, run_programs: Any) -> None:
    """3,000 outstanding ops are not polled one by one; the limit is ten times the usual."""
    seen = run_programs(backend, capture, "many_in_flight")
    assert seen["queries"] == 0
    assert seen["in flight"] == 3000
    assert seen["after"] == 0
    assert seen["CPU, ms a second"] < 50


@every_backend
@pytest.mark.parametrize("recording", ["off", *CAPTURES])
@pytest.mark.parametrize("how", ["exit", "disable"])
def test_a_hung_device_holds_up_no_exit(
    how: str, recording: str, backend: str, tmp_path: Path
) -> None:
    """``disable()`` and the end of the interpreter take 2 s at most, with status 0."""
    out = finish(start("device_ending.py", how, backend, recording, str(tmp_path / "run")))
    ended = time.monotonic()
    *taken, last = out.splitlines()
    assert all(float(seconds) < 2 for seconds in taken)
    assert last.startswith("end ")
    # An interpreter with torch takes half a second to end on a busy machine.
    assert ended - float(last.split()[1]) < 2 + 3


@every_backend
@every_capture
@pytest.mark.parametrize("kind", ["async", "sync"])
def test_diagnose_names_the_rank_that_did_not_issue(
    kind: str, capture: str, backend: str, tmp_path: Path
) -> None:
    """Rank 0 hangs in an op that rank 1 has not issued: the verdict is about rank 1.

    The ops before it were issued in the same second and have completed. They must not count as in
    flight, or the verdict is about the wrong op.
    """
    run_dir = str(tmp_path / "run")
    ranks = [
        start(
            "device_ending.py",
            kind,
            backend,
            capture,
            run_dir,
            str(rank),
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"},
        )
        for rank in (0, 1)
    ]
    try:
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "here\n"
        findings = judged(run_dir)
    finally:
        for process in ranks:
            assert process.stdin is not None
            process.stdin.write("\n")
            finish(process)
    assert [finding["kind"] for finding in findings] == ["missing"], findings
    assert findings[0]["ranks"] == [1], findings


def judged(run_dir: str) -> list[Seen]:
    """Return the findings of ``rankcall diagnose`` as soon as there are any."""
    deadline = time.monotonic() + 60
    while True:
        done = subprocess.run(
            [sys.executable, "-m", "rankcall", "diagnose", run_dir, "--json", "--hang-after", "1"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stdout, done.stderr
        findings: list[Seen] = json.loads(done.stdout)["findings"]
        if findings or time.monotonic() > deadline:
            return findings
