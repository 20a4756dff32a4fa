"""Follow this process's ring, once for all subscribers, and pass each of them the events.

A look at the ring copies the records that began or ended since the last look, and puts them into
the queue of every subscriber. Each subscriber is called on a thread of its own, so a hook that
waits for a lock, or a sink on a full disk, holds up neither training nor the other subscribers.

The subscribers' threads take turns as the one that follows the ring: the thread that needs records
next looks for all of them, under a lock. A thread that did nothing but follow the ring would add a
switch of threads, and one more fight for the GIL, to every batch; and with a single subscriber that
is blocked, it would copy records that the ring itself keeps just as well.

A queue has room for as many ops as the ring. If a subscriber is slower than that, the oldest
batches are dropped. Their events are counted, and the next batch carries the count. The starts of
ops that are still in flight are kept.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from rankcall import background
from rankcall.capture import session
from rankcall.capture.recording import Recording
from rankcall.record import Rows, concat_rows, take_rows
from rankcall.ring.follower import (
    NO_ROWS,
    Batch,
    Indexes,
    LiveTables,
    RingFollower,
    index_of,
)

__all__ = ["Delivery", "Dispatcher", "EventSource", "Subscriber", "Subscription", "dispatcher"]

logger = logging.getLogger("rankcall")

NO_HURRY, AT_ENDS, AT_EVENTS = range(3)  # what wakes a subscriber's thread
# While ops come, a subscriber in a hurry is called at most once a millisecond. Being called for
# each event would cost the training thread two waits for the GIL and a switch of threads per op;
# a batch costs that once. A hook hears of an event half a millisecond late in the median.
_NAP_SECONDS = 0.001
# While more than 128 ops come between two looks, they are 4 ms apart. Beside a loop that issues
# 300,000 ops a second, that reduced what an end hook adds to a call from 1.3 to 0.9 us.
_MANY = 128
_LONG_NAP_SECONDS = 0.004
# A thread that sleeps is woken through its eventfd by the captures that were told to. A recording
# that begins meanwhile was not told; this bounds how late its first events are delivered.
_IDLE_SECONDS = 0.5
_TURN_SECONDS = 0.05  # between two looks for a subscriber in no hurry: a trace's sinks
# A subscriber in no hurry looks again before more than this share of the ring has been written,
# so that a burst four times as fast as the one before still loses nothing.
_SHARE = 0.25
# An op whose wait() has returned may be about to record its end, and one that overtook another is
# held back for HOLD_NS (50 ms): a flush or the end of a subscription waits a little longer.
_GRACE_SECONDS = 0.06
# A flush, or the end of a subscription, waits for the ends of ops on devices to become known, for
# this share of its time at most: what is left is for the subscriber.
_DEVICES_SHARE = 0.75
# A subscriber catches what hooks and sinks raise, so an exception here is a defect of ours. It may
# be due to one odd record, so a few are logged; after these the thread ends, so that it does not
# fill the log for weeks.
_FAILURES = 10
_FAILURE_SECONDS = 1.0

Counts = list[tuple[int, int]]


@dataclass(eq=False)
class EventSource:
    """A recording that is followed. Its side tables give names to the ids in its records.

    A dispatcher has more than one while ops of an earlier recording are still in flight.
    """

    recording: Recording
    follower: RingFollower
    tables: LiveTables

    @classmethod
    def of(cls, recording: Recording, first: int = 0) -> EventSource:
        """Follow a recording from record number ``first`` on."""
        ring, geometry = recording.ring, recording.geometry
        return cls(recording, RingFollower(ring, geometry, first), LiveTables(ring, geometry))


class Delivery(NamedTuple):
    """The events of one recording since the subscriber was called last."""

    source: EventSource
    batches: Sequence[Batch]
    in_flight: Rows  # the ops whose end has not been delivered, if the subscriber wants them


class Subscriber(Protocol):
    """Gets the starts and ends of ops, in order, on a thread of its own.

    ``wants_in_flight``: call it in every turn, also if nothing happened, with the ops in flight.
    """

    name: str
    wants_in_flight: bool

    def wake_at(self) -> int:
        """Return what wakes its thread: ``AT_ENDS``, ``AT_EVENTS``, or a clock if ``NO_HURRY``.

        A capture can wake one thread, so at most one subscriber may be in a hurry.
        """

    def take(self, deliveries: list[Delivery], is_last: bool) -> None:
        """Take what happened. If this raises, it is called again with what happens next."""

    def finish(self) -> None:
        """End: this is the last call."""


class _Queue:
    """The batches of one recording that a subscriber has not taken yet.

    It has room for as many ops as the ring, so memory stays bounded if the subscriber never comes
    back, and none is lost that a reader of the ring would still find there.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._batches: deque[Batch] = deque()
        self._rows = 0

    def add(self, batch: Batch, open_indexes: Indexes) -> None:
        """Add a batch; drop the oldest ones if there is no room."""
        self._batches.append(batch)
        self._rows += len(batch.rows)
        if self._rows > self._room and len(self._batches) > 1:
            self._drop(open_indexes)

    def take(self) -> list[Batch]:
        """Take out all batches."""
        batches = list(self._batches)
        self._batches.clear()
        self._rows = 0
        return batches

    def _drop(self, open_indexes: Indexes) -> None:
        """Drop old batches, but for the starts of ops that are still in flight.

        These are the events that matter most: without its start, a subscriber would never hear of
        an op that hangs. There are as many as the ring can hold open, so they are bounded.
        """
        open_batches, dropped = list[Batch](), 0
        while self._rows > self._room and len(self._batches) > 1:
            oldest = self._batches.popleft()
            self._rows -= len(oldest.rows)
            is_open = ~oldest.ends & np.isin(index_of(oldest.rows), open_indexes)
            dropped += oldest.dropped + int(np.count_nonzero(oldest.ends))
            dropped += int(np.count_nonzero(oldest.begins & ~is_open))
            if is_open.any():
                ends = oldest.ends[is_open]
                open_batches.append(
                    Batch(take_rows(oldest.rows, is_open), oldest.begins[is_open], ends, 0)
                )
        after_gap = self._batches[0]
        self._batches[0] = after_gap._replace(dropped=after_gap.dropped + dropped)
        if open_batches:
            rows = concat_rows([batch.rows for batch in open_batches])
            begins = np.concatenate([batch.begins for batch in open_batches])
            self._batches.appendleft(Batch(rows, begins, np.zeros(len(rows), np.bool_), 0))
            self._rows += len(rows)


class Subscription:
    """One subscriber, its queues and its thread."""

    def __init__(self, owner: Dispatcher, subscriber: Subscriber, claim: str, wake_fd: int) -> None:
        self._dispatcher = owner
        self._subscriber = subscriber
        self._claim = claim
        self._queues: dict[EventSource, _Queue] = {}
        self._stopping = threading.Event()
        self._stop_by = 0.0
        self._devices_by: float | None = None  # until when to wait for devices in the next turn
        self._drains = True
        self._turned = threading.Condition()
        self._turns = 0
        self._looked_at = time.monotonic()
        self.wake_fd = wake_fd
        name = f"rankcall-{subscriber.name}"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_over(self) -> bool:
        """Whether its thread has ended."""
        return self.thread.ident is not None and not self.thread.is_alive()

    def flush(self, timeout: float) -> bool:
        """Wait until the subscriber has every op that ended; return whether that was in time."""
        now = time.monotonic()
        deadline = now + timeout
        # The thread looks, and not this one, whose wait has a deadline whatever a back end does.
        self._devices_by = now + timeout * _DEVICES_SHARE
        self._await_turn(deadline)
        settled = min(time.monotonic() + _GRACE_SECONDS, deadline)
        while self._dispatcher.is_busy and time.monotonic() < settled:
            time.sleep(_NAP_SECONDS)
        return self._await_turn(deadline)

    def end(self, drain: bool = True, timeout: float = 0.0) -> None:
        """Have the thread deliver what there is, unless ``drain`` is false, and end.

        ``timeout``: how long the caller waits for that, in s.
        """
        now = time.monotonic()
        self._drains = drain
        self._devices_by = now + timeout * _DEVICES_SHARE
        self._stop_by = now + _GRACE_SECONDS
        self._stopping.set()
        self._wake()

    def close(self, timeout: float, drain: bool = True) -> bool:
        """End, and give up the recording; return whether the thread ended in time."""
        self.end(drain, timeout)
        ended = True
        if self.thread is not threading.current_thread():
            ended = background.join(self.thread, timeout)
        if not ended:
            self._dispatcher.remove(self)
        session.drop(self._claim)
        return ended

    def put(self, source: EventSource, batch: Batch) -> None:
        """Queue a batch. The caller holds the dispatcher's lock."""
        if source not in self._queues:
            self._queues[source] = _Queue(source.recording.geometry.capacity)
        self._queues[source].add(batch, source.follower.open_indexes)

    def take_queued(self, sources: Sequence[EventSource]) -> list[Delivery]:
        """Take everything out of the queues. The caller holds the dispatcher's lock."""
        queues, self._queues = self._queues, {}
        if not self._subscriber.wants_in_flight:
            return [Delivery(source, queue.take(), NO_ROWS) for source, queue in queues.items()]
        every = [*(source for source in queues if source not in sources), *sources]
        return [
            Delivery(
                source,
                queues[source].take() if source in queues else (),
                source.follower.in_flight(),
            )
            for source in every
        ]

    # The subscriber's own thread calls these.

    def _run(self) -> None:
        failures = 0
        while failures < _FAILURES:
            try:
                if self._turn():
                    break
            except Exception as error:
                failures += 1
                self._failed(failures, error)
        try:
            self._subscriber.finish()
        except Exception:
            logger.exception("the %s thread could not finish its work", self._subscriber.name)
        self._dispatcher.remove(self)
        self._dispatcher.keep_wake_fd(self.wake_fd)

    def _failed(self, failures: int, error: Exception) -> None:
        name = self._subscriber.name
        if failures < _FAILURES:
            logger.error("the %s thread failed; it goes on", name, exc_info=error)
            self._stopping.wait(_FAILURE_SECONDS)
        else:
            logger.warning(
                "the %s thread failed %d times: it stops", name, failures, exc_info=error
            )

    def _turn(self) -> bool:
        """Look, call the subscriber, and rest; return whether the thread is to end."""
        stopping = self._stopping.is_set()
        if stopping and not self._drains:
            return True
        devices_by, self._devices_by = self._devices_by, None
        if devices_by is not None:
            self._dispatcher.await_devices(devices_by)
        deliveries, seen = self._dispatcher.look(self)
        happened = sum(len(batch.rows) for delivery in deliveries for batch in delivery.batches)
        filled = max((_share_written(delivery) for delivery in deliveries), default=0.0)
        if deliveries:
            self._subscriber.take(deliveries, is_last=False)
        with self._turned:
            self._turns += 1
            self._turned.notify_all()
        if stopping:
            return self._is_drained(happened > 0)
        wake_at = self._subscriber.wake_at()
        if wake_at == NO_HURRY:
            self._rest(filled)
        elif happened or self._dispatcher.is_unsettled:
            is_long = happened >= _MANY and filled * _LONG_NAP_SECONDS < _SHARE * _NAP_SECONDS
            time.sleep(_LONG_NAP_SECONDS if is_long else _NAP_SECONDS)
        else:
            self._sleep(seen, wake_at)
        return False

    def _is_drained(self, happened: bool) -> bool:
        """Return whether to end; an op that was waited for may be about to record its end."""
        if (happened or self._dispatcher.is_busy) and time.monotonic() < self._stop_by:
            time.sleep(_NAP_SECONDS)
            return False
        deliveries, _ = self._dispatcher.look(self)
        self._subscriber.take(deliveries, is_last=True)
        return True

    def _rest(self, filled: float) -> None:
        """Wait for the next turn, less long if many ops came since the last one."""
        now = time.monotonic()
        elapsed, self._looked_at = now - self._looked_at, now
        seconds = min(_TURN_SECONDS, elapsed * _SHARE / filled) if filled else _TURN_SECONDS
        self._await_wake_up(seconds)

    def _sleep(self, seen: Counts, wake_at: int) -> None:
        """Wait for the next event, unless it has come since the look that saw ``seen``."""
        sources = self._dispatcher.sources
        for source in sources:
            source.recording.capture.sleep(self.wake_fd, wake_at)
        if [source.recording.capture.counts() for source in sources] == seen:
            self._await_wake_up(_IDLE_SECONDS)

    def _await_wake_up(self, seconds: float) -> None:
        if not self._stopping.is_set():
            select.select([self.wake_fd], [], [], seconds)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.wake_fd)

    def _wake(self) -> None:
        os.eventfd_write(self.wake_fd, 1)

    # Other threads call these.

    def _await_turn(self, deadline: float) -> bool:
        """Wait for the end of a turn that began after this call."""
        with self._turned:
            # Not + 1: the turn under way may have looked at the ring before this call.
            wanted = self._turns + 2
            while self._turns < wanted and self.thread.is_alive():
                self._wake()
                if not self._turned.wait(max(0.0, deadline - time.monotonic())):
                    return False
        return self._turns >= wanted


def _share_written(delivery: Delivery) -> float:
    """Return which share of the ring was written, as far as a delivery shows."""
    events = sum(2 * len(batch.rows) + batch.dropped for batch in delivery.batches)
    return events / 2 / delivery.source.recording.geometry.capacity


class Dispatcher:
    """Follows the recording that is on, for as long as there are subscribers.

    If a recording takes the place of another one, both are followed until the ops of the first one
    have ended.
    """

    def __init__(self) -> None:
        # Held over a look at the ring, never while a subscriber runs. Re-entrant, because a signal
        # handler or a destructor that ends a subscription may run on a thread that holds it.
        self._lock = threading.RLock()
        self._subscriptions: tuple[Subscription, ...] = ()
        self.sources: list[EventSource] = []
        self._claims = 0
        # The eventfds of threads that have ended, for the next ones. They are never closed: a
        # capture that was told to write to one may still do so, and the number would by then be
        # a file of the user's.
        self._wake_fds: list[int] = []
        self._is_registered = False

    @property
    def is_unsettled(self) -> bool:
        """Whether more is known to come soon, without a wake-up."""
        return any(source.follower.unsettled for source in self.sources)

    @property
    def is_busy(self) -> bool:
        """Whether an op is in flight, or an event is about to be delivered."""
        return any(source.follower.has_open or source.follower.unsettled for source in self.sources)

    def subscribe(self, subscriber: Subscriber) -> Subscription:
        """Pass a subscriber the events from now on. Switches recording on if it is off.

        It also gets the ends of ops that are in flight already. Raises what ``enable`` raises.
        """
        self._register_once()
        self._claims += 1
        claim = f"{subscriber.name} {self._claims}"
        recording = session.claim(claim)
        try:
            with self._lock:
                wake_fd = self._wake_fds.pop() if self._wake_fds else _new_eventfd()
                subscription = Subscription(self, subscriber, claim, wake_fd)
                if self._subscriptions:
                    self._look()  # the new subscriber gets the events after these
                else:
                    self.sources = [EventSource.of(recording, recording.capture.counts()[0])]
                subscription.thread.start()  # which looks once this lock is free
                self._subscriptions += (subscription,)
        except BaseException:
            session.drop(claim)
            raise
        return subscription

    def look(self, subscription: Subscription) -> tuple[list[Delivery], Counts]:
        """Look at the ring for all subscribers; return what there is for one of them.

        Also returns how many records each source had issued and ended before the look, so that what
        comes later is noticed before a thread falls asleep.
        """
        with self._lock:
            if subscription not in self._subscriptions:  # removed, because its thread was blocked
                return [], []
            seen = self._look()
            return subscription.take_queued(self.sources), seen

    def await_devices(self, deadline: float) -> None:
        """Have the ends recorded that are known, or will be in a moment; see ``Recording``.

        Holds no lock meanwhile.
        """
        with self._lock:
            recordings = [source.recording for source in self.sources]
        for recording in recordings:
            recording.await_devices(deadline)

    def remove(self, subscription: Subscription) -> None:
        """Pass a subscriber nothing more."""
        with self._lock:
            self._subscriptions = tuple(
                registered for registered in self._subscriptions if registered is not subscription
            )
            if not self._subscriptions:
                self.sources = []

    def keep_wake_fd(self, fd: int) -> None:
        """Keep the eventfd of a thread that has ended, for the next one."""
        with self._lock:
            self._wake_fds.append(fd)

    def _look(self) -> Counts:
        current = session.current()
        # A new recording is followed from its first record on: whoever subscribed before it began
        # asked for all events.
        if current is not None and current is not self.sources[-1].recording:
            self.sources = [*self.sources, EventSource.of(current)]
        seen = [source.recording.capture.counts() for source in self.sources]
        for source, (issued, _) in zip(self.sources, seen, strict=True):
            while (batch := source.follower.poll(issued)) is not None:
                for subscription in self._subscriptions:
                    subscription.put(source, batch)
        if len(self.sources) > 1:
            earlier = [source for source in self.sources[:-1] if source.follower.has_open]
            self.sources = [*earlier, self.sources[-1]]
        return seen

    def _register_once(self) -> None:
        if not self._is_registered:
            self._is_registered = True
            os.register_at_fork(after_in_child=self._in_forked_child)

    def _in_forked_child(self) -> None:
        """Forget the parent's subscribers, because their threads are not in this process.

        Their objects are kept, so that no destructor of a user's sink runs here.
        """
        _inherited.append(self._subscriptions)
        for fd in (
            *self._wake_fds,
            *(subscription.wake_fd for subscription in self._subscriptions),
        ):
            os.close(fd)
        self._lock = threading.RLock()
        self._subscriptions, self.sources, self._wake_fds = (), [], []


def _new_eventfd() -> int:
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


_inherited: list[tuple[Subscription, ...]] = []
dispatcher = Dispatcher()
