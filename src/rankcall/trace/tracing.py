"""Subscribe to what happens in this process, and hand descriptions of it to sinks.

The trace thread is called twenty times a second, and more often if many ops end. It describes all
new records as one batch, column by column, so that the training thread gives up little of the
GIL.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rankcall import background
from rankcall.capture import session
from rankcall.capture.marks import Marks, Span
from rankcall.capture.recording import Recording
from rankcall.durations import Duration, seconds
from rankcall.errors import warn_renamed
from rankcall.events.dispatch import NO_HURRY, Delivery, EventSource, Subscription, dispatcher
from rankcall.handles import Handle
from rankcall.record import Rows, concat_rows, take_rows
from rankcall.ring.follower import NO_ROWS, Batch, LiveTables, RingView
from rankcall.ring.layout import HEADER_BYTES, parse_header
from rankcall.ring.reader import Ring
from rankcall.ring.tables import Tables
from rankcall.trace.describer import Describer
from rankcall.trace.descriptions import NOTHING, Descriptions, Teller
from rankcall.trace.order import Order
from rankcall.trace.sinks import AtIssue, Origin, RecordSink, Sink
from rankcall.trace.sinks.guard import Guarded
from rankcall.trace.switches import Switches

logger = logging.getLogger("rankcall.trace")

_REPEAT_SECONDS = 60.0  # between two warnings that tracing fell behind


class Trace(Handle):
    """Tracing that is switched on. ``stop()`` ends it, and so does the end of a ``with`` block.

    ``mode`` says which ops are described.
    """

    name = "trace"  # of its thread
    wants_in_flight = True

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
        self._is_stopped = False
        self._marks: Marks | None = None
        self._missed, self._complain_at = 0, 0.0
        # Read once: if the wall clock is set while the job runs, times of one trace still agree.
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._orders: dict[EventSource, Order] = {}
        self._recording: Recording | None = None
        self._subscription: Subscription | None = None

    @property
    def sinks(self) -> tuple[Sink | RecordSink, ...]:
        """The sinks, without those that were dropped because they failed."""
        return tuple(guard.sink for guard in self._guards if not guard.is_dropped)

    def start(self) -> None:
        """Trace ops that are issued from now on, and those in flight as they end."""
        self._marks = self._marks_at_issue()
        self._subscription = dispatcher.subscribe(self)
        _remember(self)
        recording = session.current()
        if recording is not None:
            self._follow(recording)

    def flush(self, timeout: Duration = 2.0) -> bool:
        """Wait until the sinks have every op that ended; return whether ``timeout`` was enough."""
        limit_s = seconds(timeout, "timeout", zero=True)
        return self._subscription is None or self._subscription.flush(limit_s)

    def stop(self, timeout: Duration = 2.0) -> bool:
        """Deliver the rest, close the sinks and stop; return whether ``timeout`` was enough.

        Recording goes on only if another user of it remains. A second call does nothing.
        """
        limit_s = seconds(timeout, "timeout", zero=True)
        if self._is_stopped or self._subscription is None:
            return True
        self._is_stopped = True
        _forget(self)
        if self._marks is not None and self._recording is not None:
            others = [trace._marks for trace in _live if trace._marks is not None]
            self._recording.capture.mark(others[-1] if others else None)
        ended = self._subscription.close(limit_s)
        self._close()
        return ended

    def remove(self, timeout: Duration = 2.0) -> bool:
        """Call ``stop(timeout)``, by its name of version 0.1."""
        warn_renamed("Trace.remove()", "Trace.stop()")
        return self.stop(timeout)

    def in_flight(self) -> Descriptions:
        """Describe the ops that are in flight now. May be called from any thread."""
        recording = self._recording
        if recording is None:
            return NOTHING
        rows = RingView(recording.ring, recording.geometry).unfinished()
        tables = LiveTables(recording.ring, recording.geometry).now()
        return self._describer(recording).describe(rows, np.ones(len(rows), np.bool_), tables)

    def _marks_at_issue(self) -> Marks | None:
        """Return the functions to call at issue; None if no sink wants that or no tool listens."""
        for guard in self._guards:
            functions = guard.sink.functions() if isinstance(guard.sink, AtIssue) else None
            if functions is not None:
                switches = self._switches
                return Marks(functions, switches.gpu_serial, switches.vm_id, self._span)
        return None

    # The rest runs on the trace's own thread.

    def wake_at(self) -> int:
        """Return ``NO_HURRY``."""
        return NO_HURRY

    def take(self, deliveries: list[Delivery], is_last: bool) -> None:
        """Hand what ended to the sinks, and the descriptions that are due.

        The last time, ops in flight are handed over as well.
        """
        if not deliveries:
            return
        self._follow(deliveries[-1].source.recording)
        origin = self._origin()
        without_news = [
            Delivery(source, (), NO_ROWS)
            for source in self._orders.keys() - {delivery.source for delivery in deliveries}
        ]
        for delivery in (*deliveries, *without_news):
            records, descriptions = self._look(delivery, is_last)
            if origin.rank < 0 and records is None and descriptions is None:
                continue  # this process does not know its rank yet
            for guard in self._guards:
                wanted = descriptions if guard.takes_descriptions else None
                guard.deliver(records if guard.takes_records else wanted, origin)
        followed = {delivery.source for delivery in deliveries}
        self._orders = {
            source: order
            for source, order in self._orders.items()
            if source in followed or order.waiting
        }

    def finish(self) -> None:
        """Close the sinks."""
        origin = self._origin()
        for guard in self._guards:
            guard.close(origin)

    def _look(self, delivery: Delivery, is_last: bool) -> tuple[Ring | None, Descriptions | None]:
        """Return the records that ended, and the descriptions that are due."""
        source, batches, in_flight = delivery
        order = self._orders.setdefault(source, Order())
        ended, missed = _ended(batches)
        self._note_missed(missed)
        if not (len(ended) or len(in_flight) or order.waiting or missed):
            return None, None
        tables = source.tables.now()
        records = concat_rows([ended, in_flight]) if is_last and len(in_flight) else ended
        ring = None
        if any(guard.takes_records for guard in self._guards):
            ring = _as_ring(source.recording, records, tables, missed)
        if not any(guard.takes_descriptions for guard in self._guards):
            return ring, None
        rows, issued = order.take(ended, in_flight, tables, time.monotonic_ns(), is_last)
        if not len(rows):
            return ring, None
        describer = self._describer(source.recording)
        return ring, describer.describe(rows, issued, tables, missed)

    def _note_missed(self, missed: int) -> None:
        """Log a warning if ops were overwritten before they were read, at most once a minute."""
        self._missed += missed
        now = time.monotonic()
        if self._missed and now >= self._complain_at:
            logger.warning(
                "tracing fell behind: %d ops were overwritten before they were described; "
                "a larger ring (RANKCALL_CAPACITY) holds more",
                self._missed,
            )
            self._missed, self._complain_at = 0, now + _REPEAT_SECONDS

    def _describer(self, recording: Recording) -> Describer:
        switches = self._switches
        teller = Teller(recording.rank(), switches.gpu_serial, switches.vm_id)
        return Describer(teller, self._epoch_ns, self.mode, self._span)

    def _origin(self) -> Origin:
        assert self._recording is not None
        identity = self._recording.identity
        return Origin(
            rank=identity.rank,
            world_size=identity.world_size,
            local_rank=identity.local_rank,
            attempt=identity.attempt,
            host=identity.host,
            run_dir=self._recording.run_dir,
            in_flight=self.in_flight,
        )

    def _follow(self, newest: Recording) -> None:
        """Take a recording for the current one, and mark its ops, too."""
        if newest is not self._recording:
            self._recording = newest
            if self._marks is not None:
                newest.capture.mark(self._marks)
        elif self._marks is not None and self._marks.span is not None:
            newest.capture.learn_spans(self._marks)


def _ended(batches: Sequence[Batch]) -> tuple[Rows, int]:
    """Return the records that ended, and how many ops were missed."""
    ended = [
        batch.rows if batch.ends.all() else take_rows(batch.rows, batch.ends) for batch in batches
    ]
    dropped = sum(batch.dropped for batch in batches)
    return concat_rows(ended or [NO_ROWS]), (dropped + 1) // 2  # each op drops a start and an end


def _as_ring(recording: Recording, records: Rows, tables: Tables, missed: int) -> Ring:
    """Return records as part of a ring, which is what record sinks take."""
    path = recording.path or Path("unnamed.ring")
    header = parse_header(bytes(recording.ring[:HEADER_BYTES]), str(path))
    return Ring(path, header, records, tables, missed)


_live: list[Trace] = []  # those that are switched on in this process
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
        trace.stop()


def _in_forked_child() -> None:
    """Switch the parent's traces off: the child has no trace thread, and must not use the files.

    The dispatcher keeps them alive, so that no destructor of a sink runs in the child.
    """
    for trace in _live:
        trace._is_stopped = True
        trace._subscription = None
    _live.clear()
