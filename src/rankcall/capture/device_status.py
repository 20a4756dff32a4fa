"""Learn from the back end's own status which ops on devices have completed.

A back end for devices only enqueues an op, and its Work says nothing about the op's end. Its own
watchdog looks at the device anyway, and torch's Flight Recorder keeps, for each group, the number
of the last collective that was enqueued and of the last that was found complete (``pg_status``).
Reading that touches no stream and no event. The rest of a Flight Recorder dump is never read: torch
queries events to make it.

Which number an op has is known from its Work. Synchronous ops on NCCL and ops inside a coalescing
block have no Work, and the Python capture cannot ask a Work. They get their numbers by counting: if
the group has enqueued as many since the last known number as were issued, each is known. If not,
an op has completed once everything has that was enqueued by the next look.

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

NO_NUMBER = -1
_MOST_MISSES = 3  # looks without any status of a group: its back end keeps none
_MOST_MOVES = 3  # times that a group went on while an op of it stayed undecided
_SETTLED_NS = 2_000_000_000  # an op that is older was not overlooked between two looks
_MOST_OPS = 1 << 16


class GroupStatus(NamedTuple):
    """The numbers of a group's ops that were last enqueued, last found complete, and last started.

    A back end tells starts only if it is asked to (``TORCH_NCCL_ENABLE_TIMING=1``).
    """

    enqueued: int
    completed: int
    started: int = NO_NUMBER


Status = Mapping[int, GroupStatus]  # by the back end's own number of the group, its uid


class DeviceOp(NamedTuple):
    """An op that was enqueued on a device.

    ``number`` is its sequence number in the back end, if that is known. Ops of one ``block`` were
    issued by one public call and may share a number.
    """

    record: int
    group: int
    number: int
    p2p: bool
    block: int


class Ending(Protocol):
    """The part of a capture that this module needs."""

    def take_device_ops(self) -> list[DeviceOp]: ...
    def start_device_ops(self, records: list[int], time_ns: int) -> None: ...
    def end_device_ops(self, records: list[int], time_ns: int) -> None: ...
    def reading_status(self) -> AbstractContextManager[bool]: ...


@dataclass
class _Op:
    """An op that is not known to have completed.

    ``looks`` counts the looks at the status since the op was issued. ``moves`` is how often the
    group had gone on when the op was noted.
    """

    number: int
    record: int
    block: int
    noted_ns: int
    moves: int
    has_own_number: bool  # and not one that was counted
    looks: int = 0
    start: int = -1  # 1: begun, 0: not begun, -1: not known


@dataclass
class _Waiting:
    """The ops of one kind of one group that are not known to have completed, oldest first.

    ``anchor`` is the number of the op before the oldest, if that is known.
    """

    anchor: int
    ops: deque[_Op] = field(default_factory=deque)
    met: bool = False  # whether the group issues this kind of op
    issued: int = NO_NUMBER  # the highest number so far
    completed: int = NO_NUMBER  # the highest number that is known to have completed

    def add(self, op: _Op) -> None:
        self.met = True
        self.ops.append(op)
        self.issued = max(self.issued, op.number)

    def count_up_to(self, enqueued: int) -> None:
        """Give numbers to the ops without one: ``enqueued`` is the last number of this kind."""
        before, unknown = self.anchor, list[_Op]()
        for op in self.ops:
            if op.number == NO_NUMBER:
                unknown.append(op)
            elif unknown:
                _count(unknown, before, op.number - 1)
                unknown = []
            if op.number != NO_NUMBER:
                before = op.number
            op.looks += 1
        _count(unknown, before, enqueued)
        self.issued = max(self.issued, enqueued)

    def may_have_completed(self, number: int) -> bool:
        """Tell whether the op completed last can be the one of this kind with this number."""
        return self.completed <= number <= self.issued

    def complete(self, number: int) -> list[int]:
        """Take out the ops up to a number, and return their records."""
        self.completed = max(self.completed, number)
        ended = []
        while self.ops and NO_NUMBER < self.ops[0].number <= number:
            op = self.ops.popleft()
            self.anchor = op.number
            ended.append(op.record)
        return ended

    def take(self, wanted: Callable[[_Op], bool]) -> list[int]:
        """Take out the ops that are wanted, and return their records."""
        taken = [op for op in self.ops if wanted(op)]
        if taken:
            self.ops = deque(op for op in self.ops if not wanted(op))
            self.anchor = NO_NUMBER
        return [op.record for op in taken]


def _count(ops: list[_Op], before: int, last: int) -> None:
    """Number ops that were issued after ``before``, up to ``last``.

    An op that was noted since the last look may be enqueued only later, when its coalescing block
    ends. So an op that was noted earlier, and that counting does not settle, gets the last number.
    """
    blocks = list(dict.fromkeys(op.block for op in ops))
    if before != NO_NUMBER and len(blocks) == last - before:
        numbers = {block: before + 1 + at for at, block in enumerate(blocks)}
        for op in ops:
            op.number = numbers[op.block]
        return
    for op in ops:
        if op.looks > 1:
            op.number = last


class _GroupOps:
    """The ops of one group on a device. ``new``: all ops since the group was made are seen."""

    def __init__(self, new: bool) -> None:
        first = 0 if new else NO_NUMBER
        self.collectives, self.p2p = _Waiting(first), _Waiting(first)
        self._last_added = self.collectives
        self._misses = 0
        self._completed, self._moves = NO_NUMBER, 0

    @property
    def is_idle(self) -> bool:
        return not self.collectives.ops and not self.p2p.ops

    def add(self, op: DeviceOp, now_ns: int) -> list[int]:
        """Add an op; return the records of those that there are too many of."""
        kind = self._last_added = self.p2p if op.p2p else self.collectives
        kind.add(_Op(op.number, op.record, op.block, now_ns, self._moves, op.number != NO_NUMBER))
        if len(kind.ops) <= _MOST_OPS:
            return []
        kind.anchor = NO_NUMBER
        return [kind.ops.popleft().record]

    def complete(self, status: GroupStatus) -> list[int]:
        """Return the records that end, given the group's status."""
        self._misses, number = 0, status.completed
        if number != self._completed:
            self._completed, self._moves = number, self._moves + 1
        kinds = [kind for kind in (self.collectives, self.p2p) if kind.met]
        # The op enqueued last was of the kind that was noted last, so that is the kind counted.
        self._last_added.count_up_to(status.enqueued)
        possible = [kind for kind in kinds if len(kinds) == 1 or kind.may_have_completed(number)]
        return possible[0].complete(number) if len(possible) == 1 else []

    def starts(self, started: int) -> Iterator[tuple[int, int]]:
        """Yield records with what is new of their starts: 1 begun, 0 not begun, -1 not known.

        ``started`` is the number of the op that began last. It may be of either kind, so it tells
        something only in a group without messages. It tells nothing of an op whose own number was
        counted and may be too high.
        """
        is_told = started != NO_NUMBER and not self.p2p.met
        for op in self.collectives.ops:
            if op.has_own_number:
                state = int(op.number <= started) if is_told else -1
                if state != op.start:
                    op.start = state
                    yield op.record, state

    def overlook(self) -> None:
        """Note that the back end returned no status of this group."""
        self._misses += 1

    def take_undecidable(self) -> list[int]:
        """Take out the ops whose end will not be known, and return their records."""
        if self._misses >= _MOST_MISSES:
            return self.take(lambda op: True)
        if self.collectives.met and self.p2p.met:
            return self.take(lambda op: self._moves - op.moves >= _MOST_MOVES)
        return []

    def take(self, wanted: Callable[[_Op], bool]) -> list[int]:
        return self.collectives.take(wanted) + self.p2p.take(wanted)


class DeviceStatus:
    """Ends the records of ops on devices. Used from one thread, which calls ``poll``."""

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
        self._waiting: dict[int, _GroupOps] = {}
        self._groups: dict[int, weakref.ref[Any]] = {}
        self._new: set[int] = set()  # groups that were made since recording began, without ops yet

    def add_group(self, number: int, process_group: Any, new: bool) -> None:
        """Remember the group of an id, for as long as the group lives.

        ``new``: no op was issued on it before.
        """
        groups, new_groups = self._groups, self._new

        def forget(_: object) -> None:  # refers to no recording, which a cycle would keep mapped
            groups.pop(number, None)
            new_groups.discard(number)

        groups[number] = weakref.ref(process_group, forget)
        if new:
            new_groups.add(number)

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
                for record, state in ops.starts(status[uid].started):
                    self._capture.start_device_ops([record], now_ns if state > 0 else state)
            else:
                ops.overlook()
            self._capture.end_device_ops(ops.take_undecidable(), 0)
            if ops.is_idle and number not in self._groups:
                del self._waiting[number]

    def close(self) -> None:
        """Look once more. Close the newest ops, too, because they may have completed unseen.

        An op that has been in flight for longer stays in flight: it may be why the job ends.
        """
        self.poll()
        since_ns = self._clock_ns() - _SETTLED_NS
        for ops in self._waiting.values():
            self._capture.end_device_ops(ops.take(lambda op: op.noted_ns >= since_ns), 0)

    def _take(self) -> None:
        now_ns = self._clock_ns()
        for op in self._capture.take_device_ops():
            ops = self._waiting.get(op.group)
            if ops is None:
                ops = self._waiting[op.group] = _GroupOps(op.group in self._new)
                self._new.discard(op.group)
            self._capture.end_device_ops(ops.add(op, now_ns), 0)


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


def _uid(reference: weakref.ref[Any] | None) -> int | None:
    """Return the number that a group's back end for its device has in the status."""
    process_group = reference() if reference is not None else None
    if process_group is None:
        return None
    for device in process_group._device_types:
        if device.type != "cpu":
            try:
                uid = getattr(process_group._get_backend(device), "uid", None)
            except RuntimeError:  # no back end for this device; other groups are still looked at
                continue
            if uid is not None:
                return int(uid)
    return None
