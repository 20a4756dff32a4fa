"""Measure this process while it trains: what its training thread waited for, and its collections.

A verdict says why a rank came late from these counters, so they are written before anybody asks.
The heartbeat's thread reads some small files of /proc and of the cgroup. A file that the system
does not have, or does not let us read, is a counter that is not known. The files are opened anew
each time: one that stayed open would be left to every process that the program forks.

Collections are counted where they happen, by ``gc.callbacks``. A full collection is written into
the ring's header when it begins, because no other Python thread runs until it ends.
"""

from __future__ import annotations

import gc
import mmap
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from rankcall.capture import named_phases
from rankcall.capture.cgroup import limited_cgroup, own_cgroup
from rankcall.capture.moments import Look, Moments, ThreadTimes
from rankcall.capture.run_queue import RunQueue, Switches
from rankcall.ring.layout import Geometry
from rankcall.ring.samples import SampleWriter
from rankcall.ring.writer import put, put_text

_FULL = 2  # the oldest generation: a collection of it visits every object
_MOST_BYTES = 4096  # of a file; all of these are shorter
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_DISK_WAIT_TICKS = 39  # in a thread's stat, counted from 0 behind the name in parentheses
_COUNTS_DELAYS = "/proc/sys/kernel/task_delayacct"  # "0": the kernel does not, since version 5.14

Parse = Callable[[bytes], dict[str, int]]


class Sampler:
    """Writes samples into a ring when its caller says so; counts collections as they happen."""

    def __init__(self, ring: mmap.mmap, geometry: Geometry, look: Callable[[int], Look]) -> None:
        """Begin with nothing counted; ``look`` is that of the capture."""
        self._ring = ring
        self._writer = SampleWriter(ring, geometry)
        self._times: dict[int, ThreadTimes] = {}  # by thread: read at the newest look
        # No method of ours: a cycle would keep the ring mapped after the recording's end.
        self._moments = Moments(look, partial(_note_times, self._times))
        self._has_disk_waits = False
        self._run_queue = RunQueue(_switches_of)
        self._gc_ns = self._full_gc_ns = self._gc_began_ns = self._gc_ended_ns = 0
        self._names = ""
        self._of_process: list[tuple[str, Parse]] = []
        self._callback: Callable[[str, dict[str, Any]], None] | None = None  # in gc.callbacks

    def start(self) -> None:
        """Count collections from now on."""
        limited, mine = limited_cgroup(), own_cgroup()
        self._has_disk_waits = _read(_COUNTS_DELAYS, _number) != {"number": 0}
        if limited is not None:
            self._of_process.append((str(limited / "cpu.stat"), _throttled))
        if mine is not None:
            for name in ("memory", "io"):
                parse = partial(_stall, counter=f"{name}_stall_ns")
                self._of_process.append((str(mine / f"{name}.pressure"), parse))
        self._callback = self._on_gc
        gc.callbacks.append(self._callback)

    def stop(self) -> None:
        """Count no more collections: the recording ends, or this is a forked child."""
        callback, self._callback = self._callback, None  # else a cycle would keep the ring mapped
        if callback is not None and callback in gc.callbacks:
            gc.callbacks.remove(callback)

    def pause_s(self) -> float:
        """Return how long to wait for the next look, in s."""
        return self._moments.pause_s()

    def look(self, thread: int, due_ns: int) -> None:
        """Look at what the process does; see ``Moments.look``."""
        collected_ns = self._gc_ns + self._full_gc_ns
        self._times.clear()
        # Only the newest collection: earlier ones of this moment are short.
        last_ns = self._gc_ended_ns - max(self._gc_began_ns, due_ns)
        self._moments.look(thread, due_ns, collected_ns, max(0, last_ns))

    def sample(self, thread: int) -> None:
        """Write one sample; ``thread`` is the kernel's id of the training thread, or 0.

        The times of a thread that a look has just read are not read again.
        """
        counters = {"gc_ns": self._gc_ns, "full_gc_ns": self._full_gc_ns}
        if thread:
            times = self._times.pop(thread, None) or _times_of(thread)
            if times is not None:
                counters.update(running_ns=times.running_ns, runnable_ns=times.queued_ns)
                woken_ns = self._run_queue.woken_ns(thread, times.queued_ns)
                counters.update({} if woken_ns is None else {"woken_ns": woken_ns})
            if self._has_disk_waits:
                counters.update(_read(f"/proc/self/task/{thread}/stat", _disk))
            counters.update(named_phases.spent_by(thread))
        counters.update(self._moments.counters())
        for path, parse in self._of_process:
            counters.update(_read(path, parse))
        self._write_names()
        self._writer.write(time.monotonic_ns(), thread, counters)

    def _write_names(self) -> None:
        names = named_phases.names()
        if names != self._names:
            self._names = names
            put_text(self._ring, "phase_names", names)

    def _on_gc(self, phase: str, info: dict[str, Any]) -> None:
        # On the thread that collects. Collections do not nest, and the GIL orders them.
        now_ns = time.monotonic_ns()
        is_full = info["generation"] == _FULL
        if phase == "start":
            self._gc_began_ns = now_ns
        else:
            self._gc_ended_ns = now_ns
            if is_full:
                self._full_gc_ns += now_ns - self._gc_began_ns
            else:
                self._gc_ns += now_ns - self._gc_began_ns
        if is_full:
            put(self._ring, "gc_since_ns", now_ns if phase == "start" else 0)


def _read(path: str, parse: Parse) -> dict[str, int]:
    """Return the counters in a file; none if it cannot be read, or has another format."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return parse(os.read(fd, _MOST_BYTES))
        finally:
            os.close(fd)
    except (OSError, ValueError, IndexError):  # the thread may have ended
        return {}


def _times_of(thread: int) -> ThreadTimes | None:
    """Return how long a thread of this process was on a CPU, and in a run queue."""
    times = _read(f"/proc/self/task/{thread}/schedstat", _running_and_queued)
    return ThreadTimes(**times) if times else None


def _note_times(known: dict[int, ThreadTimes], thread: int) -> ThreadTimes | None:
    """Return a thread's times, and keep them in ``known``."""
    times = _times_of(thread)
    if times is not None:
        known[thread] = times
    return times


def _running_and_queued(raw: bytes) -> dict[str, int]:
    """Read a thread's schedstat: its time on a CPU, and behind it that in a run queue, in ns."""
    running, queued = map(int, raw.split()[:2])
    # A kernel that does not count says "0 0 0".
    return {"running_ns": running, "queued_ns": queued} if running else {}


def _switches_of(thread: int) -> Switches | None:
    """Return how often a thread of this process slept, and was preempted."""
    switches = _read(f"/proc/self/task/{thread}/status", _switches)
    return Switches(**switches) if len(switches) == len(Switches._fields) else None


_SWITCHES = {b"voluntary_ctxt_switches": "slept", b"nonvoluntary_ctxt_switches": "preempted"}


def _switches(raw: bytes) -> dict[str, int]:
    """Read a thread's status: how it left its CPU."""
    lines = (line.partition(b":") for line in raw.splitlines())
    return {_SWITCHES[name]: int(value) for name, _, value in lines if name in _SWITCHES}


def _disk(raw: bytes) -> dict[str, int]:
    """Read a thread's stat. The thread's name, in parentheses, may have any character."""
    fields = raw[raw.rindex(b")") + 1 :].split()
    return {"disk_wait_ns": int(fields[_DISK_WAIT_TICKS]) * _TICK_NS}


def _number(raw: bytes) -> dict[str, int]:
    return {"number": int(raw)}


def _throttled(raw: bytes) -> dict[str, int]:
    """Read a cgroup's cpu.stat: microseconds in version 2, nanoseconds in version 1."""
    for line in raw.splitlines():
        name, _, value = line.partition(b" ")
        if name == b"throttled_usec":
            return {"throttled_ns": int(value) * 1000}
        if name == b"throttled_time":
            return {"throttled_ns": int(value)}
    return {}


def _stall(raw: bytes, counter: str) -> dict[str, int]:
    """Read a pressure file: how long some task of the cgroup had to wait, in microseconds."""
    some = raw.split(b"\n", 1)[0]
    return {counter: int(some.rpartition(b"total=")[2]) * 1000} if b"total=" in some else {}
