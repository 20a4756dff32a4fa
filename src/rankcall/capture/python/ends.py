"""Record how an op ends, by its future or the return of ``wait()``: the twin of native/ends.h."""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from rankcall.capture.device_status import NO_NUMBER, DeviceOp
from rankcall.capture.python.groups import GroupState
from rankcall.capture.python.marks import PythonMarks
from rankcall.capture.python.ops import Op
from rankcall.capture.python.waited import release_dropped, stand_in, stand_ins
from rankcall.capture.python.wake import Waker
from rankcall.record import FLAG_ABANDONED, FLAG_ANY_SOURCE, FLAG_DEVICE, NO_RANK, STATUSES
from rankcall.ring.writer import PythonRing

_ENQUEUED, _STARTED = STATUSES.index("enqueued"), STATUSES.index("started")
_COMPLETED, _FAILED = STATUSES.index("completed"), STATUSES.index("failed")
_MOST_DEVICE_OPS = 1 << 16
_TORCHS_OWN = dist.Work.__module__


class Issued(NamedTuple):
    """What an op's end has to know of its issue."""

    number: int  # the record's index in the ring
    group: GroupState
    tag: int
    flags: int  # of the record
    p2p: bool
    first: bool  # the first op of its group
    block: int  # what its record has as correlation


class Ends:
    """Writes the ends of ops, on whichever thread they end. Nothing here raises into an op."""

    def __init__(self, ring: PythonRing, waker: Waker) -> None:
        self._ring = ring
        self._waker = waker
        self._pid = os.getpid()
        # In Python all of Gloo's Works are of one type: the op tells them apart.
        self._futureless: set[tuple[type, str]] = set()
        self.first_ops = 0  # of groups, that are being issued
        self._device_ops: list[DeviceOp] = []  # since they were taken last
        self.marks: PythonMarks | None = None  # kept when they are off: open ranges still end

    def follow(self, op: Op, issued: Issued, result: Any) -> Any:
        """Arrange for the end of an op that was issued, and return the result for its caller."""
        try:
            if stand_ins:
                release_dropped()
            return self._follow(op, issued, result)
        except Exception:
            self.abandon(issued)
            return result

    def _follow(self, op: Op, issued: Issued, result: Any) -> Any:
        if issued.flags & FLAG_DEVICE:
            self._follow_on_device(issued)
            return result
        boxed = result[-1] if isinstance(result, (tuple, list)) else result
        if not op.returns_work or boxed is None:  # monitored_barrier_ has returned, so it is over
            self._end(issued, _COMPLETED)
            return result
        work = dist.Work.unbox(boxed)
        kind, torchs_own = (type(work), op.name), type(work).__module__ == _TORCHS_OWN
        if kind not in self._futureless:
            try:
                future = work.get_future()
            except Exception:
                if torchs_own:
                    self._futureless.add(kind)
            else:
                self._follow_future(issued, future)
                return result
        # A Work that was made in Python may have any attributes: its caller gets that very object.
        boxed = None
        if torchs_own:
            boxed = stand_in(work, _WaitEnd(self, issued), bool(issued.flags & FLAG_ANY_SOURCE))
        if boxed is None:
            self.abandon(issued)
            return result
        return (*result[:-1], boxed) if isinstance(result, (tuple, list)) else boxed

    def _follow_on_device(self, issued: Issued) -> None:
        # Python cannot ask a Work for its number: device_status.py bounds it.
        if _is_captured() or len(self._device_ops) >= _MOST_DEVICE_OPS:
            self.abandon(issued)
        else:
            self._device_ops.append(
                DeviceOp(issued.number, issued.group.id, NO_NUMBER, issued.p2p, issued.block)
            )

    def take_device_ops(self) -> list[DeviceOp]:
        """Return the ops on devices that were issued since the last call."""
        taken, self._device_ops = self._device_ops, []
        return taken

    def end_device_ops(self, records: list[int], time_ns: int) -> None:
        """End records of ops on devices: completed at ``time_ns``, abandoned if that is 0."""
        for record in records:
            if time_ns:
                self._write_end(record, _COMPLETED, time_ns)
            else:
                flags = FLAG_DEVICE | FLAG_ABANDONED
                self._write_end(record, _ENQUEUED, 0, flags=flags)

    def _follow_future(self, issued: Issued, future: Any) -> None:
        if future.done():
            self._future_done(issued, future)
        else:
            future.add_done_callback(lambda done: self._future_done(issued, done))

    def _future_done(self, issued: Issued, future: Any) -> None:
        try:
            future.value()
        except Exception as error:
            self.failed(issued, error)
        else:
            self._end(issued, _COMPLETED)

    def failed(self, issued: Issued, error: BaseException) -> None:
        """Record that an op has failed."""
        try:
            fields: dict[str, float] = {"error": self._ring.error(str(error))}
        except Exception:
            fields = {}
        self._end(issued, _FAILED, **fields)

    def completed(self, issued: Issued, peer: int = NO_RANK) -> None:
        """Record that an op has completed; ``peer``: the source of an any-source receive."""
        if peer == NO_RANK:
            self._end(issued, _COMPLETED)
        else:
            seq = issued.group.next_p2p(peer, issued.tag, False)
            self._end(issued, _COMPLETED, peer=peer, seq=seq)

    def abandon(self, issued: Issued) -> None:
        """Close a record whose end cannot be known."""
        status = _ENQUEUED if issued.flags & FLAG_DEVICE else _STARTED
        self._end(issued, status, flags=issued.flags | FLAG_ABANDONED)

    def _end(self, issued: Issued, status: int, **fields: float) -> None:
        ended_ns = 0 if status in (_ENQUEUED, _STARTED) else time.monotonic_ns()
        self._write_end(issued.number, status, ended_ns, **fields)

    def _write_end(self, record: int, status: int, ended_ns: int, **fields: float) -> None:
        # A forked child has its parent's Works, and its parent's ring.
        if os.getpid() != self._pid:
            return
        try:
            if self.marks is not None:
                self.marks.ended(record)
            self._ring.finish(record, status, ended_ns, **fields)
            if self._waker.wanted:
                self._waker.wake(1)
        except Exception:  # a ring that is closed, or a tool's failure: the user's op goes on
            pass


def _is_captured() -> bool:
    """Tell whether the caller's stream is being captured into a graph."""
    try:
        return bool(torch.accelerator.current_stream().is_capturing())
    except Exception:  # a torch, or a device, that cannot say
        return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class _WaitEnd:
    """Writes down how an op ended whose Work was waited for, or dropped."""

    def __init__(self, ends: Ends, issued: Issued) -> None:
        self._ends, self._issued = ends, issued

    def waited(self, error: BaseException | None, peer: int) -> None:
        if error is None:
            self._ends.completed(self._issued, peer)
        else:
            self._ends.failed(self._issued, error)

    def abandoned(self) -> None:
        self._ends.abandon(self._issued)
