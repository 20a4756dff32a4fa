"""Keep a sink that fails from harming training and the other sinks: retry it, then drop it.

A sink fails for two kinds of reasons. Some pass: a disk that is full until a job has rotated its
files, a collector that restarts. So a failed batch is kept and written again after each of
``RETRY_SECONDS``. Others do not pass, and without an end to the retries, the batches would grow
until the process has no memory left.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from rankcall.ring.reader import Ring
from rankcall.trace.descriptions import Descriptions
from rankcall.trace.sinks.protocols import AtIssue, Origin, RecordSink, Sink

logger = logging.getLogger("rankcall.trace")

RETRY_SECONDS = (0.2, 1.0, 5.0)
_MOST_KEPT = 1 << 16  # ops in the queue of one sink while it fails


class Guarded:
    """One sink and the batches it has not taken yet. No exception of the sink leaves this class."""

    def __init__(
        self, sink: Sink | RecordSink, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.sink = sink
        self.name = type(sink).__name__
        self.is_dropped = False
        self._clock = clock
        self._is_open = False
        self.takes_records = isinstance(sink, RecordSink)
        self.takes_descriptions = not isinstance(sink, (RecordSink, AtIssue))
        self._take: Callable[[Any], None] = (
            sink.write_records if isinstance(sink, RecordSink) else sink.write
        )
        self._queue: deque[Descriptions | Ring] = deque()
        self._failures = 0
        self._not_before = 0.0
        self._lost = 0

    def deliver(self, batch: Descriptions | Ring | None, origin: Origin) -> None:
        """Queue a batch and write the queue, unless the sink failed a moment ago."""
        if self.is_dropped:
            return
        if batch is not None and _size(batch):
            self._queue.append(batch)
            self._bound()
        if self._clock() >= self._not_before:
            self._try(origin)

    def close(self, origin: Origin) -> None:
        """Try once more to write the queue, then close the sink."""
        if self.is_dropped or not (self._is_open or self._queue):
            return
        self._try(origin)
        if self._queue and not self.is_dropped:
            self._drop(self._error)
        elif self._is_open and not self.is_dropped:
            try:
                self.sink.close()
            except BaseException as error:
                logger.error("the trace sink %s could not be closed: %r", self.name, error)

    def _try(self, origin: Origin) -> None:
        try:
            if not self._is_open:
                self.sink.open(origin)
                self._is_open = True
            while self._queue:
                self._take(self._queue[0])
                self._queue.popleft()
        except BaseException as error:  # SystemExit, too: a sink must not end the trace thread
            self._failed(error)
        else:
            self._failures = 0

    def _failed(self, error: BaseException) -> None:
        self._error = error
        if self._failures >= len(RETRY_SECONDS):
            self._drop(error)
            return
        self._not_before = self._clock() + RETRY_SECONDS[self._failures]
        self._failures += 1

    def _drop(self, error: BaseException) -> None:
        self.is_dropped = True
        lost = self._lost + sum(map(_size, self._queue))
        self._queue.clear()
        # An OSError's message says it all (which file, why). Anything else is a defect of the sink.
        detail = None if isinstance(error, OSError) else error
        logger.error(
            "the trace sink %s failed %d times and is dropped (%d ops not written); "
            "training and the other sinks go on: %s: %s",
            self.name,
            self._failures + 1,
            lost,
            type(error).__name__,
            error,
            exc_info=detail,
        )
        if self._is_open:
            try:
                self.sink.close()
            except BaseException:  # the failure that dropped the sink is logged already
                logger.debug("closing the dropped sink %s failed", self.name, exc_info=True)

    def _bound(self) -> None:
        """Drop the oldest batches if the queue of a sink that keeps failing grows too long."""
        while len(self._queue) > 1 and sum(map(_size, self._queue)) > _MOST_KEPT:
            self._lost += _size(self._queue.popleft())


def _size(batch: Descriptions | Ring) -> int:
    return len(batch.records if isinstance(batch, Ring) else batch)
