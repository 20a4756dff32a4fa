"""Calls to a store, which can be given up: by their caller, or when the process ends.

A forked child has none of its parent's threads. So it forgets its parent's calls and connections.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from rankcall.background import BackgroundCall, at_exit, exit_budget
from rankcall.c10d.connection import Connection, clock
from rankcall.c10d.location import Address, shut_down_connections_to

_EXIT_S = 1.0  # for all helpers together, of the two seconds for which rankcall may hold up an exit

_forgotten_by_children: list[Callable[[], None]] = []
_is_watching: list[bool] = []


def on_fork(forget: Callable[[], None]) -> None:
    """Call ``forget`` in a forked child, once any store has been used."""
    _forgotten_by_children.append(forget)


def watch_the_process() -> None:
    """Release helpers at the end of this process, and forget all calls in a forked child.

    Called at the first use of a store and not at import, which must have no side effects.
    """
    if not _is_watching:
        _is_watching.append(True)
        os.register_at_fork(after_in_child=_after_fork)
        at_exit(_release_helpers)


def _after_fork() -> None:
    for forget in _forgotten_by_children:
        forget()


class Call:
    """One call to a store. Its last part may run on a helper thread.

    A call that its caller has given up is *abandoned*. Its helper stops at the next answer. Only
    then the call's resources become free.

    Args:
        name: Stands before the texts of its errors, for example ``barrier 'epoch'``.
    """

    # Class attributes, because most calls end without ever changing one.
    is_abandoned = False
    connection: Connection | None = None
    is_late = False  # the deadline has passed, and the helper asks which ranks are missing
    addresses: frozenset[Address] = frozenset()  # of the store, if it may not answer
    helper: BackgroundCall[Any] | None = None
    has_helper = False
    _frees: tuple[Callable[[], None], ...] = ()

    def __init__(self, name: str = "") -> None:
        self._name = name

    @property
    def name(self) -> str:
        """The text that stands before those of its errors."""
        return self._name

    def begin_helper(self) -> None:
        """Note that a helper goes on with the call."""
        self.has_helper = True

    def end_helper(self) -> None:
        """Note that the helper is done."""
        with _deciding_lock:
            self.has_helper = False
            frees, self._frees = self._frees, ()
        for free in frees:
            free()

    def when_over(self, free: Callable[[], None]) -> None:
        """Call ``free`` once no thread works on the call any more: now, or when the helper ends."""
        if self.has_helper:
            # Looked at again under the lock: the helper may have ended in between, and then it does
            # not look at ``_frees`` any more. The first look spares most calls the lock.
            with _deciding_lock:
                if self.has_helper:
                    self._frees += (free,)
                    return
        free()

    def abandon(self) -> None:
        """Give the call up. Only a connection of our own is shut down: the job needs the others."""
        if self.helper is not None:
            self.helper.give_up()
        with _deciding_lock:
            self.is_abandoned = True
            if self.connection is not None:
                self.connection.shut_down()

    def let_go(self) -> None:
        """Note that the helper is done with its connection, which the next call may use.

        Under the lock, because ``abandon`` must not shut down the connection of another call.
        """
        with _deciding_lock:
            self.connection = None


# Reentrant, because a signal handler may use a store.
_deciding_lock = threading.RLock()


def _renew_lock() -> None:
    """A forked child gets a new lock: a thread that it does not have may hold the parent's."""
    global _deciding_lock
    _deciding_lock = threading.RLock()


on_fork(_renew_lock)


# Calls with a helper. Weak, so that a call is free as soon as its caller and its helper are done.
_running: weakref.WeakSet[Call] = weakref.WeakSet()
# Calls that connect. Their callers do not wait for them to the end, so nothing else refers to them.
_connecting: list[Call] = []
on_fork(_running.clear)


def note_running(call: Call) -> None:
    """Note a call whose helper an exit has to release."""
    _running.add(call)


def note_connecting(call: Call) -> None:
    """Keep a call that connects until it has ended, so that an exit can release it."""
    _connecting[:] = [earlier for earlier in _connecting if not _has_ended(earlier)]
    _connecting.append(call)


def _release_helpers() -> None:
    """Let helpers that wait for a store end before the interpreter does.

    A daemon thread that returns from torch's C++ code while the interpreter finalizes can abort the
    process. A job's exit status must not depend on a store that does not answer.
    """
    calls = [call for call in (*_running, *_connecting) if not _has_ended(call)]
    for call in calls:
        call.abandon()
    _wait_for(calls, _EXIT_S / 4)
    for call in calls:
        if call.addresses and not _has_ended(call):
            # It has no connection of our own, or is still connecting. The job does not need its
            # connections any more: the process ends.
            shut_down_connections_to(call.addresses)
    _wait_for(calls, _EXIT_S)


def _has_ended(call: Call) -> bool:
    return call.helper is None or call.helper.ended(0)


def _wait_for(calls: Iterable[Call], seconds: float) -> None:
    until = clock.monotonic() + seconds
    for call in calls:
        if call.helper is not None:
            left = max(0.0, until - clock.monotonic())
            exit_budget.spend(call.helper.ended, left)
