"""Run a program in this process, which is one rank of a job, and write down the observations."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import resource
import signal
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from samejob import programs
from samejob.job import Job, normalised
from samejob.modes import Mode, memory_kib, mode_named

# A simulated device has a thread for a stream once an operation there had to wait for another one.
# Whether one had to is a matter of the moment; hardware has no such thread.
_OF_STREAMS = "sim-stream-"
# The threads of rankcall itself while it records. The comparison leaves out these threads, the
# rings and what simulated devices make, and nothing else. A ring stays open after disable() until
# the ops in flight have ended.
OUR_THREADS = frozenset({"rankcall", "rankcall-heart", "rankcall-leave", "rankcall-lines"})
_PR_SET_PDEATHSIG = 1


def be_rank(order: dict[str, Any], rank: int) -> None:
    """Run the program of an order as one of its ranks. Ends as the program ends.

    ``order`` holds ``program``, ``mode``, ``world_size``, ``device``, ``folder``, ``shm``,
    ``port``, ``patience``, the seconds that threads and objects may take to go away, and ``usual``,
    the threads, descriptors and objects that each rank had left without recording, or None.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # do not outlive the tests
    folder = Path(order["folder"])
    _redirect(folder, rank)
    _set_environment(order, rank)
    if order["device"] != "cpu":
        _use_device(order["device"], rank)
    program = programs.PROGRAMS[order["program"]]
    mode = mode_named(order["mode"], folder / "run")
    job = Job(rank, order["world_size"], folder, order["port"], mode, order["mode"])
    observed: dict[str, Any] = {}
    before = _possessions(order)
    _reset_peak()
    try:
        _run(program, job)
        usual = order["usual"][rank] if order["usual"] else {**before, "alive": []}
        observed = _settled(job, usual, order)
    finally:
        observed["seen"] = _normalised(job.seen, folder)
        observed["recorded"] = mode.recorded()
        observed["peak_kib"] = _peak_kib(mode)
        (folder / f"report.{rank}").write_text(json.dumps(observed))


def _run(program: programs.Program, job: Job) -> None:
    if program.bare:
        program.function(job)
        return
    import torch.distributed as dist

    job.mode.start()
    job.init()
    program.function(job)
    dist.barrier()
    dist.destroy_process_group()


def _use_device(kind: str, rank: int) -> None:
    """Make the tensors of the program on a device of this rank's own."""
    import torch

    torch.cuda.set_device(rank)
    torch.set_default_device(kind)


def _redirect(folder: Path, rank: int) -> None:
    """Send output to files and standard input nowhere; dump all stacks on SIGABRT."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / f"{name}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, fd)
        os.close(file)
    stacks = open(folder / f"stacks.{rank}", "w")  # noqa: SIM115  # open as long as the process is
    faulthandler.enable(file=stacks, all_threads=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _set_environment(order: dict[str, Any], rank: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(order["world_size"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(order["port"]),
        RANKCALL_SHM=order["shm"],
        RANKCALL_CAPACITY="4096",
    )


# --- threads, descriptors and objects left after a program ---


def _settled(job: Job, usual: dict[str, Any], order: dict[str, Any]) -> dict[str, Any]:
    """Wait until no more than usual is left, or until patience ends; return the rest."""
    deadline = time.monotonic() + order["patience"]
    while True:
        gc.collect()
        left = {**_possessions(order), "alive": job.alive()}
        if _no_more(left, usual) or time.monotonic() > deadline:
            return left
        time.sleep(0.005)


def _no_more(left: dict[str, Any], usual: dict[str, Any]) -> bool:
    kinds = ("threads", "descriptors", "alive")
    return all(not Counter(left[kind]) - Counter(usual[kind]) for kind in kinds)


def _possessions(order: dict[str, Any]) -> dict[str, Any]:
    """Return the threads and descriptors of this process by name; rankcall's own apart."""
    threads = _threads()
    descriptors = [name.replace(order["folder"], "FOLDER") for name in _descriptors()]
    rings = [name for name in descriptors if name.startswith(order["shm"])]
    return {
        "threads": sorted(name for name in threads if name not in OUR_THREADS),
        "descriptors": sorted(name for name in descriptors if name not in rings),
        "our_threads": sorted(name for name in threads if name in OUR_THREADS),
    }


def _threads() -> list[str]:
    named = {thread.native_id: thread.name for thread in threading.enumerate()}
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it ended meanwhile
            comm = (task / "comm").read_text().strip()
            names.append(named.get(int(task.name), comm))
    return [name for name in names if not name.startswith(_OF_STREAMS)]


def _descriptors() -> list[str]:
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the folder's own descriptor is closed by now
            target = os.readlink(link)
            if target.startswith("socket:"):
                target = _socket(int(link.name))
            elif target.startswith("pipe:"):
                target = "pipe"
            targets.append(target)
    return targets


def _socket(fd: int) -> str:
    with socket.socket(fileno=os.dup(fd)) as copy:
        if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return "listening socket"
        return "socket"


# --- memory ---


def _reset_peak() -> None:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def _peak_kib(mode: Mode) -> int:
    """Return the most memory that this process has had since the peak was reset.

    Pages of files and of rings are left out: they are the system's to reclaim, and the recorder
    makes torch read parts of its libraries that the program alone does not.
    """
    return (
        memory_kib("VmHWM") - memory_kib("RssFile") - max(memory_kib("RssShmem"), mode.ring_kib())
    )


def _normalised(value: Any, folder: Path) -> Any:
    if isinstance(value, str):
        return normalised(value, folder)
    if isinstance(value, list):
        return [_normalised(item, folder) for item in value]
    if isinstance(value, dict):
        return {key: _normalised(item, folder) for key, item in value.items()}
    return value
