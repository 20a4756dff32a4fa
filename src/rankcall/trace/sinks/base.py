"""What a sink is, what it is told at first, and the guard that keeps a failing one from harm."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rankcall.capture.marks import Functions
from rankcall.ring.reader import Ring
from rankcall.trace.descriptions import Description, Descriptions

logger = logging.getLogger("rankcall.trace")

RETRY_SECONDS = (0.2, 1.0, 5.0)
_MOST_KEPT = 1 << 16


@dataclass(frozen=True)
class Origin:
    """Whose descriptions a sink is going to get. ``in_flight`` may be called from any thread."""

    rank: int
    world_size: int
    local_rank: int
    attempt: int
    host: str
    run_dir: Path | None
    in_flight: Callable[[], Descriptions]


@runtime_checkable
class Sink(Protocol):
    """Takes descriptions. All three methods run on rankcall's trace thread, one at a time.

    What ``open`` or ``write`` raises is not the end: the same is tried again, a few times, then the
    sink is dropped and that is logged once. So a ``write`` that raises should have written nothing.
    """

    def open(self, origin: Origin) -> None:
        """Prepare; called once before the first ``write``, as soon as the rank is known."""

    def write(self, descriptions: Descriptions) -> None:
        """Take the next descriptions: iterate for dicts, or use their columns, frame or lines."""

    def close(self) -> None:
        """Finish. Called once after ``open``, also when the sink is dropped."""


@runtime_checkable
class RecordSink(Protocol):
    """A sink that takes the records themselves, as they end, whatever the mode is."""

    def open(self, origin: Origin) -> None:
        """Prepare; see ``Sink``."""

    def write_records(self, ring: Ring) -> None:
        """Take the next records of this rank, with what names their numbers."""

    def close(self) -> None:
        """Finish; see ``Sink``."""


@runtime_checkable
class AtIssue(Protocol):
    """A sink that is told on the issuing thread, by C functions, and gets no descriptions.

    Asked once, within ``enable``.
    """

    def functions(self) -> Functions | None:
        """Return what to call at issue; None for nothing."""


class MemorySink:
    """Keeps descriptions in a list, for tests."""

    def __init__(self) -> None:
        self.descriptions: list[Description] = []
        self.origin: Origin | None = None
        self.closed = False

    def open(self, origin: Origin) -> None:
        """Note whose descriptions they are."""
        self.origin = origin

    def write(self, descriptions: Descriptions) -> None:
        """Keep them."""
        self.descriptions.extend(descriptions)

    def close(self) -> None:
        """Note that it is over."""
        self.closed = True


class Guarded:
    """One sink with what it has not taken yet. Nothing it raises gets out."""

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
        """Hand over a batch, after those that are left from before, unless it is too soon."""
        if self.is_dropped:
            return
        if batch is not None and _size(batch):
            self._queue.append(batch)
            self._bound()
        if self._clock() >= self._not_before:
            self._try(origin)

    def close(self, origin: Origin) -> None:
        """Try once more to hand over what is left, then close the sink."""
        if self.is_dropped:
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
        except BaseException as error:
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
        detail = None if isinstance(error, OSError) else error
        logger.error(
            "the trace sink %s failed %d times and is dropped (%d ops not written); "
            "training and the other sinks go on: %s: %s",
            self.name, self._failures + 1, lost, type(error).__name__, error, exc_info=detail,
        )  # fmt: skip
        if self._is_open:
            try:
                self.sink.close()
            except BaseException:  # it has been reported
                logger.debug("closing the dropped sink %s failed", self.name, exc_info=True)

    def _bound(self) -> None:
        """Let go of the oldest where a sink that is to be tried again would keep too many."""
        while len(self._queue) > 1 and sum(map(_size, self._queue)) > _MOST_KEPT:
            self._lost += _size(self._queue.popleft())


def _size(batch: Descriptions | Ring) -> int:
    return len(batch.records if isinstance(batch, Ring) else batch)
