"""End what is left of an attempt, so that two attempts never run at once.

torchrun sends SIGTERM to the process groups of its children, and SIGKILL to those whose child still
runs. If that is a shell script, the rank is a child of it: one that ignores SIGTERM, or is stopped,
outlives the script. The same is left if the agent itself is killed, because the kernel ends only
the agent's own children with it (``_rankcall_hook``). Two attempts would then write the same
checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from rankcall.ring.layout import Header, read_header
from rankcall.run.paths import ring_paths
from rankcall.run.recoveries import FILE_VARIABLE, agent_of

# The kernel frees a rank's memory within seconds. One that it cannot end, in uninterruptible sleep,
# must not hold up the job: it can write nothing either, until what it waits for answers.
_ENDS_IN_S = 10.0
_MOST_ENVIRON = 1 << 20  # bytes


def end_leftovers(run_dir: Path, host: str, agent_file: Path) -> list[int]:
    """End the ranks that still run of this agent and of agents that are gone; return their numbers.

    Only recorded ranks are ended. A program may have started other processes that are to outlive
    it, such as one that uploads a checkpoint. Two agents of one host may write the same run, so the
    environment of a process says whose it is. Never raises.

    Args:
        run_dir: The run directory.
        host: The name of this host in the run.
        agent_file: The file that the agent has its workers read, by ``FILE_VARIABLE``.
    """
    ended: list[int] = []
    deadline = time.monotonic() + _ENDS_IN_S
    for header, process in _leftovers(run_dir, host, agent_file):
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
            left_ms = max(0, int((deadline - time.monotonic()) * 1e3))
            waiting = select.poll()
            waiting.register(process, select.POLLIN)
            waiting.poll(left_ms)
            ended.append(header.rank)
    return sorted(ended)


def still_running(run_dir: Path, host: str, agent_file: Path) -> list[tuple[int, int]]:
    """Return the ranks that run although they were ended, with their pids. Never raises."""
    return sorted((header.rank, header.pid) for header, _ in _leftovers(run_dir, host, agent_file))


def _leftovers(run_dir: Path, host: str, agent_file: Path) -> Iterator[tuple[Header, int]]:
    """Yield the ranks that run and are not another running agent's, each with its pidfd."""
    with contextlib.suppress(OSError):
        for header in filter(None, map(read_header, ring_paths(run_dir))):
            if header.host != host or header.closed_ns:
                continue
            try:
                process = os.pidfd_open(header.pid)  # before all checks, which are about this one
            except OSError:
                continue
            try:
                if _is_left(header, agent_file):
                    yield header, process
            finally:
                os.close(process)


def _is_left(header: Header, agent_file: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        if header.process_state() in ("alive", "stopped"):
            started_by = _agent_file_of(header.pid)
            return started_by == agent_file or _is_of_gone_agent(started_by, agent_file)
    return False


def _agent_file_of(pid: int) -> Path | None:
    """Return the file of the agent that started a process, by the process's environment."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        variables = file.read(_MOST_ENVIRON).split(b"\0")
    begin = os.fsencode(f"{FILE_VARIABLE}=")
    names = [entry.removeprefix(begin) for entry in variables if entry.startswith(begin)]
    return Path(os.fsdecode(names[0])) if names else None


def _is_of_gone_agent(started_by: Path | None, agent_file: Path) -> bool:
    """Return whether a file is that of an agent of this host and run which does not run any more.

    The number of an agent that is gone may be another process's by now. Its ranks are then left.
    """
    if started_by is None or started_by.parent != agent_file.parent:
        return False
    host, own = agent_of(agent_file)
    other_host, other = agent_of(started_by)
    return host == other_host and other != own and not os.path.exists(f"/proc/{other}")
