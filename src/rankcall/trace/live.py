"""Follow this process's recording and hand descriptions to sinks, from one thread.

It looks at the ring twenty times a second, or more often while much comes, and takes what has come
as one batch: described column by column, so that the thread that trains gives up little of the GIL.
A thread of its own, not that of the hooks: a sink that is slow must not hold up a hook.
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
_SHARE = 0.25  # of the ring that may be written between two looks, where that is sooner
_REPEAT_SECONDS = 60.0
_GRACE_SECONDS = 0.06  # an op that was waited for may be about to record its end
_NAP_SECONDS = 0.001
_NO_ROWS: Rows = np.empty(0, RECORD)


@dataclass
class _Followed:
    """A recording, and how far it was read."""

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
        """Whether an op is in flight, or more is known to come soon."""
        return self.tail.has_open or self.tail.unsettled


class Trace(Removable):
    """Tracing that is switched on. ``remove()`` ends it; leaving it as a context manager does too.

    ``mode`` is what is described, ``sinks`` are those that take it and were not dropped.
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
        """The sinks that take descriptions: those that were dropped are not among them."""
        return tuple(guard.sink for guard in self._guards if not guard.is_dropped)

    def start(self) -> None:
        """Begin with what is issued from now on (and the ends of what is in flight)."""
        marks = self._marks_at_issue()
        recording = session.claim(self._owner, None)
        self._followed = [_Followed.of(recording, recording.capture.counts()[0])]
        if marks is not None:
            self._marks = marks
            recording.capture.mark(marks)
        _remember(self)
        self._thread.start()

    def flush(self, timeout: float = 2.0) -> bool:
        """Wait until all ops that have ended are with the sinks; tell whether that was in time."""
        deadline = time.monotonic() + timeout
        self._await_turn(deadline)
        settled = time.monotonic() + _GRACE_SECONDS
        while self._is_busy() and time.monotonic() < min(settled, deadline):
            time.sleep(_NAP_SECONDS)
        return self._await_turn(deadline)

    def remove(self, timeout: float = 2.0) -> bool:
        """Hand over what there is, close the sinks, stop; tell whether all that was in time.

        Recording goes on only if something else asked for it. Removing twice does nothing.
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
        """Describe what is in flight now. May be called from any thread."""
        recording = self._followed[-1].recording
        rows = RingTail(recording.ring, recording.geometry).open()
        describer = self._describer(recording)
        return describer.describe(rows, np.ones(len(rows), np.bool_), LiveTables(recording).now())

    def _marks_at_issue(self) -> Marks | None:
        """Return what is to be called at issue, where a sink wants that and a tool listens."""
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
                continue  # whose they will be is not known yet
            for guard in self._guards:
                wanted = descriptions if guard.takes_descriptions else None
                guard.deliver(records if guard.takes_records else wanted, origin)
        earlier = [each for each in self._followed[:-1] if each.is_busy or each.order.waiting]
        self._followed = [*earlier, self._followed[-1]]

    def _look(self, followed: _Followed, last: bool) -> tuple[Ring | None, Descriptions | None]:
        """Return the records that ended since the last look, and describe those whose turn it is.

        ``last``: also the records of what is still in flight.
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
        """Look again sooner while much comes; say so where that was not soon enough."""
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
        """Return records as a part of a ring that was read, where a sink takes them."""
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
        who = recording.identity
        return Origin(
            who.rank, who.world_size, who.local_rank, who.attempt, who.host, recording.run_dir,
            self.in_flight,
        )  # fmt: skip

    def _follow_another(self) -> None:
        """Follow the recording that took the place of the last one, if there is such."""
        now = session.current()
        if now is not None and now is not self._followed[-1].recording:
            self._followed.append(_Followed.of(now))
            if self._marks is not None:
                now.capture.mark(self._marks)
        elif self._marks is not None and self._marks.span is not None:
            self._followed[-1].recording.capture.learn_spans(self._marks)

    def _is_busy(self) -> bool:
        return any(each.is_busy for each in self._followed)

    def _await_turn(self, deadline: float) -> bool:
        """Wait for a turn that has begun after this call."""
        with self._turned:
            wanted = self._turns + 2  # the one under way may have looked already
            while self._turns < wanted and self._thread.is_alive():
                self._wake.set()
                if not self._turned.wait(max(0.0, deadline - time.monotonic())):
                    return False
        return self._turns >= wanted


def _ended(tail: RingTail, issued: int) -> tuple[Rows, int]:
    """Return the records that ended since the last look, and how many ops were missed."""
    found: list[Rows] = []
    dropped = 0
    while (batch := tail.poll(issued)) is not None:
        ends: Flags = batch.ends
        found.append(batch.rows if ends.all() else picked(batch.rows, ends))
        dropped += batch.dropped
    return joined(found or [_NO_ROWS]), (dropped + 1) // 2  # of each a start and an end


# --- all that are on in this process ---

_live: list[Trace] = []
_registered = False


def live() -> tuple[Trace, ...]:
    """Return the traces that are on."""
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
    """Traces belong to the parent: its thread is not here, and its sinks' files are not ours."""
    for trace in _live:
        trace._removed = True
        trace._turned = threading.Condition()  # its thread may have held the old one
    _inherited.extend(_live)
    _live.clear()


_inherited: list[Trace] = []  # kept so that nothing of the parent's is torn down in a child
