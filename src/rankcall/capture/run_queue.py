"""Why a thread waited in the run queue: it had slept and was woken, or it was preempted.

A thread that waits for a disk often becomes ready often, and on a busy machine it waits for a CPU
each time. That belongs to the disk. A thread that computes is preempted, and that is another cause.
The kernel counts both kinds of switches, but not the time after each. So a time in the queue is
divided by their numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

# Of time in the queue, before it is worth reading the switches: they stand in a file that costs
# more than all the others, and a thread that gets its CPU waits much less between two samples.
_WORTH_NS = 20_000_000


class Switches(NamedTuple):
    """How often a thread has given its CPU away, and how often the kernel took it."""

    slept: int
    preempted: int


class RunQueue:
    """Divides the time that one thread waits in the run queue."""

    def __init__(self, switches_of: Callable[[int], Switches | None]) -> None:
        """Begin with nothing known; ``switches_of`` reads those of a thread (the kernel's id)."""
        self._switches_of = switches_of
        self._thread = 0
        self._queued_ns = 0  # when the switches were read
        self._switches: Switches | None = None
        self._woken_ns = 0

    def woken_ns(self, thread: int, queued_ns: int) -> int | None:
        """Return how long a thread waited after it had slept, since it was first asked about.

        None if its switches are not known. ``queued_ns``: how long it waited on the whole.
        """
        if thread != self._thread:
            self._thread, self._woken_ns = thread, 0
            self._queued_ns, self._switches = queued_ns, self._switches_of(thread)
        elif self._switches and queued_ns - self._queued_ns >= _WORTH_NS:
            now = self._switches_of(thread)
            if now is not None:
                # A thread that has ended may have left its id to another one, which counts anew.
                slept = max(0, now.slept - self._switches.slept)
                preempted = max(0, now.preempted - self._switches.preempted)
                self._woken_ns += (queued_ns - self._queued_ns) * slept // max(slept + preempted, 1)
            self._queued_ns, self._switches = queued_ns, now
        return self._woken_ns if self._switches else None
