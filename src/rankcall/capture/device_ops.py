"""The ops of a group on a device, and which of them are over, given what their back end tells.

ProcessGroupNCCL returns no Work from a synchronous collective, and neither back end has a future
for the ops of a coalescing block. These ops are not watched, and four rules tell that one is over:

* A synchronous collective runs in its caller's stream, and an op waits for the stream in which it
  is issued. So it is over once a watched op that was issued later in the same stream is. The same
  is taken for granted of a block, for which callers wait before they go on.
* The status has a number that only one op can have. A group counts collectives apart from sends and
  receives, so a number may belong to one of each. A number that was reached before the last look
  is not the one that is new.
* A send or receive in a block is over once a collective of its group is that was issued later, and
  a collective once such a block is: they use the group's communicator, which keeps their order.
* If it may be either of two ops, both of which are still waited for, what was issued up to the
  earlier of them is over, for the same reason.

What is still not known stays in flight, because it may be the op that hangs. If the number tells
nothing at an op's second look, the record says that its end is not known, until a later number does
tell; but the group's newest op is in flight if it has another number, because if anything hangs, it
is not over. An op is closed without an end only if the back end keeps no status of the group, or if
the recording ends.

On ProcessGroupNCCL2, the sends and receives of a block are closed without an end. Its completion
hook does tell the end of a block, but by the key of a Work that only the block's caller gets. Other
Works have keys that belong to no recorded op, too, so that a block's could only be guessed, and a
wrong guess would hide a hang.

The number of an op comes from its Work or from the back end's counter. Sends and receives in a
block have neither, and are counted: from the group's first op on, if all were seen, or from the
number that was enqueued last, if that was a block's and nothing follows. Otherwise, such an op has
completed once everything has that was enqueued by the next look.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

NO_NUMBER = -1
_MOST_MISSES = 3  # looks without a status of a group: its back end keeps none after all
_MOST_OPS = 1 << 16  # of a group, in case that its back end never says that any has completed


class GroupStatus(NamedTuple):
    """The numbers of a group's ops that were last enqueued, last found complete, and last started.

    A back end tells starts only if it is asked to (``TORCH_NCCL_ENABLE_TIMING=1``).
    """

    enqueued: int
    completed: int
    started: int = NO_NUMBER


class DeviceOp(NamedTuple):
    """An op that was enqueued on a device.

    Attributes:
        record: The index of its record, which grows in issue order.
        group: The side-table id of its group.
        number: Its sequence number in the back end, if that is known.
        p2p: Whether it is a send or a receive.
        block: The same for ops that were issued by one public call and may share a number.
        watched: Whether the future of its Work ends its record.
        stream: The caller's stream, under any number that no other stream has; 0: not known.
        in_stream: Whether the op runs in that stream.
    """

    record: int
    group: int
    number: int
    p2p: bool
    block: int
    watched: bool = False
    stream: int = 0
    in_stream: bool = False


@dataclass
class Op:
    """An op that is not known to have completed, unless ``ended``.

    ``looks`` counts the looks at the status since the op was issued.
    """

    noted: DeviceOp
    number: int
    noted_ns: int
    has_own_number: bool  # and not one that was counted
    is_sure: bool  # the number is its own or was counted, and is no upper bound
    looks: int = 0
    start: int = -1  # 1: begun, 0: not begun, -1: not known
    is_doubtful: bool = False  # it is not known whether it is over
    ended: bool = False

    @property
    def has_only_a_future(self) -> bool:
        """Whether numbers say nothing of it: messages to two peers keep no order."""
        return self.noted.watched and self.noted.p2p


@dataclass(eq=False)
class _Kind:
    """The collectives of a group, or its sends and receives, from the oldest in flight on.

    ``anchor`` is the number of the op before the oldest, if that is known.
    """

    anchor: int
    anchor_is_sure: bool = True  # and no upper bound
    ops: deque[Op] = field(default_factory=deque)
    met: bool = False  # whether the group issues this kind of op
    issued: int = NO_NUMBER  # the highest number so far
    newest_has_number: bool = False  # and needs no counting
    completed: int = NO_NUMBER  # the highest number that is known to have completed
    completed_before: int = NO_NUMBER  # the same at the last look
    last_over: int = -1  # the newest record that is known to be over
    last_block_over: int = -1  # the same of ops without a number of their own

    def add(self, op: Op) -> None:
        """Add an op. One of a block has the number behind the last one, if that is known for sure.

        All ops of a block have one number.
        """
        self.met = True
        if op.number == NO_NUMBER and op.noted.p2p and self.is_next_sure:
            last = self.ops[-1] if self.ops else None
            if last is None or last.noted.block != op.noted.block:
                op.number = (self.anchor if last is None else last.number) + 1
            else:
                op.number = last.number
            op.is_sure = True
        self.ops.append(op)
        self.issued = max(self.issued, op.number)
        self.newest_has_number = op.has_own_number

    def count_up_to(self, enqueued: int, *, is_same: bool) -> None:
        """Give numbers to the ops without one: ``enqueued`` is the last number of this kind.

        ``is_same``: it was the last number at the look before, too.
        """
        before, unknown = self.anchor, list[Op]()
        for op in self.ops:
            if op.number == NO_NUMBER:
                unknown.append(op)
            elif unknown:
                _count(unknown, before, op.number - 1)
                unknown = []
            if op.number != NO_NUMBER:
                before = op.number
        _count(unknown, before, enqueued)
        if is_same and all(op.looks > 1 for op in self.ops):
            self._count_back(enqueued)
        # If the newest op's own number is lower, the last number is that of an op of either kind
        # that was enqueued since the ops were taken, and that the next look will take.
        if not self.newest_has_number:
            self.issued = max(self.issued, enqueued)

    def _count_back(self, enqueued: int) -> None:
        """Number the ops from the last one on: nothing was noted or enqueued since it was."""
        number, block = enqueued + 1, NO_NUMBER
        for op in reversed(self.ops):
            number = op.number if op.has_own_number else number - (op.noted.block != block)
            op.number, op.is_sure, block = number, True, op.noted.block

    @property
    def is_next_sure(self) -> bool:
        """Whether it is known which number the next op will have."""
        if self.ops:
            return self.ops[-1].is_sure
        return self.anchor != NO_NUMBER and self.anchor_is_sure

    @property
    def is_sure(self) -> bool:
        """Whether the numbers of all ops that are not over are known, and that of the next one."""
        return self.is_next_sure and all(op.is_sure for op in self.ops)

    def may_have_completed(self, number: int, is_new: bool) -> bool:
        """Tell whether the op completed last can be the one of this kind with this number.

        ``is_new``: another number was the last one at the look before.
        """
        if not self.is_sure:
            return True
        if is_new and number <= self.completed_before:
            return False  # it was completed before the op that was the last one then
        if not is_new and any(
            op.number == number and op.has_only_a_future for op in self.in_flight()
        ):
            return False  # its future would have ended it since
        return self.completed <= number <= self.issued

    def in_flight(self) -> Iterator[Op]:
        """Yield the ops that are not known to be over, oldest first."""
        return (op for op in self.ops if not op.ended)

    def is_past(self, number: int) -> bool:
        """Tell whether no op is in flight that would be over if the last one had this number.

        The number of a single message says nothing of a block.
        """
        return self.is_sure and not any(
            op.noted.p2p or op.number <= number
            for op in self.in_flight()
            if not op.has_only_a_future
        )

    def find(self, number: int) -> DeviceOp | None:
        """Return the last op of this number, if the status is what tells that it is over."""
        newest = None
        for op in self.in_flight():
            if op.number == number and not op.has_only_a_future:
                newest = op.noted
        return newest

    def complete(self, number: int, up_to: int = -1) -> list[int]:
        """End the ops up to a number, and those up to a record; return the records."""
        ended = []
        for op in self.in_flight():
            is_over = NO_NUMBER < op.number <= number or op.noted.record <= up_to
            if is_over and not op.has_only_a_future:
                self.end(op)
                ended.append(op.noted.record)
        self.drop_ended()
        return ended

    def end(self, op: Op) -> None:
        """Note that an op is over."""
        op.ended = True
        if op.is_sure:
            self.completed = max(self.completed, op.number)
        self.last_over = max(self.last_over, op.noted.record)
        if not (op.has_own_number or op.noted.watched):
            self.last_block_over = max(self.last_block_over, op.noted.record)

    def end_in_stream(self, watched: Op) -> list[int]:
        """End the ops for which the stream of a watched op that is over has waited before it."""
        over = []
        for op in self.in_flight():
            if op.noted.record > watched.noted.record:
                break
            waited_for = op.noted.in_stream or (op.noted.p2p and not op.has_own_number)
            if waited_for and op.noted.stream == watched.noted.stream != 0:
                over.append(op)
        for op in over:
            self.end(op)
        self.drop_ended()
        return [op.noted.record for op in over]

    def end_uncounted(self, up_to: int) -> list[int]:
        """End the ops up to a record that have no number of their own; return the records."""
        over = [
            op
            for op in self.in_flight()
            if not (op.has_own_number or op.noted.watched) and op.noted.record <= up_to
        ]
        for op in over:
            self.end(op)
        self.drop_ended()
        return [op.noted.record for op in over]

    def drop_ended(self) -> None:
        """Forget the ops in front of the oldest one in flight."""
        while self.ops and self.ops[0].ended:
            passed = self.ops.popleft()
            self.anchor, self.anchor_is_sure = passed.number, passed.is_sure

    def take(self, wanted: Callable[[Op], bool]) -> list[DeviceOp]:
        """Take out the ops that are wanted, and return them."""
        taken = [op for op in self.in_flight() if wanted(op)]
        if taken:
            self.ops = deque(op for op in self.ops if op.ended or not wanted(op))
            self.anchor = NO_NUMBER
        return [op.noted for op in taken]


def _count(ops: list[Op], before: int, last: int) -> None:
    """Number ops that were issued after ``before``, up to ``last``.

    An op that was noted since the last look may be enqueued only later, when its coalescing block
    ends. So an op that was noted earlier, and that counting does not settle, gets the last number.
    """
    blocks = list(dict.fromkeys(op.noted.block for op in ops))
    if before != NO_NUMBER and len(blocks) == last - before:
        numbers = {block: before + 1 + at for at, block in enumerate(blocks)}
        for op in ops:
            op.number, op.is_sure = numbers[op.noted.block], True
        return
    for op in ops:
        if op.looks > 1:
            op.number = last


class GroupOps:
    """The ops of one group on a device. ``new``: all ops since the group was made are seen."""

    def __init__(self, new: bool) -> None:
        first = 0 if new else NO_NUMBER
        self.collectives, self.p2p = _Kind(first), _Kind(first)
        # The number completed last when recording began, which may be that of an op of either kind.
        self._number_before: int | None = NO_NUMBER if new else None
        self._last_added = self.collectives
        self._newest = NO_NUMBER  # the block of the op that was added last
        self._blocks_over = -1  # up to this record, collectives are over because a block is
        self._misses = 0
        self._completed = self._enqueued = NO_NUMBER
        self._told: tuple[_Kind, int] | None = None  # a number of which was known whose it was
        self._is_undecided = False  # the last number completed may be one op's or another one's

    @property
    def is_idle(self) -> bool:
        return not self.collectives.ops and not self.p2p.ops

    @property
    def needs_status(self) -> bool:
        """Whether an op is in flight that the status may end."""
        kinds = self.collectives, self.p2p
        return any(not op.has_only_a_future for kind in kinds for op in kind.in_flight())

    def add(self, op: Op) -> list[DeviceOp]:
        """Add an op; return the oldest if there are too many, and no future will end it."""
        kind = self._last_added = self.p2p if op.noted.p2p else self.collectives
        self._newest = op.noted.block
        kind.add(op)
        if len(kind.ops) <= _MOST_OPS:
            return []
        kind.anchor = NO_NUMBER
        oldest = kind.ops.popleft()
        return [] if oldest.ended or oldest.noted.watched else [oldest.noted]

    def settle(self, watched: Op) -> list[int]:
        """Note that a watched op is over; return the records of those that end with it."""
        kind = self.p2p if watched.noted.p2p else self.collectives
        kind.end(watched)
        kind.drop_ended()
        ended = self.collectives.end_in_stream(watched) + self.p2p.end_in_stream(watched)
        return ended + self._end_blocks()

    def complete(self, status: GroupStatus) -> list[int]:
        """Return the records that end, given the group's status."""
        number, is_new = status.completed, status.completed != self._completed
        self._misses, self._completed = 0, number
        for op in (*self.collectives.ops, *self.p2p.ops):
            op.looks += 1
        # The op enqueued last was of the kind that was noted last, so that is the kind counted.
        self._last_added.count_up_to(status.enqueued, is_same=status.enqueued == self._enqueued)
        self._enqueued = status.enqueued
        possible = self._possible(number, is_new)
        last = [newest.record for kind in possible if (newest := kind.find(number)) is not None]
        ended: list[int] = []
        if possible == [self.collectives] or (possible == [self.p2p] and last):
            is_exact = possible[0].is_sure or possible[0] is self.collectives
            self._told = (possible[0], number) if is_exact else None
            ended = possible[0].complete(number)
        elif possible and len(last) == len(possible):
            for kind in possible:
                ended += kind.complete(NO_NUMBER, up_to=min(last))
        is_told = len(possible) == 1 and self._told == (possible[0], number)
        is_old = bool(possible) and all(kind.is_past(number) for kind in possible)
        self._is_undecided = number > 0 and not (ended or is_told or is_old)
        for kind in (self.collectives, self.p2p):
            kind.completed_before = kind.completed
        return ended + self._end_blocks()

    def _possible(self, number: int, is_new: bool) -> list[_Kind]:
        """Return the kinds of which an op may have the number that was completed last.

        None, if the group has sent messages, and the number was there when recording began.
        """
        if self._number_before is None:
            self._number_before = number
        if number != self._number_before:
            self._number_before = NO_NUMBER
        elif self.p2p.met:
            return []
        kinds = [kind for kind in (self.collectives, self.p2p) if kind.met]
        if len(kinds) == 1:
            return kinds
        return [kind for kind in kinds if kind.may_have_completed(number, is_new)]

    def _end_blocks(self) -> list[int]:
        """End blocks that were issued before a collective that is over, and the other way round.

        A block's messages use the communicator of the group, as its collectives do, which keeps
        their order. A message by itself uses one that it has with its peer.
        """
        ended: list[int] = []
        if self._blocks_over < self.p2p.last_block_over:
            self._blocks_over = self.p2p.last_block_over
            ended = self.collectives.complete(NO_NUMBER, up_to=self._blocks_over)
        return ended + self.p2p.end_uncounted(self.collectives.last_over)

    def starts(self, started: int) -> Iterator[tuple[int, int]]:
        """Yield records with what is new of their starts: 1 begun, 0 not begun, -1 not known.

        ``started`` is the number of the op that began last. It may be of either kind, so it tells
        something only in a group without messages. It tells nothing of an op whose own number was
        counted and may be too high.
        """
        is_told = started != NO_NUMBER and not self.p2p.met
        for op in self.collectives.in_flight():
            if op.has_own_number:
                state = int(op.number <= started) if is_told else -1
                if state != op.start:
                    op.start = state
                    yield op.noted.record, state

    def overlook(self, *, for_good: bool) -> None:
        """Note that the back end returned no status of this group, and whether it keeps none."""
        self._misses = _MOST_MISSES if for_good else self._misses + 1

    def doubts(self) -> tuple[list[int], list[int]]:
        """Return the records that may be over from now on, and those that no longer may.

        If nothing tells whose the last number completed is, only the group's newest op is not in
        doubt, unless the number can be its own: if anything hangs, it is not over.
        """
        doubtful: list[int] = []
        certain: list[int] = []
        for op in (*self.collectives.in_flight(), *self.p2p.in_flight()):
            is_doubtful = self._is_undecided and op.looks > 1 and not self._must_be_open(op)
            if is_doubtful != op.is_doubtful and not op.noted.watched:
                op.is_doubtful = is_doubtful
                (doubtful if is_doubtful else certain).append(op.noted.record)
        return doubtful, certain

    def _must_be_open(self, op: Op) -> bool:
        return op.noted.block == self._newest and op.is_sure and op.number != self._completed

    def take_undecidable(self) -> list[DeviceOp]:
        """Take out the ops whose end will not be known, and return them."""
        if self._misses >= _MOST_MISSES:
            return self.take(lambda op: not op.noted.watched)
        return []

    def take(self, wanted: Callable[[Op], bool]) -> list[DeviceOp]:
        return self.collectives.take(wanted) + self.p2p.take(wanted)
