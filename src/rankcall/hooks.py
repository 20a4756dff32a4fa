"""Callbacks at the issue and end of collectives, and at the creation of process groups.

They work on every back end. Start and end hooks run on one background thread. The thread that
issues a collective never runs them and never waits for them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from rankcall import background
from rankcall.capture import session
from rankcall.events.dispatch import (
    AT_ENDS,
    AT_EVENTS,
    Delivery,
    EventSource,
    Subscription,
    dispatcher,
)
from rankcall.events.statuses import StatusMaker, unfinished
from rankcall.handles import Registration
from rankcall.ring.follower import Batch
from rankcall.ring.tables import Group

if TYPE_CHECKING:
    import torch.distributed as dist


__all__ = [
    "COLLECTIVE_HOOK_TYPE",
    "PG_HOOK_TYPE",
    "CollectiveStatus",
    "Handle",
    "pending",
    "register_collective_end_hook",
    "register_collective_start_hook",
    "register_process_group_hook",
]


@dataclass(slots=True)
class CollectiveStatus:
    """One event of one collective or point-to-point op: its start or its end.

    Attributes:
        pg_name: The name of the process group, unique within the job.
        backend: The name of the group's back end.
        sequence_number: The op's number within its group.
        operation: The name of the op.
        timestamp: When the op was issued (start event) or ended (end event), in ns since the epoch.
        duration: How long the op took, in ms; only in end events. For an op on a device it is the
            device's time, or None if that is not measured.
        drop_count: How many events were missed between the last delivered event and this one.
        status: started in start events (enqueued on a device, which may not have begun the op yet);
            completed or failed in end events, or one of the other two if the end is not known.
        error: The error of a failed op.
        record: Every column of the record, by name.
    """

    pg_name: str = "unknown"
    backend: str = "unknown"
    sequence_number: int = -1
    operation: str = "unknown"
    timestamp: int = 0
    duration: float | None = None
    drop_count: int = 0
    status: str = "unknown"
    error: str | None = None
    record: Mapping[str, Any] | None = None


logger = logging.getLogger("rankcall.hooks")
_REPEAT_SECONDS = 60.0  # between two log messages about a hook that keeps failing
_DRAIN_SECONDS = background.EXIT_S  # all of rankcall together may hold up the exit for that long
H = TypeVar("H", bound=Callable[..., Any])
COLLECTIVE_HOOK_TYPE = Callable[[CollectiveStatus], None]
PG_HOOK_TYPE = Callable[["dist.ProcessGroup", str], None]


class Handle(Registration):
    """A registered hook. ``stop()`` ends the registration, and so does the end of a ``with`` block.

    After that no call of the hook begins; a call that has begun may still run.
    """

    def remove(self) -> None:
        """Do the same as ``stop()``, under the name that handles of torch's hooks have."""
        self.stop()


def register_collective_start_hook(hook: COLLECTIVE_HOOK_TYPE) -> Handle:
    """Call ``hook(status)`` for every collective and point-to-point op that is issued.

    On a device, too, the start is when the host issued the op, whether the device begins it or not.
    The hook runs on the thread of hooks. Registering it switches recording on. Raises
    ``TypeError`` if ``hook`` is not callable, and ``TorchMissingError``.
    """
    return Handle(_hooks.register(_checked(hook), ended=False))


def register_collective_end_hook(hook: COLLECTIVE_HOOK_TYPE) -> Handle:
    """Call ``hook(status)`` for every collective and point-to-point op that completed or failed.

    Otherwise as ``register_collective_start_hook``.
    """
    return Handle(_hooks.register(_checked(hook), ended=True))


def register_process_group_hook(hook: PG_HOOK_TYPE, *, existing: bool = True) -> Handle:
    """Call ``hook(process_group, pg_name)`` for every new group that this rank is a member of.

    The hook runs on the thread that creates the group. ``pg_name`` is an opaque name, unique within
    the job, and equal to ``CollectiveStatus.pg_name``. Groups that exist already are reported at
    once, unless ``existing`` is false. Raises ``TypeError`` if ``hook`` is not callable, and
    ``TorchMissingError``.
    """
    session.check_torch()
    from rankcall.capture.groups import watch

    failures = FailureLog("process-group hook", _checked(hook))

    def observer(process_group: dist.ProcessGroup, group: Group) -> None:
        failures.call(process_group, group.label)

    watch.add(observer, existing)
    return Handle(lambda: watch.remove(observer))


def pending() -> list[CollectiveStatus]:
    """Return the ops of this process that were issued and have not ended, the oldest first.

    The status of an op on a device is ``started`` only if the back end tells that it has begun.

    The list is empty if recording is off. May be called from any thread.
    """
    recording = session.current()
    if recording is None:
        return []
    return [CollectiveStatus(*fields) for fields in unfinished(recording)]


def _checked(hook: H) -> H:
    if not callable(hook):
        raise TypeError(f"a hook must be callable; got {type(hook).__name__}")
    return hook


class FailureLog:
    """Calls a hook; logs its first failure with the traceback, later ones at most once a minute."""

    def __init__(
        self, kind: str, hook: Callable[..., object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.hook = hook
        self._name = f"{kind} {getattr(hook, '__qualname__', None) or type(hook).__qualname__}"
        self._clock = clock
        self._failures = 0
        self._not_logged = 0
        self._logged_at = 0.0

    def call(self, *arguments: object) -> None:
        """Call the hook; nothing it raises gets out."""
        try:
            self.hook(*arguments)
        except BaseException as error:
            self.failed(error)

    def disable(self) -> None:
        """Call the hook no more, even if a caller still holds this object."""
        self.hook = _do_nothing

    def failed(self, error: BaseException) -> None:
        """Note that a call raised ``error``."""
        self._failures += 1
        self._not_logged += 1
        now = self._clock()
        if self._failures == 1:
            logger.error("%s failed; it stays registered", self._name, exc_info=error)
        elif now - self._logged_at >= _REPEAT_SECONDS:
            logger.error("%s failed %d more times; last: %r", self._name, self._not_logged, error)
        else:
            return
        self._logged_at, self._not_logged = now, 0


def _do_nothing(*_: object) -> None:
    """Stand in for a hook that was removed."""


class Hooks:
    """Start and end hooks: the subscriber that calls them."""

    name = "hooks"
    wants_in_flight = False

    def __init__(self) -> None:
        # Replaced as a whole, never changed: the thread of hooks reads them between any two calls,
        # and takes no lock, so that a hook may register and remove hooks.
        self.start_hooks: tuple[FailureLog, ...] = ()
        self.end_hooks: tuple[FailureLog, ...] = ()
        self._lock = threading.RLock()
        self._subscription: Subscription | None = None
        self._makers: WeakKeyDictionary[EventSource, StatusMaker] = WeakKeyDictionary()
        self._dropped = 0
        self._is_registered = False

    def register(
        self, hook: Callable[[CollectiveStatus], object], ended: bool
    ) -> Callable[[], None]:
        """Add a hook; subscribe for the first one. Return the function that removes it."""
        entry = FailureLog("end hook" if ended else "start hook", hook)
        with self._lock:
            if ended:
                self.end_hooks += (entry,)
            else:
                self.start_hooks += (entry,)
            try:
                self._subscribe()
            except BaseException:
                self._discard(entry)
                raise
        return lambda: self._unregister(entry)

    def _subscribe(self) -> None:
        before = self._subscription
        if before is not None and not before.is_over:
            return
        self._subscription = dispatcher.subscribe(self)
        if before is not None:  # it failed too often
            before.close(0)
        if not self._is_registered:
            self._is_registered = True
            background.at_exit(self.close)
            os.register_at_fork(after_in_child=self._in_forked_child)

    def _discard(self, entry: FailureLog) -> None:
        entry.disable()
        self.start_hooks = tuple(hook for hook in self.start_hooks if hook is not entry)
        self.end_hooks = tuple(hook for hook in self.end_hooks if hook is not entry)

    def _unregister(self, entry: FailureLog) -> None:
        with self._lock:
            self._discard(entry)
            subscription = self._subscription
            if subscription is not None and not self.start_hooks and not self.end_hooks:
                self._subscription = None
                subscription.close(0, drain=False)

    def close(self) -> bool:
        """Deliver what has happened, for at most two seconds; return whether that was all."""
        subscription = self._subscription
        if subscription is None:
            return True
        ended = subscription.close(_DRAIN_SECONDS)
        self.start_hooks = self.end_hooks = ()
        self._subscription = None
        return ended

    def _in_forked_child(self) -> None:
        """Call no hooks: they belong to the parent."""
        self.__init__()  # type: ignore[misc]
        self._is_registered = True

    # The rest runs on the thread of hooks.

    def wake_at(self) -> int:
        """Return ``AT_EVENTS`` if there are start hooks, else ``AT_ENDS``."""
        return AT_EVENTS if self.start_hooks else AT_ENDS

    def take(self, deliveries: list[Delivery], is_last: bool) -> None:
        """Call the hooks for each event."""
        for source, batches, _ in deliveries:
            maker = self._makers.get(source)
            if maker is None:
                maker = self._makers[source] = StatusMaker(source.recording, source.tables)
            for batch in batches:
                self._call_hooks(batch, maker)

    def finish(self) -> None:
        """Do nothing."""

    def _call_hooks(self, batch: Batch, maker: StatusMaker) -> None:
        missed, self._dropped = self._dropped + batch.dropped, 0
        wanted = bool(self.start_hooks), bool(self.end_hooks)
        for status, ended in maker.statuses(batch, CollectiveStatus, *wanted):
            if missed:
                status.drop_count, missed = missed, 0
            for entry in self.end_hooks if ended else self.start_hooks:
                try:
                    entry.hook(status)
                except BaseException as error:
                    entry.failed(error)
        self._dropped += missed  # no hook has got the count


_hooks = Hooks()
