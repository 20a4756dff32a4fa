"""Deliver what happened to hooks, from one thread that the training thread never waits for."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from rankcall import background
from rankcall.capture import session
from rankcall.capture.events import StatusMaker
from rankcall.capture.tail import Batch, RingTail

logger = logging.getLogger("rankcall.hooks")

Hook = Callable[[Any], object]
_NAP_SECONDS = 0.001
_IDLE_SECONDS = 0.5
_DRAIN_SECONDS = 2.0
_REPEAT_SECONDS = 60.0
_OWN_FAILURES = 10
_OWN_FAILURE_SECONDS = 1.0
_GRACE_SECONDS = 0.06  # longer than an end is held back


def _nothing(*_: object) -> None:
    """Stand in for a hook that was removed."""


class FailureLog:
    """Calls a hook; logs its first failure with the traceback, later ones at most once a minute."""

    def __init__(
        self, kind: str, hook: Callable[..., object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.hook = hook
        self._name = f"{kind} {getattr(hook, '__qualname__', None) or type(hook).__qualname__}"
        self._clock = clock
        self._failures = 0
        self._silent = 0
        self._said_at = 0.0

    def call(self, *arguments: object) -> None:
        """Call the hook; nothing it raises gets out."""
        try:
            self.hook(*arguments)
        except BaseException as error:
            self.failed(error)

    def disable(self) -> None:
        """Call the hook no more, whoever still holds this."""
        self.hook = _nothing

    def failed(self, error: BaseException) -> None:
        """Note that a call raised ``error``."""
        self._failures += 1
        self._silent += 1
        now = self._clock()
        if self._failures == 1:
            logger.error("%s failed; it stays registered", self._name, exc_info=error)
        elif now - self._said_at >= _REPEAT_SECONDS:
            logger.error("%s failed %d more times; last: %r", self._name, self._silent, error)
        else:
            return
        self._said_at, self._silent = now, 0


class Dispatcher:
    """Knows the start and end hooks, and keeps one delivery running while there are any.

    ``make`` makes the status that a hook gets, from its fields in order.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._lock = threading.RLock()
        self._delivery: Delivery | None = None
        self._wake_fd = -1  # never closed: a capture may be about to write to it
        self._exits = False

    def register(self, hook: Hook, ended: bool) -> Callable[[], None]:
        """Add a hook, start the thread for the first one, and return what removes it."""
        entry = FailureLog("end hook" if ended else "start hook", hook)
        with self._lock:
            recording = session.claim("hooks", None)
            if self._delivery is None or self._delivery.is_over:
                self._delivery = self._make_delivery(recording)
            self._delivery.add(entry, ended)
        return lambda: self._unregister(entry)

    def _unregister(self, entry: FailureLog) -> None:
        with self._lock:
            entry.disable()
            if self._delivery is not None and self._delivery.discard(entry):
                self._end()

    def _make_delivery(self, recording: session.Recording) -> Delivery:
        if not self._exits:
            self._exits = True
            background.at_exit(self.close)
            os.register_at_fork(after_in_child=self._in_forked_child)
        if self._wake_fd < 0:
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        delivery, gave_up = Delivery(recording, self._make, self._wake_fd), self._delivery
        if gave_up is not None:
            delivery.start_hooks, delivery.end_hooks = gave_up.start_hooks, gave_up.end_hooks
        return delivery

    def _end(self) -> None:
        assert self._delivery is not None
        self._delivery.tell_to_stop()
        self._delivery = None
        session.drop("hooks")

    def close(self, timeout: float = _DRAIN_SECONDS) -> bool:
        """Deliver what has happened, for at most ``timeout`` seconds; tell whether that was all."""
        delivery = self._delivery
        if delivery is None:
            return True
        delivery.tell_to_stop()
        ended = background.join(delivery.thread, timeout)
        delivery.start_hooks = delivery.end_hooks = ()
        with background.holding(self._lock, timeout) as is_held:
            if is_held and self._delivery is delivery:
                self._end()
        return ended

    def _in_forked_child(self) -> None:
        """Hooks belong to the parent; its thread is not here, its descriptor would wake it."""
        self._lock = threading.RLock()
        self._delivery = None
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1


class Source(NamedTuple):
    """A recording that is followed."""

    recording: session.Recording
    tail: RingTail
    maker: StatusMaker


def _source(recording: session.Recording, first: int = 0) -> Source:
    tail = RingTail(recording.ring, recording.geometry, first)
    return Source(recording, tail, StatusMaker(recording))


class Delivery:
    """Delivers events to hooks from one daemon thread.

    It sleeps on an eventfd that the capture writes only while it sleeps, and naps after each
    batch, so that a burst costs one wake-up and not one an event.
    """

    def __init__(
        self, recording: session.Recording, make: Callable[..., Any], wake_fd: int
    ) -> None:
        self._make = make
        # Replaced, never changed: the thread reads them between any two calls.
        self.start_hooks: tuple[FailureLog, ...] = ()
        self.end_hooks: tuple[FailureLog, ...] = ()
        self.thread = threading.Thread(target=self._run, name="rankcall-hooks", daemon=True)
        self._wake_fd = wake_fd
        self._stopping = threading.Event()
        self._stop_by = 0.0
        self._sources = [_source(recording, recording.capture.counts()[0])]
        self._dropped = 0

    @property
    def is_over(self) -> bool:
        """Whether its thread has ended."""
        return self.thread.ident is not None and not self.thread.is_alive()

    def add(self, entry: FailureLog, ended: bool) -> None:
        """Call a hook from now on; the first one starts the thread."""
        if ended:
            self.end_hooks += (entry,)
        else:
            self.start_hooks += (entry,)
        if self.thread.ident is None:
            self.thread.start()

    def discard(self, entry: FailureLog) -> bool:
        """Call a hook no more; tell whether it was the last."""
        self.start_hooks = tuple(hook for hook in self.start_hooks if hook is not entry)
        self.end_hooks = tuple(hook for hook in self.end_hooks if hook is not entry)
        return not self.start_hooks and not self.end_hooks

    def tell_to_stop(self) -> None:
        """Have the thread deliver what there is to the hooks that are left, and end."""
        self._stop_by = time.monotonic() + _GRACE_SECONDS
        self._stopping.set()
        os.eventfd_write(self._wake_fd, 1)

    # --- on its thread ---

    def _run(self) -> None:
        failures = 0
        while failures < _OWN_FAILURES:
            try:
                if self._turn():
                    return
            except Exception as error:
                failures += 1
                self._failed(failures, error)

    def _failed(self, failures: int, error: Exception) -> None:
        if failures < _OWN_FAILURES:
            logger.error("the hook dispatcher failed; it goes on", exc_info=error)
            self._stopping.wait(_OWN_FAILURE_SECONDS)
        else:
            logger.warning(
                "the hook dispatcher failed %d times: it stops", failures, exc_info=error
            )

    def _turn(self) -> bool:
        """Deliver what there is and rest; True where the thread is to end."""
        stopping = self._stopping.is_set()
        if stopping and not self.start_hooks and not self.end_hooks:
            return True
        # Counted before the look, so that what comes after it is noticed before falling asleep.
        seen = [source.recording.capture.counts() for source in self._sources]
        delivered = [self._deliver(*each) for each in zip(self._sources, seen, strict=True)]
        if any(delivered) or any(source.tail.unsettled for source in self._sources):
            time.sleep(_NAP_SECONDS)  # so that what comes next comes in a batch
        elif stopping:
            return self._is_drained()
        elif not self._follows_another():
            self._sleep(seen)
        return False

    def _deliver(self, source: Source, counts: tuple[int, int]) -> bool:
        """Deliver what happened up to ``counts``; tell whether that was anything."""
        delivered = False
        while (batch := source.tail.poll(counts[0])) is not None:
            self._call_hooks(batch, source.maker)
            delivered = True
        return delivered

    def _call_hooks(self, batch: Batch, maker: StatusMaker) -> None:
        missed, self._dropped = self._dropped + batch.dropped, 0
        wanted = bool(self.start_hooks), bool(self.end_hooks)
        for status, ended in maker.statuses(batch, self._make, *wanted):
            if missed:
                status.drop_count, missed = missed, 0
            for entry in self.end_hooks if ended else self.start_hooks:
                try:
                    entry.hook(status)
                except BaseException as error:
                    entry.failed(error)
        self._dropped += missed  # nobody was told

    def _is_drained(self) -> bool:
        """Tell whether to end; an op that was waited for may be about to record its end."""
        if not any(source.tail.has_open for source in self._sources):
            return True
        time.sleep(_NAP_SECONDS)
        return time.monotonic() > self._stop_by

    def _follows_another(self) -> bool:
        """Follow the recording that took the place of the last one, if there is such."""
        now = session.current()
        if now is None or now is self._sources[-1].recording:
            return False
        self._sources = [source for source in self._sources if source.tail.has_open]
        self._sources.append(_source(now))
        return True

    def _sleep(self, seen: list[tuple[int, int]]) -> None:
        for source in self._sources:
            source.recording.capture.sleep(self._wake_fd, 2 if self.start_hooks else 1)
        counts = [source.recording.capture.counts() for source in self._sources]
        if counts == seen and not self._stopping.is_set():
            select.select([self._wake_fd], [], [], _IDLE_SECONDS)
        if not self._stopping.is_set():  # else it is for who comes after
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
