"""Learn which ops on devices have completed from what the back end knows already.

A back end for devices only enqueues an op, and its Work says nothing about the op's end. Its own
watchdog looks at the device anyway, and torch's Flight Recorder keeps, for each group, the number
of the last collective that was enqueued and of the last that was found complete (``pg_status``).
Reading that touches no stream and no event. The rest of a Flight Recorder dump is never read: torch
queries events to make it.

An op inside a coalescing block has no number of its own. It has completed once everything has that
was enqueued by the next look.

``pg_status`` has one number for collectives and for sends and receives, which are counted apart. If
a group issues both, a number that can be of either kind decides nothing. An op that stays undecided
while its group goes on is closed without an end, so that it does not look hung.
"""

from __future__ import annotations

import json
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

POLL_SECONDS = 1.0
_MOST_MISSES = 3  # looks without any status of a group: its back end keeps none
_MOST_MOVES = 3  # times that a group went on while an op of it stayed undecided
_SETTLED_NS = 2_000_000_000  # an op that is older was not overlooked between two looks
_MOST_OPS = 1 << 16

NO_NUMBER = -1


class GroupStatus(NamedTuple):
    """The numbers of a group's ops that were last enqueued, and last found complete."""

    enqueued: int
    completed: int


Status = Mapping[int, GroupStatus]  # by the back end's own number of the group, its uid


class DeviceOp(NamedTuple):
    """An op that was enqueued on a device. ``number`` is its sequence number in the back end."""

    record: int
    group: int
    number: int
    p2p: bool


class Ending(Protocol):
    """What a capture does for ops on devices."""

    def take_device_ops(self) -> list[DeviceOp]: ...
    def end_device_ops(self, records: list[int], time_ns: int) -> None: ...
    def reading_status(self) -> AbstractContextManager[bool]: ...


@dataclass
class _Op:
    """An op that is not known to have completed. ``looks``: how often it was looked for."""

    number: int
    record: int
    noted_ns: int
    looks: int = 0


@dataclass
class _Waiting:
    """The ops of one kind of one group that are not known to have completed, oldest first."""

    ops: deque[_Op] = field(default_factory=deque)
    met: bool = False  # whether the group issues this kind of op
    issued: int = -1  # the highest number so far
    completed: int = -1  # the highest number that is known to have completed

    def add(self, op: DeviceOp, now_ns: int) -> None:
        self.met = True
        self.ops.append(_Op(op.number, op.record, now_ns))
        self.issued = max(self.issued, op.number)

    def number(self, enqueued: int) -> None:
        """Give the ops without a number the highest that they can have.

        An op that was noted since the last look may be enqueued only after this one, when its
        coalescing block ends: it gets its number at the next look.
        """
        for op in self.ops:
            if op.number == NO_NUMBER and op.looks > 0:
                op.number = enqueued
                self.issued = max(self.issued, enqueued)
            op.looks += 1

    def may_have_completed(self, number: int) -> bool:
        """Tell whether the op completed last can be the one of this kind with this number."""
        return self.completed <= number <= self.issued

    def complete(self, number: int) -> list[int]:
        """Take out the ops up to a number, and return their records."""
        self.completed = max(self.completed, number)
        ended = []
        while self.ops and NO_NUMBER < self.ops[0].number <= number:
            ended.append(self.ops.popleft().record)
        return ended

    def take_all(self, noted_after_ns: int = 0) -> list[int]:
        """Take out the ops that were noted after a time, and return their records."""
        taken = [op.record for op in self.ops if op.noted_ns >= noted_after_ns]
        self.ops = deque(op for op in self.ops if op.noted_ns < noted_after_ns)
        return taken


class _GroupOps:
    """The ops of one group on a device."""

    def __init__(self) -> None:
        self.collectives, self.p2p = _Waiting(), _Waiting()
        self._misses = 0
        self._last, self._moves = -1, 0

    @property
    def is_idle(self) -> bool:
        return not self.collectives.ops and not self.p2p.ops

    def complete(self, status: GroupStatus) -> list[int]:
        """Return the records that end, given what the back end says."""
        self._misses, number = 0, status.completed
        kinds = [kind for kind in (self.collectives, self.p2p) if kind.met]
        for kind in kinds:
            kind.number(status.enqueued)
        possible = [kind for kind in kinds if len(kinds) == 1 or kind.may_have_completed(number)]
        if len(possible) == 1:
            self._last, self._moves = number, 0
            return possible[0].complete(number)
        if number != self._last:
            self._last, self._moves = number, self._moves + 1
        return []

    def overlook(self) -> None:
        """Note that the back end said nothing of this group."""
        self._misses += 1

    @property
    def is_undecidable(self) -> bool:
        return self._misses >= _MOST_MISSES or self._moves >= _MOST_MOVES

    def take_all(self, noted_after_ns: int = 0) -> list[int]:
        self._moves = 0
        return self.collectives.take_all(noted_after_ns) + self.p2p.take_all(noted_after_ns)


class DeviceStatus:
    """Ends the records of ops on devices. Used from one thread, which calls ``poll``."""

    def __init__(
        self,
        capture: Ending,
        read: Callable[[], Status] | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._capture = capture
        self._read = read or read_status
        self._clock_ns = clock_ns
        self._waiting: dict[int, _GroupOps] = {}
        self._groups: dict[int, weakref.ref[Any]] = {}

    def add_group(self, number: int, process_group: Any) -> None:
        """Remember which group has an id, for as long as the group lives."""
        self._groups[number] = weakref.ref(process_group, lambda _: self._groups.pop(number, None))

    def poll(self) -> None:
        """End the records of the ops that have completed since the last call."""
        self._take()
        if all(ops.is_idle for ops in self._waiting.values()):
            return
        with self._capture.reading_status() as may_read:
            status = self._read() if may_read else None
        if status is None:
            return
        now_ns = self._clock_ns()
        for number, ops in list(self._waiting.items()):
            uid = _uid(self._groups.get(number))
            if uid is not None and uid in status:
                self._capture.end_device_ops(ops.complete(status[uid]), now_ns)
            else:
                ops.overlook()
            if ops.is_undecidable:
                self._capture.end_device_ops(ops.take_all(), 0)
            if ops.is_idle and number not in self._groups:
                del self._waiting[number]

    def close(self) -> None:
        """Look once more. What was issued a moment ago may have completed unseen: close it too.

        An op that has been in flight for longer stays in flight: it may be why the job ends.
        """
        self.poll()
        since_ns = self._clock_ns() - _SETTLED_NS
        for ops in self._waiting.values():
            self._capture.end_device_ops(ops.take_all(since_ns), 0)

    def _take(self) -> None:
        now_ns = self._clock_ns()
        for op in self._capture.take_device_ops():
            ops = self._waiting.setdefault(op.group, _GroupOps())
            waiting = ops.p2p if op.p2p else ops.collectives
            waiting.add(op, now_ns)
            if len(waiting.ops) > _MOST_OPS:
                self._capture.end_device_ops([waiting.ops.popleft().record], 0)


def device_times_wanted() -> bool:
    """Tell whether the user asked for the times of ops on devices (experimental)."""
    return os.environ.get("RANKCALL_DEVICE_TIMES") == "1"


def read_status() -> Status:
    """Return what the back ends say of each group that they keep a status of.

    The keys are the back end's own numbers of its groups: ``uid`` of ProcessGroupNCCL.
    """
    module: Any = torch._C._distributed_c10d
    dump = getattr(module, "_dump_nccl_trace_json", None) or module._dump_fr_trace_json
    told = json.loads(dump(includeCollectives=False))
    return {
        int(uid): GroupStatus(
            int(row["last_enqueued_collective"]), int(row["last_completed_collective"])
        )
        for uid, row in told.get("pg_status", {}).items()
    }


def _uid(reference: weakref.ref[Any] | None) -> int | None:
    """Return the number that a group's back end for its device has in the status."""
    process_group = reference() if reference is not None else None
    if process_group is None:
        return None
    for device in process_group._device_types:
        if device.type != "cpu":
            uid = getattr(process_group._get_backend(device), "uid", None)
            if uid is not None:
                return int(uid)
    return None
