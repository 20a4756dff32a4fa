"""What can only be seen at moments: what the training thread is doing, and a GIL that is held.

The heartbeat's thread looks twice a second, and each look stands for the time since the one before.
So these counters are estimates. The times between looks vary: a program whose steps are as long as
a fixed time would always be seen at the same place.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

# What a thread can be seen doing, in the order of ``native/doing.h``. Empty: none of these.
DOING = ("", "data_loader", "checkpoint", "compilation")

_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.3, 0.7
# If the training thread has gone on for so long since a look was due, the look does not show what
# was done at that time. A thread that runs Python code gives the GIL away after a quarter of this.
_LATE_NS = 20_000_000
_LONGEST_NS = 1_500_000_000  # of the time that a look at the stack stands for


class Look(NamedTuple):
    """What a capture sees of its process at one moment; None stands for what it cannot know.

    Attributes:
        doing: One of ``DOING``: what the thread that was asked for is doing.
        stopped_ns: How long the process was stopped so far, on the whole.
        blocked_ns: How long its training thread was in uninterruptible sleep so far (state D).
        sleeping_ns: How long it was in sleep that a signal ends (state S).
    """

    doing: str | None = None
    stopped_ns: int | None = None
    blocked_ns: int | None = None
    sleeping_ns: int | None = None


class ThreadTimes(NamedTuple):
    """How long a thread was on a CPU and in a run queue so far, in ns."""

    running_ns: int
    queued_ns: int


class _Moment(NamedTuple):
    """What was read at a look."""

    time_ns: int
    mine: ThreadTimes  # of the thread that looks
    trains: ThreadTimes
    look: Look
    collected_ns: int


class _Late(NamedTuple):
    """A look that came so late, and the moment before it."""

    late_ns: int
    since_ns: int
    before: _Moment


class Moments:
    """Looks at this process, and counts what it has seen; on one thread."""

    def __init__(
        self,
        look: Callable[[int], Look],
        times_of: Callable[[int], ThreadTimes | None],
    ) -> None:
        """Begin with nothing known.

        Args:
            look: Looks at the process, and at the thread with Python's number.
            times_of: Returns the times of the thread with the kernel's id; None: not known.
        """
        self._look, self._times_of = look, times_of
        self._random = random.Random(os.getpid())  # the program's own stays as it is
        self._counters: dict[str, int] = {}
        self._before: _Moment | None = None
        self._late: _Late | None = None
        self._seen_in_time: str | None = None  # by the last look, if it did not come late
        self._unsure = "", 0  # what the last look showed, if the next one has to confirm it
        self._thread, self._number = 0, 0  # the kernel's id of a thread, and Python's

    def counters(self) -> dict[str, int]:
        """Return the counters that are known."""
        return dict(self._counters)

    def pause_s(self) -> float:
        """Return how long to wait for the next look, in s."""
        return self._random.uniform(_LEAST_PAUSE_S, _MOST_PAUSE_S)

    def look(self, thread: int, due_ns: int, collected_ns: int, collected_late_ns: int = 0) -> None:
        """Look at this moment.

        Args:
            thread: The kernel's id of the training thread, or 0.
            due_ns: When the calling thread wanted to be awake again (CLOCK_MONOTONIC).
            collected_ns: How long the process has collected garbage so far.
            collected_late_ns: Of that, the time since ``due_ns``.
        """
        now_ns = time.monotonic_ns()
        seen = self._look(self._number_of(thread))
        mine = self._times_of(threading.get_native_id())
        if mine is None:  # a thread that waits for a CPU would look like one that was stopped
            seen = seen._replace(stopped_ns=None)
        for name in ("stopped_ns", "blocked_ns", "sleeping_ns"):
            value = getattr(seen, name)
            if value is not None:
                self._counters[name] = value
        trains = self._times_of(thread) if thread else None
        before, self._before = self._before, None
        late, self._late = self._late, None
        if mine is None or trains is None:
            return
        now = self._before = _Moment(now_ns, mine, trains, seen, collected_ns)
        # From the first look on, these grow: a counter's growth is known between two samples.
        for name in (*DOING[1:], "gil"):
            if (seen.stopped_ns if name == "gil" else seen.doing) is not None:
                self._counters.setdefault(f"{name}_ns", 0)
        if before is None:
            return
        since_ns = now_ns - before.time_ns
        late_ns = now_ns - due_ns - (mine.queued_ns - before.mine.queued_ns)
        # Neither a collection nor a run queue lets the thread go on to something else. How much of
        # this moment it was queued is not known, so as much as of the time since the last look.
        queued = min(1.0, (trains.queued_ns - before.trains.queued_ns) / max(since_ns, 1))
        moved_ns = (late_ns - collected_late_ns) * (1.0 - queued)
        self._count_doing(seen.doing, since_ns, in_time=moved_ns < _LATE_NS)
        if late is not None:
            self._count_gil(late, now)
        # If the training thread ran meanwhile, or was about to, it may have held the GIL itself.
        late_ns -= sum(trains) - sum(before.trains)
        self._late = _Late(late_ns, since_ns, before)

    def _count_doing(self, doing: str | None, since_ns: int, *, in_time: bool) -> None:
        """Count a look, if it or one beside it came in time and shows this.

        Code in C that holds the GIL makes a look late, also inside a checkpoint. Late looks alone
        show nothing: they would all see what a thread does that has just let go of the GIL.
        """
        unsure, self._unsure = self._unsure, ("", 0)
        if not doing:
            pass
        elif in_time or doing == self._seen_in_time:
            before_ns = unsure[1] if in_time and unsure[0] == doing else 0
            self._counters[f"{doing}_ns"] += min(since_ns, _LONGEST_NS) + before_ns
        else:
            self._unsure = doing, min(since_ns, _LONGEST_NS)
        self._seen_in_time = doing if in_time else None

    def _count_gil(self, late: _Late, now: _Moment) -> None:
        """Count a look as one that waited for the GIL, if nothing else explains that it was late.

        That is decided at the next look, because a stop or a collection may be counted a moment
        after it.
        """
        stopped_ns, before_ns = now.look.stopped_ns, late.before.look.stopped_ns
        if stopped_ns is None or before_ns is None:
            return
        elsewhere_ns = stopped_ns - before_ns + now.collected_ns - late.before.collected_ns
        if late.late_ns - elsewhere_ns >= _LATE_NS:
            self._counters["gil_ns"] += late.since_ns

    def _number_of(self, thread: int) -> int:
        """Return Python's number of a thread, by the kernel's; 0 if Python does not know it."""
        if thread != self._thread:
            numbers = {other.native_id: other.ident for other in threading.enumerate()}
            self._thread, self._number = thread, numbers.get(thread) or 0
        return self._number
