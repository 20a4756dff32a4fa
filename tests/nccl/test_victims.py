"""What is done to the ranks of a hung job makes no culprit of a rank that waits."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from recorded_jobs import RecordedJob, RecordedJobs

# Rank 1 does not come to the fifth call. Rank 0 waits for it on its device, and its host below.
HANG = """
init(); x = torch.ones(64, device="cuda")
for _ in range(4): dist.all_reduce(x)
torch.cuda.synchronize()
if rank == 0: dist.all_reduce(x)
say("hangs"); wait_told("end"); os._exit(0)
"""
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


def test_a_rank_whose_stacks_are_read_is_not_stopped(jobs: RecordedJobs, capture: str) -> None:
    """A tracer holds the waiting rank from before the threshold until the verdict.

    The watcher and a diagnosis name rank 1 all the same, and no rank is said to be stopped.
    """
    watch = "from rankcall import watch\nwatch.start(hang_after=3)\n"
    job = jobs.start(2, watch + HANG, RANKCALL_CAPTURE=capture)
    for rank in (0, 1):
        job.job.wait_for("hangs", rank)
    # A process that is held notes no more ends, and the end of a call may be noted a moment late.
    job.wait_for(lambda rows: rows.filter(status="completed").height >= 8)
    pid = job.job.ranks[0].pid
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
        while not (verdicts := list(job.run_dir.glob("hangs/*/verdict.json"))):
            assert time.monotonic() < job.job.deadline, job.job.report()
            time.sleep(0.05)
        assert causes(job) == [("missing", [1])]
        assert _letter(pid) == "t"
    finally:
        tracer.communicate(timeout=60)
    said = [json.loads(path.read_text())["findings"] for path in verdicts]
    assert [(one["kind"], one["ranks"]) for found in said for one in found] == [("missing", [1])]
    job.tell("end")
    job.job.succeed()
    assert "stopped" not in job.job.report()


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
    program = interruptible + textwrap.indent(HANG.strip(), "    ") + "\n" + told
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
