"""Record how an op ends: by its future, or by the return of ``wait()``: the twin of native/ends.h.

A Work without a future is stood in for (see waited.py).
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch.distributed as dist

from rankcall.capture.python.device import DeviceTimes, Span
from rankcall.capture.python.groups import GroupState
from rankcall.capture.python.marks import PythonMarks
from rankcall.capture.python.ops import Op
from rankcall.capture.python.waited import WaitedWork
from rankcall.capture.python.wake import Waker
from rankcall.record import NO_RANK, STATUSES
from rankcall.ring.writer import PythonRing

_COMPLETED, _FAILED = STATUSES.index("completed"), STATUSES.index("failed")
_MAX_WAITED, _MAX_OVER = 65536, 4096  # Works kept: not waited for yet, and waited for
_MAX_ERRORS = 256


class Issued(NamedTuple):
    """What an op's end has to know of its issue."""

    number: int  # the record's index in the ring
    group: GroupState
    tag: int
    any_source: bool
    span: Span | None


class Ends:
    """Writes the ends of ops, on whichever thread they end."""

    def __init__(self, ring: PythonRing, devices: DeviceTimes, waker: Waker) -> None:
        self._ring = ring
        self._devices = devices
        self._waker = waker
        # In Python all of Gloo's Works are of one type: the op tells them apart.
        self._futureless: set[tuple[type, str]] = set()
        self._waited: dict[int, WaitedWork] = {}
        self._over: dict[int, WaitedWork] = {}
        self._errors: dict[str, int] = {}
        self.marks: PythonMarks | None = None  # kept when they are off: open ranges still end

    def follow(self, op: Op, issued: Issued, result: Any) -> Any:
        """Arrange for the end of an op that was issued; return what its caller is to get."""
        boxed = result[-1] if isinstance(result, (tuple, list)) else result
        work: dist.Work | None = None
        if op.returns_work and boxed is not None:
            work = dist.Work.unbox(boxed)
        if work is None:  # monitored_barrier_, and what a back end merges into a later launch
            self._ended(issued, _COMPLETED)
            return result
        if (type(work), op.name) not in self._futureless:
            try:
                future = work.get_future()
            except RuntimeError:
                self._futureless.add((type(work), op.name))
            else:
                if future.done():
                    self._future_done(issued, future)
                else:
                    future.add_done_callback(lambda done: self._future_done(issued, done))
                return result
        boxed = self._wait_for(work, issued).boxed()
        return (*result[:-1], boxed) if isinstance(result, (tuple, list)) else boxed

    def failed(self, issued: Issued, error: BaseException) -> None:
        """Record that the call which issued an op has raised."""
        self._finish(issued, _FAILED, error=str(error))

    def _wait_for(self, work: dist.Work, issued: Issued) -> WaitedWork:
        """Put a Work of ours in place of one that has no future.

        Its Python half must live as long as its C++ half, which would go on without our methods
        and wait for ever; nobody says how long that is, so a bounded number is kept.
        """

        def over(error: BaseException | None, peer: int) -> None:
            if self._waited.pop(issued.number, None) is not None:
                self._over[issued.number] = waited
                _trim(self._over, _MAX_OVER)
            status = _COMPLETED if error is None else _FAILED
            self._ended(issued, status, error=str(error or ""), peer=peer)

        waited = self._waited[issued.number] = WaitedWork(work, over, issued.any_source)
        _trim(self._waited, _MAX_WAITED)
        return waited

    def _future_done(self, issued: Issued, future: Any) -> None:
        try:
            future.value()
        except Exception as error:
            self._ended(issued, _FAILED, error=str(error))
        else:
            self._ended(issued, _COMPLETED)

    def _ended(self, issued: Issued, status: int, **outcome: Any) -> None:
        """Record the end of an op; on a device that is still to come, and its event is watched."""
        if issued.span is None or not self._devices.end(issued.span, status):
            self._finish(issued, status, **outcome)

    def _finish(self, issued: Issued, status: int, error: str = "", peer: int = NO_RANK) -> None:
        completed_ns = time.monotonic_ns()
        if self.marks is not None:
            self.marks.ended(issued.number)
        if error or peer != NO_RANK:
            fields: dict[str, float] = {"error": self._error(error)} if error else {}
            if peer != NO_RANK:
                fields["peer"] = peer
                fields["seq"] = issued.group.next_p2p(peer, issued.tag, False)
            self._ring.finish(issued.number, status, completed_ns, **fields)
        else:
            self._ring.finish(issued.number, status, completed_ns)
        if self._waker.wanted:
            self._waker.wake(1)

    def _error(self, message: str) -> int:
        if message not in self._errors:
            if len(self._errors) >= _MAX_ERRORS:
                return 0
            self._errors[message] = self._ring.string(message[:4096])
        return self._errors[message]


def _trim(works: dict[int, WaitedWork], most: int) -> None:
    while len(works) > most:
        works.pop(next(iter(works)), None)
