"""Notice that this rank stands still: it waits for the job's store, or its process uses no CPU.

A wait for a key of the store leaves no record and no frame of Python: it is a C++ function that the
user's line calls. But the kernel says in which system call a thread sleeps, and on which socket. A
process may always ask that of its own threads, so each rank writes what it sees into its ring, and
the leader of the node reads it there.
"""

from __future__ import annotations

import mmap
import os
import platform
import struct
import time
from collections.abc import Callable
from contextlib import suppress

from rankcall.process import second_handle
from rankcall.ring.writer import put

# A process that waits uses less than 1 % of a core for its threads that only look around.
_IDLE_SHARE = 0.1
_IDLE_PERIOD_S = 1.0
# The numbers of poll and ppoll, whose first argument points to the descriptors, and of recvfrom,
# recvmsg and read, whose first argument is one.
_POLLS, _READS = {
    "x86_64": ({7, 271}, {45, 47, 0}),
    "aarch64": ({73}, {207, 212, 63}),
}.get(platform.machine(), (set(), set()))


class Standstill:
    """Writes two times into a ring. Only the watcher's thread calls it.

    ``in_store_ns`` is since when the thread that trains waits for an answer of the store, and
    ``idle_ns`` since when the process has used hardly any CPU time; 0: it does not.
    """

    def __init__(self, ring: mmap.mmap, port: Callable[[], int]) -> None:
        """Begin; ``port`` returns that of the job's store, or 0."""
        self._ring, self._port = ring, port
        self._in_store_ns = self._idle_ns = 0
        self._looked_ns, self._used_s = time.monotonic_ns(), _used_s()

    def note(self, thread: int, is_silent: bool) -> None:
        """Look, and write what is seen.

        Args:
            thread: The kernel's id of the thread that trains; 0: not known.
            is_silent: Whether the rank has issued nothing since the last look.
        """
        now_ns = time.monotonic_ns()
        waits = bool(is_silent and thread and waits_for_port(thread, self._port()))
        self._in_store_ns = (self._in_store_ns or now_ns) if waits else 0
        put(self._ring, "in_store_ns", self._in_store_ns)
        elapsed_s = (now_ns - self._looked_ns) / 1e9
        if elapsed_s < _IDLE_PERIOD_S:
            return
        used_s = _used_s()
        is_idle = used_s - self._used_s < _IDLE_SHARE * elapsed_s
        self._idle_ns = (self._idle_ns or self._looked_ns) if is_idle else 0
        self._looked_ns, self._used_s = now_ns, used_s
        put(self._ring, "idle_ns", self._idle_ns)


def _used_s() -> float:
    """Return the CPU time of this process without that of this thread, which judges the job."""
    return time.process_time() - time.thread_time()


def waits_for_port(thread: int, port: int) -> bool:
    """Return whether a thread of this process sleeps until data come from a port.

    False if that is not known: the kernel or the sandbox does not tell, or the machine is of
    another kind.
    """
    if not port:
        return False
    with suppress(OSError, ValueError, IndexError, OverflowError, struct.error):
        with open(f"/proc/self/task/{thread}/syscall") as file:
            number, first = file.read().split()[:2]  # "running" has no arguments
        argument = int(first, 16)
        if int(number) in _POLLS:
            with open("/proc/self/mem", "rb", buffering=0) as memory:
                memory.seek(argument)
                (argument,) = struct.unpack("i", memory.read(4))
        elif int(number) not in _READS:
            return False
        handle = second_handle(argument, os.fstat(argument).st_ino)
        if handle is not None:
            with handle:
                return bool(handle.getpeername()[1] == port)
    return False
