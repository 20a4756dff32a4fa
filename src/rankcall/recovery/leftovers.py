"""End what is left of an attempt, so that two attempts never run at once.

torchrun sends SIGTERM to the process groups of its children, and SIGKILL to those whose child still
runs. If that is a shell script, the rank is a child of it: one that ignores SIGTERM, or is stopped,
outlives the script. Two attempts would then write the same checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path

from rankcall.ring.layout import Header, read_header
from rankcall.run.paths import ring_paths
from rankcall.run.recoveries import FILE_VARIABLE

# The kernel frees a rank's memory within seconds. One that it cannot end, in uninterruptible sleep,
# must not hold up the job: it can write nothing either, until what it waits for answers.
_ENDS_IN_S = 10.0
_MOST_ENVIRON = 1 << 20  # bytes


def end_leftovers(run_dir: Path, host: str, agent_file: Path) -> list[int]:
    """End the ranks that still run of those that this agent started; return their numbers.

    Only recorded ranks are ended. A program may have started other processes that are to outlive
    it, such as one that uploads a checkpoint. A process counts as this agent's by its environment,
    because two agents of one host may write the same run. Never raises.

    Args:
        run_dir: The run directory.
        host: The name of this host in the run.
        agent_file: The file that the agent has its workers read, by ``FILE_VARIABLE``.
    """
    ended: list[int] = []
    deadline = time.monotonic() + _ENDS_IN_S
    with contextlib.suppress(OSError):
        for header in filter(None, map(read_header, ring_paths(run_dir))):
            if header.host == host and not header.closed_ns and _end(header, agent_file, deadline):
                ended.append(header.rank)
    return sorted(ended)


def _end(header: Header, agent_file: Path, deadline: float) -> bool:
    """End a rank that runs and that this agent started; return whether it was one."""
    try:
        process = os.pidfd_open(header.pid)  # before all checks, so that they are about this one
    except OSError:
        return False
    try:
        if header.process_state() not in ("alive", "stopped"):
            return False
        if not _is_started_by(header.pid, agent_file):
            return False
        signal.pidfd_send_signal(process, signal.SIGKILL)
        left_ms = max(0, int((deadline - time.monotonic()) * 1e3))
        waiting = select.poll()
        waiting.register(process, select.POLLIN)
        waiting.poll(left_ms)
        return True
    except OSError:
        return False
    finally:
        os.close(process)


def _is_started_by(pid: int, agent_file: Path) -> bool:
    with open(f"/proc/{pid}/environ", "rb") as file:
        variables = file.read(_MOST_ENVIRON).split(b"\0")
    return os.fsencode(f"{FILE_VARIABLE}={agent_file}") in variables
