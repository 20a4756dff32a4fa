"""Learn from the back end which ops on devices have completed. Nothing here touches a device.

A back end for devices only enqueues an op. Its own watchdog looks at the device, and tells in two
ways what it has found:

* Each Work has a future of its result (``Work.getFutureResult``). An op with such a future is
  *watched*: the future ends its record. ProcessGroupNCCL never completes the future of a collective
  in a coalescing block, so the status may end a watched collective, too. ProcessGroupNCCL2 queries
  the op's event when it is asked for the future, which is at issue.
* torch's Flight Recorder has, for each group, the number of the last op that was enqueued and of
  the last that was found complete (``pg_status``). The rest of a dump is never read, because torch
  queries events to make it. ProcessGroupNCCL has this status. That of ProcessGroupNCCL2 (torch
  2.15) is not read: it takes the sends and receives of a coalescing block for complete when they
  are issued, and it tells no starts.

``device_ops.py`` has the rules by which an op is over.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from rankcall import background
from rankcall.capture.device_ops import NO_NUMBER, DeviceOp, GroupOps, GroupStatus, Op
from rankcall.record import END_UNKNOWN, START_UNKNOWN

_SETTLED_NS = 2_000_000_000  # an op that is older was not overlooked between two looks
# For a look that another thread has begun. It calls into the back end, which may hang with the
# device: the end of a recording then goes on without a last look.
_LOOK_SECONDS = 1.0


class _Lag(NamedTuple):
    """How late a back end knows that an op is over.

    Verdicts rest on the number of looks. A busy machine delays the back end's watchdog as well as
    the thread that looks, so no number of seconds would do.
    """

    seconds: float
    looks: int


# ProcessGroupNCCL's watchdog looks at its devices every 100 ms, which gets two looks, and that of
# ProcessGroupNCCL2, which has no status, every second.
_WITH_STATUS, _WITHOUT_STATUS = _Lag(0.25, 1), _Lag(1.25, 2)
_APART_NS = 900_000_000  # looks between, which readers ask for, give a watchdog no more time


Status = Mapping[int, GroupStatus]  # by the back end's own number of the group, its uid


class Ending(Protocol):
    """The part of a capture that this module needs."""

    def take_device_ops(self) -> list[DeviceOp]: ...
    def start_device_ops(self, records: list[int], time_ns: int) -> None: ...
    def take_ended_device_ops(self) -> list[int]: ...
    def end_device_ops(self, records: list[int], time_ns: int) -> None: ...
    def reading_status(self) -> AbstractContextManager[bool]: ...


class DeviceStatus:
    """Ends the records of ops on devices. One thread at a time looks; the others wait for it."""

    poll_every_s = 1.0

    def __init__(
        self,
        capture: Ending,
        read: Callable[[], Status] | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._capture = capture
        self._read = read or read_status
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._ops: dict[int, GroupOps] = {}
        self._watched: dict[int, Op] = {}
        self._doubtful: set[int] = set()  # records of which it is not known whether they are over
        self._groups: dict[int, weakref.ref[Any]] = {}
        self._uids: dict[int, int] = {}  # the status of a group stays when the group is gone
        self._new: set[int] = set()  # groups that were made since recording began, without ops yet
        self._is_closed = False
        self._known_ns = clock_ns()
        self._looks_ns = deque([self._known_ns] * 3, maxlen=3)  # when the last ones were begun

    def add_group(self, number: int, process_group: Any, new: bool) -> None:
        """Remember the group of an id, for as long as the group lives.

        ``new``: no op was issued on it before.
        """
        groups = self._groups

        def forget(_: object) -> None:  # refers to no recording, which a cycle would keep mapped
            groups.pop(number, None)

        groups[number] = weakref.ref(process_group, forget)
        uid = _uid(process_group)
        if uid is not None:
            self._uids[number] = uid
        if new:
            self._new.add(number)

    @property
    def known_ns(self) -> int:
        """The time before which no op has ended on a device without its record having been ended.

        It is that of an earlier look, since which the back end's watchdog has had its turn. While
        no look comes to its end, it stays as it is.
        """
        return self._known_ns

    def poll(self) -> float:
        """End the records of the ops that have completed since the last call.

        Returns after how many seconds the back ends will know which of the ops in flight are over
        by now; 0 if none is in flight.
        """
        with background.holding(self._lock, _LOOK_SECONDS) as is_held:
            if not is_held or self._is_closed:
                return 0.0
            begun_ns = self._clock_ns()
            has_looked = True  # even if the back end fails: it will tell no more later
            try:
                has_looked = self._poll()
            finally:
                if has_looked:
                    self._note_look(begun_ns)
            return self._lag().seconds

    def _lag(self) -> _Lag:
        """Return the longest lag of the groups that have ops in flight."""
        return max(
            (
                _WITH_STATUS if number in self._uids else _WITHOUT_STATUS
                for number, ops in self._ops.items()
                if not ops.is_idle
            ),
            default=_Lag(0.0, 0),
        )

    def _note_look(self, begun_ns: int) -> None:
        if begun_ns - self._looks_ns[-1] >= _APART_NS:
            self._looks_ns.append(begun_ns)
        looks = self._lag().looks
        self._known_ns = max(self._known_ns, self._looks_ns[-1 - looks] if looks else begun_ns)

    def _poll(self) -> bool:
        """Look, as ``poll`` says; return False if the back end's status could not be read now."""
        # The ends come first: an op is noted before its future can end it.
        ended = self._capture.take_ended_device_ops()
        self._take()
        now_ns = self._clock_ns()
        for record in ended:
            op = self._watched.pop(record, None)
            ops = self._ops.get(op.noted.group) if op is not None else None
            if op is not None and ops is not None:
                self._end(ops.settle(op), now_ns)
        has_looked = True
        if any(ops.needs_status for ops in self._ops.values()):
            with self._capture.reading_status() as has_looked:
                status = self._read() if has_looked else {}
            if has_looked:
                self._compare(status, now_ns)
        self._forget_gone()
        return has_looked

    def _forget_gone(self) -> None:
        """Forget the groups that are gone and have no ops in flight."""
        for number in [number for number, ops in self._ops.items() if ops.is_idle]:
            if number not in self._groups:
                del self._ops[number]
        for number in [*self._uids, *self._new]:
            if number not in self._groups and number not in self._ops:
                self._uids.pop(number, None)
                self._new.discard(number)

    def _compare(self, status: Status, now_ns: int) -> None:
        for number, ops in self._ops.items():
            uid = self._uids.get(number)
            if uid is not None and uid in status:
                ended = ops.complete(status[uid])
                for record in ended:
                    self._watched.pop(record, None)
                self._end(ended, now_ns)
                for record, state in ops.starts(status[uid].started):
                    self._capture.start_device_ops([record], now_ns if state > 0 else state)
                doubtful, certain = ops.doubts()
                self._doubtful.update(doubtful)
                self._capture.start_device_ops(doubtful, END_UNKNOWN)
                self._doubtful.difference_update(certain)
                self._capture.start_device_ops(certain, START_UNKNOWN)
            else:
                # A verdict must not take an op for one that hangs until its end is given up. So no
                # further look is awaited if the back end has no number in the status.
                ops.overlook(for_good=uid is None)
            self._close(ops.take_undecidable())

    def close(self) -> None:
        """Look once more. Close the newest ops, too, because they may have completed unseen.

        An op that has been in flight for longer stays in flight: it may be why the job ends.
        """
        with background.holding(self._lock, _LOOK_SECONDS) as is_held:
            if not is_held or self._is_closed:
                return
            self._is_closed = True
            self._poll()
            now_ns = self._clock_ns()
            for ops in self._ops.values():
                self._close(ops.take(lambda op: op.noted_ns >= now_ns - _SETTLED_NS))
            self._known_ns = now_ns

    def _end(self, records: list[int], now_ns: int) -> None:
        known = self._doubtful.intersection(records)
        if known:
            self._doubtful -= known
            self._capture.start_device_ops(sorted(known), START_UNKNOWN)
        self._capture.end_device_ops(records, now_ns)

    def _close(self, ops: Iterable[DeviceOp]) -> None:
        records = [op.record for op in ops]
        self._doubtful.difference_update(records)
        for record in records:
            self._watched.pop(record, None)
        self._capture.end_device_ops(records, 0)

    def _take(self) -> None:
        now_ns = self._clock_ns()
        for noted in self._capture.take_device_ops():
            ops = self._ops.get(noted.group)
            if ops is None:
                ops = self._ops[noted.group] = GroupOps(noted.group in self._new)
                self._new.discard(noted.group)
            has_number = noted.number != NO_NUMBER
            op = Op(noted, noted.number, now_ns, has_number, has_number)
            if noted.watched:
                self._watched[noted.record] = op
            self._close(ops.add(op))


def device_times_wanted() -> bool:
    """Return whether the user asked for the times of ops on devices (experimental)."""
    return os.environ.get("RANKCALL_DEVICE_TIMES") == "1"


def read_status() -> Status:
    """Return the status of each group, as far as its back end keeps one.

    The keys are the back end's own numbers of its groups: ``uid`` of ProcessGroupNCCL.
    """
    module: Any = torch._C._distributed_c10d
    dump = getattr(module, "_dump_nccl_trace_json", None) or module._dump_fr_trace_json
    dumped = json.loads(dump(includeCollectives=False))
    return {
        int(uid): GroupStatus(
            int(row["last_enqueued_collective"]),
            int(row["last_completed_collective"]),
            int(row.get("last_started_collective", NO_NUMBER)),
        )
        for uid, row in dumped.get("pg_status", {}).items()
    }


def _uid(process_group: Any) -> int | None:
    """Return the number that a group's back end for its device has in the status."""
    for device in process_group._device_types:
        if device.type != "cpu":
            try:
                uid = getattr(process_group._get_backend(device), "uid", None)
            except RuntimeError:  # no back end for this device; other groups are still looked at
                continue
            if uid is not None:
                return int(uid)
    return None
