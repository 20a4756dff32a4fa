"""Is this node well enough to take part? Asked before each attempt, if ``--health-check`` is given.

===========  =======================================================================================
leftovers    no rank of an attempt before still runs
memory       there is space where rings are, in ``/dev/shm``
disk         there is space where the run is
device       each device of NVIDIA's answers (``device_check``)
network      data can be exchanged with other nodes (``links``)
clock        the time is about that of the host of the job's store (``links``)
command      the user's own command ends with 0: only the user knows what the job needs
===========  =======================================================================================

Each check has a deadline, because a node that is not well often does not answer at all. What they
find is noted in the run (``run/recoveries.py``).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rankcall.background import BackgroundCall
from rankcall.ranks import with_noun
from rankcall.recovery import device_check
from rankcall.recovery.leftovers import end_leftovers, still_running
from rankcall.run.paths import live_base
from rankcall.run.recoveries import ABSENT, FAILED, WELL, Check

COMMAND_S = 60.0  # a device's own diagnosis takes some seconds, and a transfer between nodes, too
_DEVICES_S = 60.0  # a driver that keeps no state takes seconds to begin with each device
_LOOK_S = 5.0  # for the file system of the run, which may be on a network
_END_S = 5.0  # after SIGKILL; a process in uninterruptible sleep is left behind
# A rank needs a few MiB of shared memory for its records, and the run some for verdicts and stacks.
# Most jobs need far more, but rankcall does not know of that.
_LEAST_BYTES = 16 << 20
_MOST_OUTPUT = 4096  # bytes of the command's output, of which the last line is quoted
_MOST_ANSWERS = 1 << 16  # bytes of what the devices' check prints
_MOST_LINE = 200  # characters

Found = tuple[str, str]  # the state of a node in one respect, and why


def examine(
    command: str, run_dir: Path, host: str, agent_file: Path, seconds: float = COMMAND_S
) -> list[Check]:
    """Return what the checks find that need no other node.

    Args:
        command: The user's, for the shell. Exit status 0 says that the node is well.
        run_dir: The run directory, in whose file system there must be space.
        host: The name of this host in the run.
        agent_file: The file that the agent has its workers read.
        seconds: The deadline of the command.
    """
    checks: Sequence[tuple[str, Callable[[], Found]]] = (
        ("leftovers", lambda: _leftovers(run_dir, host, agent_file)),
        ("memory", lambda: _space(live_base())),
        ("disk", lambda: _space(run_dir)),
        ("device", lambda: _devices(_DEVICES_S)),
        ("command", lambda: _command(command, seconds)),
    )
    return [_timed(name, look) for name, look in checks]


def _timed(name: str, look: Callable[[], Found]) -> Check:
    began = time.monotonic()
    try:
        state, text = look()
    except OSError as error:  # for example, there is no place for a temporary file
        state, text = ABSENT, f"this cannot be checked: {error.strerror}"
    return Check(name, state, text, time.monotonic() - began)


def _leftovers(run_dir: Path, host: str, agent_file: Path) -> Found:
    end_leftovers(run_dir, host, agent_file)
    left = still_running(run_dir, host, agent_file)
    if not left:
        return WELL, ""
    ranks, pids = zip(*left, strict=True)
    named = ", ".join(map(str, pids[:3]))
    return FAILED, f"{with_noun(ranks)} of the attempt before cannot be ended (pid {named})"


def _command(command: str, seconds: float) -> Found:
    status, output = _run(["/bin/sh", "-c", command], seconds)
    if isinstance(status, str):
        return FAILED, f"the health check {status}"
    if status == 0:
        return WELL, ""
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    line = _last_line(output)
    return FAILED, f"the health check ended with {how}{f': {line}' if line else ''}"


def _devices(seconds: float) -> Found:
    """Ask the devices in a process of its own, which is killed if one of them does not answer."""
    status, output = _run([sys.executable, "-I", str(device_check.__file__)], seconds)
    names: dict[int, dict[str, str]] = {}
    for line in output.decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            answer = json.loads(line)
            text = str(answer.get("text", ""))[:_MOST_LINE]
            if "device" not in answer:  # it says something of the node
                return (FAILED if answer["state"] == "failed" else ABSENT), text
            names[int(answer["device"])] = {"state": str(answer["state"]), "text": text}
    for number, answer in names.items():
        if answer["state"] == "failed":
            return FAILED, f"device {number}: {answer['text']}"
    if isinstance(status, str):
        begun = [number for number, answer in names.items() if answer["state"] == "begun"]
        what = f"device {begun[-1]}" if begun else "the driver of the devices"
        return FAILED, f"{what}: the check {status}"
    if status != 0:
        return ABSENT, f"the check of the devices ended with {status}: {_last_line(output)}"
    return WELL, f"{len(names)} answered"


def _run(command: Sequence[str], seconds: float) -> tuple[int | str, bytes]:
    """Run a command; return its exit status, or in words that it has none, and its output's end."""
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                command,
                # A check that makes process groups of its own is no rank of the job.
                env={**os.environ, "RANKCALL": "0"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # so that all that it starts can be ended
            )
        except OSError as error:
            return f"cannot be started: {error.strerror}", b""
        status: int | str
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = f"has not ended after {seconds:g} s"
        finally:  # also if the launcher gets a signal, which torch raises here
            _end(process)
        size = os.fstat(output.fileno()).st_size
        return status, os.pread(output.fileno(), _MOST_ANSWERS, max(0, size - _MOST_ANSWERS))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command and all that it has left running in its session."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)


def _last_line(output: bytes) -> str:
    end = output[-_MOST_OUTPUT:].decode(errors="replace")
    lines = [line.strip() for line in end.splitlines()]
    return next((line for line in reversed(lines) if line), "")[:_MOST_LINE]


def _space(place: Path) -> Found:
    call = BackgroundCall(lambda: _why_full(place), "rankcall-health")
    if not call.ended(_LOOK_S):
        call.give_up()
        return FAILED, f"{place} does not answer within {_LOOK_S:g} s"
    try:
        why = call.outcome()
    except OSError as error:
        return FAILED, f"{place} cannot be used: {error.strerror}"
    return (FAILED, why) if why else (WELL, "")


def _why_full(place: Path) -> str:
    space = os.statvfs(place)
    free = space.f_bavail * space.f_frsize
    if space.f_blocks and free < _LEAST_BYTES:
        return f"{place} has {free >> 20} MiB of free space, and needs {_LEAST_BYTES >> 20} MiB"
    if space.f_files and not space.f_favail:
        return f"{place} has no free inode"
    return ""
