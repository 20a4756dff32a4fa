"""Why a thread waited for a CPU: by the numbers of its switches."""

from __future__ import annotations

from rankcall.capture.run_queue import RunQueue, Switches

MS = 1_000_000


class Kernel:
    """The switches of threads, as a test sets them, and how often they were read."""

    def __init__(self) -> None:
        self.of: dict[int, Switches] = {}
        self.reads = 0

    def switches_of(self, thread: int) -> Switches | None:
        """Return those of a thread; None if it is gone."""
        self.reads += 1
        return self.of.get(thread)


def test_the_time_is_divided_by_the_switches() -> None:
    """Three of four times, the thread had slept: three quarters of the new time in the queue."""
    kernel = Kernel()
    kernel.of[7] = Switches(100, 50)
    queue = RunQueue(kernel.switches_of)
    assert queue.woken_ns(7, 1000 * MS) == 0  # what was before is not known
    kernel.of[7] = Switches(130, 60)
    assert queue.woken_ns(7, 1400 * MS) == 300 * MS
    kernel.of[7] = Switches(130, 99)  # then it was only preempted
    assert queue.woken_ns(7, 1500 * MS) == 300 * MS
    assert queue.woken_ns(7, 1900 * MS) == 300 * MS  # no switch at all: nothing is known of it


def test_a_thread_that_gets_its_cpu_costs_no_read() -> None:
    """Its switches are read once, and then only when it has waited for long enough."""
    kernel = Kernel()
    kernel.of[7] = Switches(1, 1)
    queue = RunQueue(kernel.switches_of)
    for moment in range(100):
        queue.woken_ns(7, moment * MS // 10)
    assert kernel.reads == 1


def test_another_thread_begins_anew() -> None:
    """Its counters are its own; a thread that is gone has none."""
    kernel = Kernel()
    kernel.of = {7: Switches(0, 0), 9: Switches(500, 500)}
    queue = RunQueue(kernel.switches_of)
    assert queue.woken_ns(7, 0) == 0
    assert queue.woken_ns(9, 5000 * MS) == 0
    kernel.of[9] = Switches(510, 500)
    assert queue.woken_ns(9, 5100 * MS) == 100 * MS
    del kernel.of[9]
    assert queue.woken_ns(9, 5200 * MS) is None
    assert queue.woken_ns(8, 0) is None
