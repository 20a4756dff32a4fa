"""Be told about collectives: callbacks at their start and end, and at process-group creation.

Works on every backend. Start and end hooks run on one background thread, never on the thread that
issues the collective, which never waits for them.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch.distributed as dist

from rankcall.capture import session
from rankcall.capture.events import StatusMaker
from rankcall.capture.groups import watch
from rankcall.capture.tail import Batch, RingTail
from rankcall.ring.reader import Group

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

logger = logging.getLogger("rankcall.hooks")

_NAP_SECONDS = 0.001
_IDLE_SECONDS = 0.5
_DRAIN_SECONDS = 2.0
_REPEAT_SECONDS = 60.0
_OWN_FAILURES = 10


@dataclass(slots=True)
class CollectiveStatus:
    """One event of one collective or point-to-point op, as a hook gets it.

    ``timestamp``: when it began (start) or ended (end), ns since the epoch. ``duration``: how long
    it executed, ms, end events only; from the device where it ran on one. ``drop_count``: events
    missed between the one delivered before and this one. ``status``: enqueued, started, completed
    or failed. ``record``: every column of the record, by name.
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


COLLECTIVE_HOOK_TYPE = Callable[[CollectiveStatus], None]
PG_HOOK_TYPE = Callable[[dist.ProcessGroup, str], None]


class Handle:
    """A registration. ``remove()`` ends it, once; leaving it as a context manager does too."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self._remove: Callable[[], None] | None = remove

    def remove(self) -> None:
        """Unregister the hook. No call of it begins after this; one may be under way."""
        remove, self._remove = self._remove, None
        if remove is not None:
            remove()

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()


def register_collective_start_hook(hook: COLLECTIVE_HOOK_TYPE) -> Handle:
    """Call ``hook(status)`` for every collective and point-to-point op that starts.

    Runs on the dispatcher thread. Recording is switched on if it is not. Raises ``TypeError`` where
    ``hook`` cannot be called, and ``TorchMissing``.
    """
    return _dispatcher.register(hook, ended=False)


def register_collective_end_hook(hook: COLLECTIVE_HOOK_TYPE) -> Handle:
    """Call ``hook(status)`` for every collective and point-to-point op that ended, well or not.

    Runs on the dispatcher thread; otherwise as ``register_collective_start_hook``.
    """
    return _dispatcher.register(hook, ended=True)


def register_process_group_hook(hook: PG_HOOK_TYPE, *, existing: bool = True) -> Handle:
    """Call ``hook(process_group, pg_name)`` inline for every new group this rank is a member of.

    ``pg_name`` is what ``CollectiveStatus.pg_name`` says; it is opaque and unique in the job.
    Groups that exist are reported at once, unless ``existing`` is false. Raises ``TypeError``.
    """
    _check(hook)
    failures = FailureLog("process-group hook", hook)

    def observer(process_group: dist.ProcessGroup, group: Group) -> None:
        failures.call(process_group, group.label)

    watch.add(observer, existing)
    return Handle(lambda: watch.remove(observer))


def pending() -> list[CollectiveStatus]:
    """Return what has started and not finished in this process, oldest first.

    Empty where nothing is being recorded. May be called from any thread.
    """
    recording = session.current()
    if recording is None:
        return []
    rows = RingTail(recording.ring, recording.geometry).open()
    maker = StatusMaker(recording)
    return [CollectiveStatus(*fields) for fields in maker.unfinished(rows)]


def _check(hook: object) -> None:
    if not callable(hook):
        raise TypeError(f"a hook must be callable; got {type(hook).__name__}")


class FailureLog:
    """Calls a hook; logs its first failure with the traceback, later ones at most once a minute."""

    def __init__(
        self, kind: str, hook: Callable[..., object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.hook = hook
        self._name = f"{kind} {getattr(hook, '__qualname__', hook)!s}"
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

    def failed(self, error: BaseException) -> None:
        """Note that a call raised ``error``."""
        self._failures += 1
        self._silent += 1
        now = self._clock()
        if self._failures == 1:
            logger.error("%s failed; it stays registered", self._name, exc_info=error)
        elif now - self._said_at >= _REPEAT_SECONDS:
            logger.error(
                "%s failed %d more times; last: %r", self._name, self._silent, error
            )
        else:
            return
        self._said_at, self._silent = now, 0


class Dispatcher:
    """Delivers events to start and end hooks from one daemon thread.

    The thread runs while hooks are registered. It sleeps on an eventfd that the capture writes
    only while it sleeps, and naps after each batch, so that a burst costs one wake-up and not one
    an event.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Replaced, never changed: the thread reads them between any two calls.
        self._start_hooks: tuple[FailureLog, ...] = ()
        self._end_hooks: tuple[FailureLog, ...] = ()
        self._thread: threading.Thread | None = None
        self._stop: threading.Event | None = None
        self._fd = -1
        self._exits = False

    def register(self, hook: COLLECTIVE_HOOK_TYPE, ended: bool) -> Handle:
        """Add a hook, and start the thread for the first one."""
        _check(hook)
        entry = FailureLog("end hook" if ended else "start hook", hook)
        with self._lock:
            recording = session.claim("hooks", None)
            if ended:
                self._end_hooks += (entry,)
            else:
                self._start_hooks += (entry,)
            if self._thread is None:
                self._begin(recording)
        return Handle(lambda: self._unregister(entry))

    def _unregister(self, entry: FailureLog) -> None:
        with self._lock:
            self._start_hooks = tuple(hook for hook in self._start_hooks if hook is not entry)
            self._end_hooks = tuple(hook for hook in self._end_hooks if hook is not entry)
            if self._start_hooks or self._end_hooks or self._thread is None:
                return
            self._end()
        session.drop("hooks")

    def _begin(self, recording: session.Recording) -> None:
        if not self._exits:
            self._exits = True
            atexit.register(self.close)
            os.register_at_fork(after_in_child=self._in_forked_child)
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stop = threading.Event()
        issued, _ = recording.capture.counts()
        self._thread = threading.Thread(
            target=self._run,
            args=(recording, issued, self._stop, self._fd),
            name="rankcall-hooks",
            daemon=True,
        )
        self._thread.start()

    def _end(self) -> None:
        assert self._stop is not None
        self._stop.set()
        os.eventfd_write(self._fd, 1)
        self._thread, self._stop, self._fd = None, None, -1

    def close(self, timeout: float = _DRAIN_SECONDS) -> bool:
        """Deliver what has happened, for at most ``timeout`` seconds, and stop; tell whether all was."""
        with self._lock:
            thread = self._thread
            if thread is None:
                return True
            self._end()
        thread.join(timeout)
        self._start_hooks = self._end_hooks = ()
        session.drop("hooks")
        return not thread.is_alive()

    def _in_forked_child(self) -> None:
        """Hooks belong to the parent; its thread and descriptor are not here."""
        self._lock = threading.Lock()
        self._start_hooks = self._end_hooks = ()
        if self._fd >= 0:
            os.close(self._fd)
        self._thread, self._stop, self._fd = None, None, -1

    # --- on the dispatcher thread ---

    def _run(
        self, recording: session.Recording, first: int, stop: threading.Event, fd: int
    ) -> None:
        try:
            failures = 0
            tail, maker = RingTail(recording.ring, recording.geometry, first), StatusMaker(recording)
            while True:
                stopping = stop.is_set()
                try:
                    delivered = self._deliver(recording, tail, maker)
                    if stopping and not delivered:
                        return
                    self._rest(recording, delivered, fd, stop)
                    now = session.current()
                    if now is not None and now is not recording:
                        self._deliver(recording, tail, maker)
                        recording = now
                        tail = RingTail(recording.ring, recording.geometry)
                        maker = StatusMaker(recording)
                except Exception:
                    failures += 1
                    if failures == _OWN_FAILURES:
                        logger.warning("the hook dispatcher failed %d times: it stops", failures)
                        return
                    logger.exception("the hook dispatcher failed; it goes on")
                    stop.wait(1.0)
        finally:
            os.close(fd)

    def _rest(
        self, recording: session.Recording, delivered: bool, fd: int, stop: threading.Event
    ) -> None:
        if delivered:
            time.sleep(_NAP_SECONDS)  # so that what comes next comes in a batch
            return
        before = recording.capture.counts()
        recording.capture.sleep(fd, 2 if self._start_hooks else 1)
        if recording.capture.counts() == before and not stop.is_set():
            select.select([fd], [], [], _IDLE_SECONDS)
        recording.capture.sleep(fd, 0)
        try:
            os.eventfd_read(fd)
        except BlockingIOError:
            pass

    def _deliver(
        self, recording: session.Recording, tail: RingTail, maker: StatusMaker
    ) -> bool:
        batch = tail.poll(recording.capture.counts()[0])
        if batch is None:
            return False
        self._call_hooks(batch, maker)
        return True

    def _call_hooks(self, batch: Batch, maker: StatusMaker) -> None:
        wanted = bool(self._start_hooks), bool(self._end_hooks)
        for status, ended in maker.statuses(batch, CollectiveStatus, *wanted):
            for entry in self._end_hooks if ended else self._start_hooks:
                try:
                    entry.hook(status)
                except BaseException as error:
                    entry.failed(error)


_dispatcher = Dispatcher()
