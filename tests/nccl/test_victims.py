"""What is done to the ranks of a hung job makes no culprit of a rank that waits."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from recorded_jobs import RecordedJob, RecordedJobs

# Rank 1 does not come to the fifth call. Rank 0 waits for it on its device, and its host below.
HANG = """
init(); x = torch.ones(64, device="cuda")
for _ in range(4): dist.all_reduce(x)
torch.cuda.synchronize()
if rank == 0: dist.all_reduce(x)
say("hangs"); {wait}; os._exit(0)
"""
# The number of openat(2), by machine.
OPENAT = {"x86_64": "257", "aarch64": "56"}
# Holds a process as py-spy does while it reads the stacks, but until stdin is closed.
HOLD = """
import ctypes, os, sys
ATTACH, DETACH, ALL_THREADS = 16, 17, 0x40000000
libc = ctypes.CDLL(None, use_errno=True)
pid = int(sys.argv[1])
if libc.ptrace(ATTACH, pid, 0, 0) != 0:
    sys.exit(f"not allowed: {os.strerror(ctypes.get_errno())}")
os.waitpid(pid, ALL_THREADS)
print("held", flush=True)
sys.stdin.read()
libc.ptrace(DETACH, pid, 0, 0)
"""


def causes(job: RecordedJob) -> list[tuple[str, list[int]]]:
    """Return what diagnose finds now."""
    found = json.loads(job.command("diagnose", "--json", "--hang-after", "1").stdout)
    return [(one["kind"], one["ranks"]) for one in found["findings"]]


@contextlib.contextmanager
def held(pid: int) -> Iterator[None]:
    """Have a tracer hold a process's main thread meanwhile; skip the test if that is forbidden."""
    tracer = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert tracer.stdout
        if tracer.stdout.readline() != "held\n":
            _, error = tracer.communicate(timeout=60)
            pytest.skip(f"this machine does not let a process trace another: {error}")
        assert _letter(pid) == "t"
        yield
        assert _letter(pid) == "t"
    finally:
        tracer.communicate(timeout=60)


def start(jobs: RecordedJobs, capture: str, wait: str) -> RecordedJob:
    """Start the job with watchers, and return once all that has ended is known to have ended.

    A process that is held notes no more ends, and the end of a call may be noted a moment late.
    """
    watch = "from rankcall import watch\nwatch.start(hang_after=3)\n"
    job = jobs.start(2, watch + HANG.format(wait=wait), RANKCALL_CAPTURE=capture)
    for rank in (0, 1):
        job.job.wait_for("hangs", rank)
    job.wait_for(lambda rows: rows.filter(status="completed").height >= 8)
    return job


def verdicts_of(job: RecordedJob) -> list[list[tuple[str, list[int]]]]:
    """Wait for the watcher's verdict; return the causes of each."""
    while not (kept := list(job.run_dir.glob("hangs/*/verdict.json"))):
        assert time.monotonic() < job.job.deadline, job.job.report()
        time.sleep(0.05)
    found = [json.loads(path.read_text())["findings"] for path in kept]
    return [[(one["kind"], one["ranks"]) for one in each] for each in found]


def test_a_rank_whose_stacks_are_read_is_not_stopped(
    jobs: RecordedJobs, capture: str, tmp_path: Path
) -> None:
    """A tracer holds the waiting rank from before the threshold until the verdict.

    The watcher and a diagnosis name rank 1 all the same, and no rank is said to be stopped. Rank 0
    waits in the kernel, so that it is not held while it has the GIL.
    """
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    opens = f"open({str(gate)!r}).close() if rank == 0 else wait_told('end')"
    job = start(jobs, capture, opens)
    pid = job.job.ranks[0].pid
    try:
        while Path(f"/proc/{pid}/syscall").read_text().split()[0] != OPENAT[platform.machine()]:
            assert time.monotonic() < job.job.deadline, job.job.report()
            time.sleep(0.01)
    except PermissionError as error:
        pytest.skip(f"this machine does not let a process trace another: {error}")
    with held(pid):
        said = verdicts_of(job)
        assert causes(job) == [("missing", [1])]
    assert said == [[("missing", [1])]]
    job.tell("end")
    with open(gate, "r+b", buffering=0):  # to write alone would wait for the reader
        job.job.succeed()
    assert "stopped" not in job.job.report()


def test_a_rank_that_is_held_with_the_gil_hides_no_culprit(
    jobs: RecordedJobs, capture: str
) -> None:
    """No thread of the waiting rank runs Python, so it neither watches nor looks at its device.

    Rank 1 watches instead, and its own ring shows that it has not come. With the Python capture,
    rank 0 is a cause as well: it has no other heartbeat.
    """
    job = start(jobs, capture, "exec('while True: pass') if rank == 0 else wait_told('end')")
    with held(job.job.ranks[0].pid):
        for found in [*verdicts_of(job), causes(job)]:
            assert ("missing", [1]) in found
            assert found == [("missing", [1])] or capture == "python"


def _letter(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_hang_that_is_interrupted_keeps_its_culprit(jobs: RecordedJobs, capture: str) -> None:
    """Ctrl-C ends both programs of a hang. Rank 1 is named after it, and nobody is called dead.

    A process whose device is stuck does not get to its end: as a launcher does, the test kills it.
    """
    interruptible = "signal.signal(signal.SIGINT, signal.default_int_handler)\ntry:\n"
    # The process that forks ranks catches what ends their programs, and Python never sees it.
    told = (
        "except BaseException: sys.excepthook(*sys.exc_info()); say('over'); wait_told('never')\n"
    )
    program = HANG.strip().format(wait="wait_told('end')")
    program = interruptible + textwrap.indent(program, "    ") + "\n" + told
    job = jobs.start(2, program, RANKCALL_CAPTURE=capture)
    for rank in (0, 1):
        job.job.wait_for("hangs", rank)
    while causes(job) != [("missing", [1])]:
        assert time.monotonic() < job.job.deadline, job.job.report()
    job.job.kill(number=signal.SIGINT)
    for rank in (0, 1):
        job.job.wait_for("over", rank)
    assert causes(job) == [("missing", [1])]
    job.job.kill()
    job.job.wait()
    assert causes(job) == [("missing", [1])]
