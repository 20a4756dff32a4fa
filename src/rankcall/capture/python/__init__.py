"""The pure-Python capture: the same records as the native recorder's, if that cannot be built.

A Python kernel at the same dispatch key writes the same ring. It is slower (some 10 us a call), and
of ops on devices it records the issue only. Its files are the twins of those in ``native/``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from rankcall.capture.device_status import DeviceOp
from rankcall.capture.marks import Marks
from rankcall.capture.python.callsites import CallSites
from rankcall.capture.python.ends import Ends
from rankcall.capture.python.groups import Groups, Numbered, number_ahead
from rankcall.capture.python.issue import Issuer
from rankcall.capture.python.kernels import KEYS_AFTER, Recorder, pass_on, record_with
from rankcall.capture.python.marks import PythonMarks
from rankcall.capture.python.ops import Op, c10d_ops
from rankcall.capture.python.waited import release_dropped, stand_ins
from rankcall.capture.python.wake import Waker
from rankcall.ring.tables import Group
from rankcall.ring.writer import PythonRing, put

Interposer = Callable[[Op, Numbered, Callable[..., Any], tuple[Any, ...]], Any]


class PythonCapture:
    """Records through Python kernels; see ``NativeCapture`` for the interface."""

    name = "python"
    make_statuses = None  # they are made column by column

    def __init__(self, ring: PythonRing, call_sites: bool = True) -> None:
        self._ring = ring
        self._groups = Groups(ring)
        self._waker = Waker()
        sites = CallSites(ring.site) if call_sites else None
        self._issuer = Issuer(ring, self._groups, sites, self._waker)
        self._ends = Ends(ring, self._waker)
        self._marks: Marks | None = None
        self.recording = False
        # Planted faults: called in place of an op, with what issues and records it.
        self.interposer: Interposer | None = None
        self._recorders: dict[str, Recorder] = {}

    def start(self) -> None:
        """Record every c10d op from now on."""
        ops = c10d_ops()
        for op in ops:
            self._recorders[op.name] = self._recorder(op, self._ring.string(op.name))
        self.recording = True
        record_with(self._recorders, ops)

    def stop(self) -> None:
        """Record no new ops. Ops in flight still write their ends."""
        self.recording = False
        pass_on(self._recorders)
        self._recorders = {}  # they refer to this capture, and it to the ring
        self._ring.close()
        release_dropped(len(stand_ins))

    def take_device_ops(self) -> list[DeviceOp]:
        """Return the ops on devices that were issued since the last call.

        This is called about once a second, so dropped Works are released here as well.
        """
        release_dropped(len(stand_ins))
        return self._ends.take_device_ops()

    def end_device_ops(self, records: list[int], time_ns: int) -> None:
        """End records of ops on devices: completed at ``time_ns``, abandoned if that is 0."""
        self._ends.end_device_ops(records, time_ns)

    @contextlib.contextmanager
    def reading_status(self) -> Iterator[bool]:
        """Yield False while a group's first op is under way: see native/kernels.h.

        No other first op can begin meanwhile, because the reader holds the GIL.
        """
        yield self._ends.first_ops == 0

    def forget(self) -> None:
        """Record nothing more: this is a forked child, and the ring is its parent's."""
        self.recording = False
        pass_on()
        self._waker.wanted = 0

    def drained(self) -> bool:
        """Whether every record has its end."""
        return self._ring.done == self._ring.head

    def counts(self) -> tuple[int, int]:
        """Return how many records were issued, and how many have ended."""
        return self._ring.head, self._ring.done

    def add_group(self, group: Group, me: int) -> int:
        """Announce a group, and return its id; ``me`` is this rank's place in it."""
        number = self._groups.announce(group)
        if self._marks is not None and self._ends.marks is not None:
            self._ends.marks.learn(self._marks, group)
        return number

    def add_line(self, site: int, text: str) -> None:
        """Add what the source says at a call site."""
        self._ring.line(site, text)

    def mark(self, marks: Marks | None) -> None:
        """Have a tool told of each op as it is issued, from now on; None ends that."""
        self._marks = marks
        if marks is None:
            self._issuer.marks = None
            return
        self._ends.marks = PythonMarks(marks)
        self.learn_spans(marks)
        self._issuer.marks = self._ends.marks

    def learn_spans(self, marks: Marks) -> None:
        """Ask again which members of which groups are on other hosts."""
        for group in self._groups.announced():
            if self._ends.marks is not None:
                self._ends.marks.learn(marks, group)

    def step(self) -> None:
        """Count an optimizer step."""
        self._issuer.steps += 1
        put(self._ring.map, "step", self._issuer.steps)

    def sleep(self, fd: int, wanted: int) -> None:
        """Have the eventfd written at the next end (1), or the next start or end (2)."""
        self._waker.arm(fd, wanted)

    def _recorder(self, op: Op, variant: int) -> Recorder:
        redispatch = op.overload.redispatch
        issue, ends = self._issuer.of(op, variant), self._ends
        follow = ends.follow

        def met(keys: Any, *args: Any, **kwargs: Any) -> Any:
            if self.interposer is not None:
                through = functools.partial(recorded, keys, **kwargs)
                return self.interposer(op, number_ahead(op, args, self._groups), through, args)
            return recorded(keys, *args, **kwargs)

        def recorded(keys: Any, *args: Any, **kwargs: Any) -> Any:
            issued = None
            if self.recording:
                try:
                    issued = issue(args)
                except Exception:  # an unforeseen argument: the user's op goes on, unrecorded
                    issued = None
            if issued is None:
                return redispatch(keys & KEYS_AFTER, *args, **kwargs)
            if issued.first:
                ends.first_ops += 1
            try:
                result = redispatch(keys & KEYS_AFTER, *args, **kwargs)
            except BaseException as error:
                ends.failed(issued, error)
                raise
            finally:
                if issued.first:
                    ends.first_ops -= 1
            return follow(op, issued, result)

        return met
