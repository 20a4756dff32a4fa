"""Processes and files of this host: who they are, and whom to trust.

A process id is unique only within one pid namespace of one boot of one host. Two containers that
share a folder may use one number for different processes. So the test has three results: a process
that is not visible from here is ``UNKNOWN``, never ``DEAD``.
"""

from __future__ import annotations

import functools
import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass

ALIVE, DEAD, UNKNOWN = "alive", "dead", "unknown"


@dataclass(frozen=True)
class Process:
    """The identity of one process, unique over all hosts.

    ``pid_namespace`` is the inode number of its pid namespace, 0 if it is not known. ``start`` is
    in clock ticks since boot; it tells two processes that had the same pid apart.
    """

    boot_id: str
    pid_namespace: int
    pid: int
    start: int
    host: str = ""

    @classmethod
    def current(cls, host: str = "") -> Process:
        """Return the calling process."""
        stat = _stat("self")
        return cls(boot_id(), pid_namespace(), os.getpid(), stat[1] if stat else 0, host)

    def liveness(self) -> str:
        """Return ``ALIVE``, ``DEAD`` or ``UNKNOWN``. A zombie is dead, a stopped process alive."""
        return self._look(Viewpoint.current())[0]

    def state(self, here: Viewpoint | None = None) -> str:
        """Return what the process is doing: ``alive``, ``stopped``, ``gone`` or ``unknown``.

        ``stopped`` means that a signal has stopped it. A process that a tracer holds (state ``t``
        in proc(5)) is alive: py-spy holds each rank for a moment while it reads the stacks. If a
        debugger holds one for long, its heartbeat shows that. A caller that asks for the states
        of many processes saves time with ``here``.
        """
        liveness, letter = self._look(here or Viewpoint.current())
        if liveness == ALIVE and letter == b"T":
            return "stopped"
        return {ALIVE: "alive", DEAD: "gone"}.get(liveness, "unknown")

    def _look(self, here: Viewpoint) -> tuple[str, bytes]:
        """Return the liveness and, if it is alive, the state letter of proc(5)'s stat."""
        if not self.boot_id or self.boot_id != here.boot_id or self.pid <= 0:
            return UNKNOWN, b""
        if self.pid_namespace not in (0, here.pid_namespace) or not here.proc_is_ours:
            return UNKNOWN, b""
        stat = _stat(str(self.pid))
        if stat is not None and stat[1] == self.start and stat[0] not in (b"Z", b"X"):
            return ALIVE, stat[0]
        if self.pid_namespace == 0:
            return UNKNOWN, b""  # the number may belong to another namespace
        if stat is None and _is_hidden(self.pid):
            return UNKNOWN, b""
        return DEAD, b""


@dataclass(frozen=True)
class Viewpoint:
    """The point from which this process sees others: its boot, its pid namespace and its /proc."""

    boot_id: str
    pid_namespace: int
    proc_is_ours: bool

    @classmethod
    def current(cls) -> Viewpoint:
        """Return the calling process's. It holds until the process changes its namespaces."""
        return cls(boot_id(), pid_namespace(), _proc_is_ours())


def process_start(pid: int) -> int | None:
    """Return when a process of this namespace started, in clock ticks since boot.

    None if it is gone. A zombie counts as gone.
    """
    stat = _stat(str(pid))
    return None if stat is None or stat[0] in (b"Z", b"X") else stat[1]


def has_tracer(pid: int) -> bool:
    """Return whether a debugger, strace or py-spy is attached to a process of this namespace."""
    try:
        with open(f"/proc/{pid}/status") as file:
            return any(line.startswith("TracerPid:") and int(line.split()[1]) for line in file)
    except (OSError, ValueError):
        return False


def boot_seconds() -> int:
    """Return when this host booted, in s since the epoch (0 if the kernel does not say)."""
    try:
        with open("/proc/stat") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("btime ")), 0)
    except OSError:
        return 0


def host_name() -> str:
    """Return the name of this host in a run: ``RANKCALL_HOST``, or else its host name."""
    return os.environ.get("RANKCALL_HOST") or socket.gethostname()


@functools.lru_cache(maxsize=1)
def boot_id() -> str:
    """Return the id of this boot of this host (empty if the kernel does not say)."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def pid_namespace() -> int:
    """Return the inode number of this process's pid namespace (0 if the kernel does not say)."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def open_sockets() -> dict[int, int]:
    """Return this process's sockets, as inode -> file descriptor; empty without /proc."""
    sockets = {}
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed since
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    sockets[status.st_ino] = int(name)
    return sockets


def second_handle(descriptor: int, inode: int) -> socket.socket | None:
    """Return a second handle on a socket; None if its descriptor belongs to something else now."""
    duplicate = -1
    with suppress(OSError):
        duplicate = os.dup(descriptor)
        status = os.fstat(duplicate)
        if stat.S_ISSOCK(status.st_mode) and status.st_ino == inode:
            return socket.socket(fileno=duplicate)
    if duplicate >= 0:
        os.close(duplicate)
    return None


def _proc_is_ours() -> bool:
    """Return whether /proc lists the processes of our namespace: a container may mount another."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def _stat(name: str) -> tuple[bytes, int] | None:
    """Return the state letter and the start time (fields 3 and 22 of proc(5)'s stat)."""
    try:
        file = os.open(f"/proc/{name}/stat", os.O_RDONLY)  # faster than open()
        try:
            fields = os.read(file, 4096).rpartition(b")")[2].split()
        finally:
            os.close(file)
        return fields[0], int(fields[19])
    except (OSError, IndexError):
        return None


def _is_hidden(pid: int) -> bool:
    """Return whether a pid that /proc does not list exists: /proc may hide other users' (hidepid).

    Signal 0 is never delivered; the kernel only says whether it could be.
    """
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True
