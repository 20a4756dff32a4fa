"""Is this node well enough to take part? Asked before each attempt, if ``--health-check`` is given.

The user's own command comes first: only the user knows the devices and the network. Each check has
a deadline, because a node that is not well often does not answer at all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rankcall.background import BackgroundCall
from rankcall.run.paths import live_base

COMMAND_S = 60.0  # a device's own diagnosis takes some seconds, and a transfer between nodes, too
_LOOK_S = 5.0  # for the file system of the run, which may be on a network
_END_S = 5.0  # after SIGKILL; a process in uninterruptible sleep is left behind
# A rank needs a few MiB of shared memory for its records, and the run some for verdicts and stacks.
# Most jobs need far more, but rankcall does not know of that.
_LEAST_BYTES = 16 << 20
_MOST_OUTPUT = 4096  # bytes of the command's output, of which the last line is quoted
_MOST_LINE = 200  # characters


def why_not_well(command: str, run_dir: Path, seconds: float = COMMAND_S) -> str:
    """Return why this node is not well; empty if it is.

    Args:
        command: For the shell; empty: none. Exit status 0 says that the node is well.
        run_dir: The run directory, in whose file system there must be space.
        seconds: The deadline of the command.
    """
    checks: Sequence[Callable[[], str]] = (
        lambda: _why_command(command, seconds) if command else "",
        lambda: _within(lambda: _why_full(live_base()), str(live_base())),
        lambda: _within(lambda: _why_full(run_dir), str(run_dir)),
    )
    return next(filter(None, (check() for check in checks)), "")


def _why_command(command: str, seconds: float) -> str:
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", command],
                # A check that makes process groups of its own is no rank of the job.
                env={**os.environ, "RANKCALL": "0"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # so that all that it starts can be ended
            )
        except OSError as error:
            return f"the health check cannot be started: {error.strerror}"
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"the health check has not ended after {seconds:g} s"
        finally:  # also if the launcher gets a signal, which torch raises here
            _end(process)
        if status == 0:
            return ""
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        line = _last_line(output.fileno())
        return f"the health check ended with {how}{f': {line}' if line else ''}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command and all that it has left running in its session."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)


def _last_line(fd: int) -> str:
    size = os.fstat(fd).st_size
    end = os.pread(fd, _MOST_OUTPUT, max(0, size - _MOST_OUTPUT))
    lines = [line.strip() for line in end.decode(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")[:_MOST_LINE]


def _within(look: Callable[[], str], place: str) -> str:
    call = BackgroundCall(look, "rankcall-health")
    if not call.ended(_LOOK_S):
        call.give_up()
        return f"{place} does not answer within {_LOOK_S:g} s"
    try:
        return call.outcome()
    except OSError as error:
        return f"{place} cannot be used: {error.strerror}"


def _why_full(place: Path) -> str:
    space = os.statvfs(place)
    free = space.f_bavail * space.f_frsize
    if space.f_blocks and free < _LEAST_BYTES:
        return f"{place} has {free >> 20} MiB of free space, and needs {_LEAST_BYTES >> 20} MiB"
    if space.f_files and not space.f_favail:
        return f"{place} has no free inode"
    return ""
