"""A process that has torch imported, no threads, and forks the ranks of every run.

Importing torch takes longer than most programs. The ranks fork from here before any thread exists,
and end like every other Python program: through the interpreter's own exit.

It reads orders from standard input, one JSON object a line, and answers each on standard output.
It ends with its input.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_DUMP_SECONDS = 10.0  # to dump all stacks after the deadline


def main() -> None:
    """Serve orders; returns in the forked ranks, too."""
    import torch

    from samejob import programs, rank

    programs.warm_up()
    torch.set_num_threads(1)
    _build_recorder()
    # Ranks that a run orphans come to this process, which ends them.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w")
    print(json.dumps({"ready": True}), file=answers, flush=True)
    while line := sys.stdin.readline():
        order = json.loads(line)
        threads = os.listdir("/proc/self/task")
        assert len(threads) == 1, f"a process with threads {threads} must not fork"
        pids = {}
        for number in range(order["world_size"]):
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, 0)
                answers.close()
                rank.be_rank(order, number)
                return
            with suppress(OSError):  # the child may have done it already
                os.setpgid(pid, pid)
            pids[pid] = number
        print(json.dumps(_finish(pids, order)), file=answers, flush=True)


def _build_recorder() -> None:
    """Compile the native recorder now: no rank's deadline is for a compiler."""
    from rankcall.capture.native import RECORDER

    RECORDER.prebuild()


def _finish(pids: dict[int, int], order: dict[str, Any]) -> dict[str, Any]:
    """Wait for the ranks and for the processes they started; end all of them at the deadline."""
    waiting = {os.pidfd_open(pid): pid for pid in pids}
    statuses: dict[int, int] = {}
    hung = _wait(waiting, statuses, order["deadline"])
    for pid in hung:
        os.kill(pid, signal.SIGABRT)
    for pid in _wait(waiting, statuses, _DUMP_SECONDS):
        os.kill(pid, signal.SIGKILL)
    _wait(waiting, statuses, _DUMP_SECONDS)
    return {
        "hung": sorted(pids[pid] for pid in hung),
        "statuses": [statuses[pid] for pid in pids],
        "strays": [name for pid in pids for name in _end_group(pid, order["patience"])],
    }


def _wait(waiting: dict[int, int], statuses: dict[int, int], seconds: float) -> list[int]:
    """Reap processes until all have ended or time is up; return those that run on."""
    deadline = time.monotonic() + seconds
    while waiting:
        ended, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
        if not ended:
            return list(waiting.values())
        for fd in ended:
            pid = waiting.pop(fd)
            statuses[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.close(fd)
    return []


def _end_group(leader: int, seconds: float) -> list[str]:
    """Give processes that a rank left behind a moment to end; end and return those that do not."""
    deadline = time.monotonic() + seconds
    while (members := _members(leader)) and time.monotonic() < deadline:
        _reap(leader)
        time.sleep(0.002)
    for pid in members:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while _members(leader):
        _reap(leader)
        time.sleep(0.002)
    return list(members.values())


def _reap(leader: int) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-leader, os.WNOHANG)[0]:
            pass


def _members(leader: int) -> dict[int, str]:
    """Return the processes of a process group, including ended ones that are not reaped yet."""
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return {}
    members = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, fields = stat.read_text().rpartition(")")
            if int(fields.split()[2]) == leader:
                members[int(stat.parent.name)] = name.partition("(")[2]
    return members


if __name__ == "__main__":
    main()
