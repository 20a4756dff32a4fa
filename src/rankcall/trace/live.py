"""Follow this process's recording and hand descriptions to sinks, from one thread.

The thread reads the ring twenty times a second, and more often if many ops end. It describes all
new records as one batch, column by column, so that the training thread gives up little of the GIL.
Hooks run on another thread, so that a slow sink does not delay a hook.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rankcall import background
from rankcall._handle import Removable
from rankcall._whole import Rows, joined, picked
from rankcall.capture import session
from rankcall.capture.events import LiveTables
from rankcall.capture.marks import Marks, Span
from rankcall.capture.tail import Flags, RingTail
from rankcall.record import RECORD
from rankcall.ring.header import parse_header
from rankcall.ring.layout import HEADER_BYTES
from rankcall.ring.reader import Ring
from rankcall.ring.tables import Tables
from rankcall.trace.describe import Describer
from rankcall.trace.descriptions import Descriptions, Teller
from rankcall.trace.order import Order
from rankcall.trace.sinks.base import AtIssue, Guarded, Origin, RecordSink, Sink
from rankcall.trace.switches import Switches

logger = logging.getLogger("rankcall.trace")

_TURN_SECONDS = 0.05
_SHARE = 0.25  # read the ring again before more than this share of it has been written
_REPEAT_SECONDS = 60.0
_GRACE_SECONDS = 0.06  # an op whose wait() has returned may be about to record its end
_NAP_SECONDS = 0.001
_NO_ROWS: Rows = np.empty(0, RECORD)


@dataclass
class _Followed:
    """A recording, and how far this thread has read it."""

    recording: session.Recording
    tail: RingTail
    tables: LiveTables
    order: Order = field(default_factory=Order)

    @classmethod
    def of(cls, recording: session.Recording, first: int = 0) -> _Followed:
        tail = RingTail(recording.ring, recording.geometry, first, hold_ns=0)
        return cls(recording, tail, LiveTables(recording))

    @property
    def is_busy(self) -> bool:
        """Whether an op is in flight, or a record is about to be complete."""
        return self.tail.has_open or self.tail.unsettled


class Trace(Removable):
    """Tracing that is switched on. ``remove()`` ends it; leaving it as a context manager does too.

    ``mode`` says which ops are described.
    """

    def __init__(
        self,
        switches: Switches,
        sinks: Sequence[Sink | RecordSink],
        span: Span | None,
        close: Callable[[], Any],
    ) -> None:
        self.mode = switches.mode
        self._switches = switches
        self._guards = [Guarded(sink) for sink in sinks]
        self._span = span
        self._close = close
        self._owner = f"trace {id(self):x}"
        self._wake = threading.Event()
        self._turned = threading.Condition()
        self._turns = 0
        self._stopping = False
        self._removed = False
        self._marks: Marks | None = None
        self._rest = _TURN_SECONDS
        self._looked_at = time.monotonic()
        self._missed, self._complain_at = 0, 0.0
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._followed: list[_Followed] = []
        self._thread = threading.Thread(target=self._run, name="rankcall-trace", daemon=True)

    @property
    def sinks(self) -> tuple[Sink | RecordSink, ...]:
        """The sinks, without those that were dropped because they failed."""
        return tuple(guard.sink for guard in self._guards if not guard.is_dropped)

    def start(self) -> None:
        """Trace ops that are issued from now on, and those in flight as they end."""
        marks = self._marks_at_issue()
        recording = session.claim(self._owner, None)
        self._followed = [_Followed.of(recording, recording.capture.counts()[0])]
        if marks is not None:
            self._marks = marks
            recording.capture.mark(marks)
        _remember(self)
        self._thread.start()

    def flush(self, timeout: float = 2.0) -> bool:
        """Wait until the sinks have every op that ended; return whether ``timeout`` was enough."""
        deadline = time.monotonic() + timeout
        self._await_turn(deadline)
        settled = time.monotonic() + _GRACE_SECONDS
        while self._is_busy() and time.monotonic() < min(settled, deadline):
            time.sleep(_NAP_SECONDS)
        return self._await_turn(deadline)

    def remove(self, timeout: float = 2.0) -> bool:
        """Deliver the rest, close the sinks and stop; return whether ``timeout`` was enough.

        Recording goes on only if another user of it remains. A second call does nothing.
        """
        if self._removed:
            return True
        self._removed = True
        _forget(self)
        if self._marks is not None:
            others = [trace._marks for trace in _live if trace._marks is not None]
            self._followed[-1].recording.capture.mark(others[-1] if others else None)
        self._stopping = True
        self._wake.set()
        ended = background.join(self._thread, timeout)
        self._close()
        session.drop(self._owner)
        return ended

    def in_flight(self) -> Descriptions:
        """Describe the ops that are in flight now. May be called from any thread."""
        recording = self._followed[-1].recording
        rows = RingTail(recording.ring, recording.geometry).open()
        describer = self._describer(recording)
        return describer.describe(rows, np.ones(len(rows), np.bool_), LiveTables(recording).now())

    def _marks_at_issue(self) -> Marks | None:
        """Return the functions to call at issue; None if no sink wants that or no tool listens."""
        for guard in self._guards:
            functions = guard.sink.functions() if isinstance(guard.sink, AtIssue) else None
            if functions is not None:
                switches = self._switches
                return Marks(functions, switches.gpu_serial, switches.vm_id, self._span)
        return None

    # --- on its thread ---

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(self._rest)
            self._wake.clear()
            self._turn_safely(last=False)
        self._drain()

    def _turn_safely(self, last: bool) -> None:
        try:
            self._turn(last)
        except Exception:
            logger.exception("the trace thread failed; it goes on")
        with self._turned:
            self._turns += 1
            self._turned.notify_all()

    def _drain(self) -> None:
        deadline = time.monotonic() + _GRACE_SECONDS
        self._turn_safely(last=False)
        while self._is_busy() and time.monotonic() < deadline:
            time.sleep(_NAP_SECONDS)
            self._turn_safely(last=False)
        self._turn_safely(last=True)
        origin = self._origin()
        for guard in self._guards:
            guard.close(origin)

    def _turn(self, last: bool) -> None:
        self._follow_another()
        origin = self._origin()
        for followed in self._followed:
            records, descriptions = self._look(followed, last)
            if origin.rank < 0 and records is None and descriptions is None:
                continue  # this process does not know its rank yet
            for guard in self._guards:
                wanted = descriptions if guard.takes_descriptions else None
                guard.deliver(records if guard.takes_records else wanted, origin)
        earlier = [
            followed
            for followed in self._followed[:-1]
            if followed.is_busy or followed.order.waiting
        ]
        self._followed = [*earlier, self._followed[-1]]

    def _look(self, followed: _Followed, last: bool) -> tuple[Ring | None, Descriptions | None]:
        """Return the records that ended since the last call, and the descriptions that are due.

        With ``last``, the records of ops still in flight are also returned.
        """
        issued = followed.recording.capture.counts()[0]
        ended, missed = _ended(followed.tail, issued)
        self._note_load(len(ended), missed, followed.recording.geometry.capacity)
        awaited = followed.tail.awaited() if followed.tail.has_open else _NO_ROWS
        if not (len(ended) or len(awaited) or followed.order.waiting or missed):
            return None, None
        tables = followed.tables.now()
        records = joined([ended, awaited]) if last and len(awaited) else ended
        ring = self._ring(followed.recording, records, tables, missed)
        if not any(guard.takes_descriptions for guard in self._guards):
            return ring, None
        rows, in_flight = followed.order.take(ended, awaited, tables, time.monotonic_ns(), last)
        if not len(rows):
            return ring, None
        describer = self._describer(followed.recording)
        return ring, describer.describe(rows, in_flight, tables, missed)

    def _note_load(self, ended: int, missed: int, capacity: int) -> None:
        """Read again sooner if many ops end; log a warning if that was not soon enough."""
        now = time.monotonic()
        elapsed, self._looked_at = now - self._looked_at, now
        filled = max(ended + missed, 1) / capacity
        self._rest = min(_TURN_SECONDS, elapsed * _SHARE / filled)
        self._missed += missed
        if self._missed and now >= self._complain_at:
            logger.warning(
                "tracing fell behind: %d ops were overwritten before they were described; "
                "a larger ring (RANKCALL_CAPACITY) holds more", self._missed
            )  # fmt: skip
            self._missed, self._complain_at = 0, now + _REPEAT_SECONDS

    def _ring(
        self, recording: session.Recording, records: Rows, tables: Tables, missed: int
    ) -> Ring | None:
        """Return records as part of a ring; None if no sink takes records."""
        if not any(guard.takes_records for guard in self._guards):
            return None
        path = recording.path or Path("unnamed.ring")
        header = parse_header(bytes(recording.ring[:HEADER_BYTES]), str(path))
        return Ring(path, header, records, tables, missed)

    def _describer(self, recording: session.Recording) -> Describer:
        switches = self._switches
        teller = Teller(recording.rank(), switches.gpu_serial, switches.vm_id)
        return Describer(teller, self._epoch_ns, self.mode, self._span)

    def _origin(self) -> Origin:
        recording = self._followed[-1].recording
        identity = recording.identity
        return Origin(
            rank=identity.rank,
            world_size=identity.world_size,
            local_rank=identity.local_rank,
            attempt=identity.attempt,
            host=identity.host,
            run_dir=recording.run_dir,
            in_flight=self.in_flight,
        )

    def _follow_another(self) -> None:
        """Follow the current recording if it is not the one that is followed already."""
        current = session.current()
        if current is not None and current is not self._followed[-1].recording:
            self._followed.append(_Followed.of(current))
            if self._marks is not None:
                current.capture.mark(self._marks)
        elif self._marks is not None and self._marks.span is not None:
            self._followed[-1].recording.capture.learn_spans(self._marks)

    def _is_busy(self) -> bool:
        return any(followed.is_busy for followed in self._followed)

    def _await_turn(self, deadline: float) -> bool:
        """Wait for the end of a turn that began after this call."""
        with self._turned:
            wanted = self._turns + 2  # the turn under way may have read the ring already
            while self._turns < wanted and self._thread.is_alive():
                self._wake.set()
                if not self._turned.wait(max(0.0, deadline - time.monotonic())):
                    return False
        return self._turns >= wanted


def _ended(tail: RingTail, issued: int) -> tuple[Rows, int]:
    """Return the records that ended since the last call, and how many ops were missed."""
    ended: list[Rows] = []
    dropped = 0
    while (batch := tail.poll(issued)) is not None:
        ends: Flags = batch.ends
        ended.append(batch.rows if ends.all() else picked(batch.rows, ends))
        dropped += batch.dropped
    return joined(ended or [_NO_ROWS]), (dropped + 1) // 2  # each op drops a start and an end


# --- all traces that are switched on in this process ---

_live: list[Trace] = []
_registered = False


def live() -> tuple[Trace, ...]:
    """Return the traces that are switched on."""
    return tuple(_live)


def _remember(trace: Trace) -> None:
    global _registered
    _live.append(trace)
    if not _registered:
        _registered = True
        background.at_exit(_at_exit)
        os.register_at_fork(after_in_child=_in_forked_child)


def _forget(trace: Trace) -> None:
    if trace in _live:
        _live.remove(trace)


def _at_exit() -> None:
    for trace in list(_live):
        trace.remove()


def _in_forked_child() -> None:
    """Switch the parent's traces off: the child has no trace thread, and must not use the files."""
    for trace in _live:
        trace._removed = True
        trace._turned = threading.Condition()  # the parent's thread may have held the old one
    _inherited.extend(_live)
    _live.clear()


# The parent's traces, kept alive so that no destructor of a sink runs in a child.
_inherited: list[Trace] = []
