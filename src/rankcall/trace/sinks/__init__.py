"""The protocols of sinks, sinks by name, and the guard around a sink that fails.

Each sink is one module of this package, a class with the methods of ``Sink`` or ``RecordSink``. A
sink that can be made without arguments has a ``sink_name``, by which ``enable(sinks=[...])`` finds
it. What several sinks share is here, too.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rankcall.capture.marks import Functions
from rankcall.errors import ExtraMissingError
from rankcall.ring.reader import Ring
from rankcall.trace.descriptions import Description, Descriptions

logger = logging.getLogger("rankcall.trace")

RETRY_SECONDS = (0.2, 1.0, 5.0)
_MOST_KEPT = 1 << 16
ENTRY_POINTS = "rankcall.sinks"  # the group of entry points by which other packages offer sinks


@dataclass(frozen=True)
class Origin:
    """The rank that the descriptions come from. ``in_flight`` may be called from any thread."""

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

    If ``open`` or ``write`` raises, rankcall calls it again with the same argument, a few times.
    Then it drops the sink and logs that once. So a ``write`` that raises should leave nothing
    written.
    """

    def open(self, origin: Origin) -> None:
        """Prepare. Called once before the first ``write``, as soon as the rank is known."""

    def write(self, descriptions: Descriptions) -> None:
        """Take the next descriptions: iterate over them, or use their columns, frame or lines."""

    def close(self) -> None:
        """Finish. Called once after ``open``, even if the sink is dropped."""


@runtime_checkable
class RecordSink(Protocol):
    """A sink that takes the records themselves, as they end, in every mode."""

    def open(self, origin: Origin) -> None:
        """Prepare; see ``Sink``."""

    def write_records(self, ring: Ring) -> None:
        """Take the next records of this rank, with the side tables that give names to their ids."""

    def close(self) -> None:
        """Finish; see ``Sink``."""


@runtime_checkable
class AtIssue(Protocol):
    """A sink whose C functions are called on the issuing thread. It gets no descriptions.

    ``enable`` calls ``functions`` once.
    """

    def functions(self) -> Functions | None:
        """Return the functions to call at issue, or None."""


class MemorySink:
    """Keeps descriptions in a list, for tests."""

    def __init__(self) -> None:
        self.descriptions: list[Description] = []
        self.origin: Origin | None = None
        self.closed = False

    def open(self, origin: Origin) -> None:
        """Keep the origin."""
        self.origin = origin

    def write(self, descriptions: Descriptions) -> None:
        """Keep the descriptions."""
        self.descriptions.extend(descriptions)

    def close(self) -> None:
        """Set ``closed``."""
        self.closed = True


def make_sink(name: str) -> Sink | RecordSink:
    """Make the sink of a name, with its defaults.

    Raises ``ValueError`` for an unknown name (the message lists the known ones), ``TypeError`` if
    an entry point makes an object that is not a sink, and any error of the sink's constructor.
    """
    makers = _own_sinks()
    if name not in makers:
        offered = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
        if name not in offered:
            names = ", ".join(sorted({*makers, *offered}))
            raise ValueError(f"no trace sink {name!r}: one of {names}")
        makers[name] = offered[name].load()
    sink = makers[name]()
    if not isinstance(sink, (Sink, RecordSink)):
        raise TypeError(f"the sink {name!r} has no open, write and close: {type(sink).__name__}")
    return sink


def _own_sinks() -> dict[str, Callable[[], Any]]:
    """Return the classes in this package that have a ``sink_name``, by that name."""
    names = [
        module_info.name
        for module_info in pkgutil.iter_modules(__path__)
        if module_info.name[0] != "_"
    ]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return {
        value.sink_name: value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type)
        and value.__module__ == module.__name__
        and hasattr(value, "sink_name")
    }


def optional_module(module: str, extra: str) -> Any:
    """Return a module of an optional package.

    Raises ``ExtraMissingError``; it names the pip extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ExtraMissingError(
            f"this sink needs {module}: pip install 'rankcall[{extra}]'"
        ) from error


def load_polars() -> None:
    """Import Polars now: a later import, on the trace thread, would hold the GIL in training."""
    importlib.import_module("polars")


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
