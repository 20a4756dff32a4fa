"""Requests to a real store: over which connection, on which thread, and for how long.

A protocol (a generator of requests) has to end by its caller's deadline, also if the store fails.
Two things make a TCPStore's calls take longer than they were given. None of its timeouts applies
while its host is stopped. And torch's warning about a timed-out call looks up the names of
addresses, which takes seconds if no server answers such look-ups. Therefore:

* Requests go over a connection of our own, a clone of the caller's store. No other thread uses it,
  its socket has a receive timeout, and it can be shut down. So the caller's connection is never
  held up, and its timeout is never touched. Only if no connection can be made in time does a
  helper thread use the caller's, for requests that the store answers at once.
* A long timeout begins with a blocking wait on the caller's thread. The last seconds before the
  deadline, and short timeouts, run on a helper thread, which asks again and again. The caller
  waits for the helper until shortly after the deadline; then it shuts the connection down.
* A helper that is still running when the interpreter ends is released in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

from torch.distributed import Store

from rankcall.background import BackgroundCall
from rankcall.c10d.calls import Call, note_running
from rankcall.c10d.connection import LONGEST_S, Connection, clock
from rankcall.c10d.errors import lost
from rankcall.c10d.location import where
from rankcall.c10d.own_connections import (
    StoreState,
    give_back,
    known_addresses,
    own_connection,
    separate_connection,
    state_of,
)
from rankcall.c10d.requests import METHODS, Arrive, Steps, Until, Wait

BEYOND_S = 0.85  # the time after its timeout in which a call names the missing or gives up
_HEARD_S = 1.5  # a store that answered so recently is there; only this machine is too busy
_STALL_S = 12.0  # the time that look-ups may take
_WORTH_S = 3.0  # a shorter blocking wait is not worth it
_SILENT_S = 30.0  # a host that has not answered a request for so long is lost
_CONNECT_S = 1.0  # how long a helper waits for a connection of our own
_FIRST_POLL_S, _POLL_GROWTH, _POLL_SHARE, _LONGEST_POLL_S = 0.00005, 1.5, 0.1, 0.25
_SLOW_S = 0.5  # for the answer to a request that was made just before the deadline

T = TypeVar("T")


class _Abandoned(Exception):
    """Ends the helper of an abandoned call."""


_PENDING = object()


def drive(
    steps: Steps[T],
    connection: Connection,
    wait: Callable[[Any], Any],
    call: Call,
    request: Any = None,
) -> tuple[bool, Any]:
    """Make the requests of a protocol, from ``request`` on; return whether it ended, and how.

    ``wait`` answers the requests that wait. If it answers ``_PENDING``, return that request.
    """
    try:
        if request is None:
            request = next(steps)
        while True:
            if call.is_abandoned:
                raise _Abandoned
            kind = request.__class__
            try:
                if kind in _WAITS:
                    answer = wait(request)
                    if answer is _PENDING:
                        return False, request
                else:
                    answer = _METHODS[kind](connection, *request)
            except RuntimeError as error:  # also of a FileStore whose file is gone
                raise connection.lost(error) from error
            connection.heard = clock.monotonic()
            request = steps.send(answer)
    except StopIteration as end:
        return True, end.value


_WAITS = frozenset((Arrive, Wait, Until))


_METHODS = {kind: getattr(Connection, name) for kind, name in METHODS.items()}


def _blocking(connection: Connection, call: Call, until: float, deadline: float) -> Any:
    """Return a function that answers waits until some time, by blocking in them."""

    def wait(request: Any) -> Any:
        if request.__class__ is Arrive:
            left = max(until - clock.monotonic(), 0.001)
            return connection.arrive(request, left) or None
        if request.__class__ is Until:
            return polling(connection, call, until, until >= deadline)(request)
        while not connection.block(request.keys, until - clock.monotonic()):
            connection.heard = clock.monotonic()
            if clock.monotonic() >= until:
                is_last = until >= deadline
                return polling(connection, call, until)(request) if is_last else _PENDING
        return True

    return wait


def polling(connection: Connection, call: Call, until: float, is_last: bool = True) -> Any:
    """Return a function that answers waits until some time, by asking again and again."""

    def wait(request: Any) -> Any:
        if request.__class__ is Arrive:
            # To wait in it would print a warning of torch's if the others come later.
            for key, value in request.appends:
                connection.append(key, value)
            return None
        began, pause = clock.monotonic(), _FIRST_POLL_S
        while True:
            if request.__class__ is Wait:
                answer: Any = connection.check(request.keys)
                is_there = answer
            else:
                inner = request.request
                answer = _METHODS[inner.__class__](connection, *inner)
                is_there = request.is_enough(answer)
                answer = answer if is_there else None
            connection.heard = now = clock.monotonic()
            if is_there:
                return answer
            if call.is_abandoned:
                raise _Abandoned
            if now >= until:
                call.is_late = is_last
                return answer if is_last else _PENDING
            clock.sleep(min(pause, until - now))
            share = max((now - began) * _POLL_SHARE, 0.001)
            pause = min(pause * _POLL_GROWTH, share, _LONGEST_POLL_S)

    return wait


def run(
    store: Store,
    timeout: float,
    steps: Steps[T],
    call: Call,
    unnamed: Callable[[], Exception] | None = None,
    state: StoreState | None = None,
) -> T:
    """Run a protocol on a store; return what it returns, or raise what it raises.

    Raises ``StoreLostError`` if it has not ended ``BEYOND_S`` after the timeout; or what
    ``unnamed``
    returns, if the store was there a moment ago and is only too slow to name the missing ranks.
    """
    state = state or state_of(store)
    deadline = clock.monotonic() + timeout
    if not state.answers_slowly:
        connection = Connection(store)
        waits = _blocking(connection, call, deadline, deadline)
        result: T = drive(steps, connection, waits, call)[1]
        return result
    request: Any = None
    times = blocking_times(timeout) if state.is_tcp else None
    if times is not None:
        answer_s, wait_s = times
        try:
            own: Connection | None = state.idle.pop()
        except IndexError:  # there is none, or another thread was faster
            own = own_connection(store, state, answer_s)
        if own is not None:
            try:
                if own.limited_to != answer_s:
                    own.limit(answer_s)
                waits = _blocking(own, call, deadline - timeout + wait_s, deadline)
                is_over, value = drive(steps, own, waits, call, request)
            finally:
                give_back(state, own)
            if is_over:
                result = value
                return result
            request = value
    return _run_aside(store, state, timeout, deadline, steps, call, request, unnamed)


def _run_aside(
    store: Store,
    state: StoreState,
    timeout: float,
    deadline: float,
    steps: Steps[T],
    call: Call,
    request: Any,
    unnamed: Callable[[], Exception] | None,
) -> T:
    """Go on with a protocol on a helper thread; wait for it until shortly after the deadline."""

    def work() -> T:
        own: Connection | None = None
        try:
            if state.is_tcp:
                own = own_connection(store, state, min(_CONNECT_S, timeout / 4))
            if own is not None:
                own.limit(timeout + 2 * BEYOND_S)
                call.connection = own
            connection = own or Connection(store)
            call.connection = connection
            result: T = drive(
                steps, connection, polling(connection, call, deadline), call, request
            )[1]
            return result
        finally:
            call.let_go()  # the call may live on, and must not keep the store
            if own is not None:
                give_back(state, own)
            call.end_helper()

    call.begin_helper()
    call.addresses = known_addresses(store, state)
    helper = call.helper = BackgroundCall(work, "rankcall-store")
    note_running(call)
    try:
        has_ended = helper.ended(min(deadline + BEYOND_S - clock.monotonic(), LONGEST_S))
        if not has_ended:
            connection = call.connection
            heard = connection.heard if connection is not None else 0.0
            call.abandon()
            if unnamed is not None and (call.is_late or clock.monotonic() - heard < _HEARD_S):
                raise unnamed()
            raise lost(where(store), f"no answer within the timeout of {timeout:g} s")
    except BaseException:  # also an interrupt
        call.abandon()
        raise
    call.end_helper()  # also if no thread could be started
    result: T = helper.outcome()
    return result


@lru_cache(maxsize=64)
def blocking_times(timeout: float) -> tuple[float, float] | None:
    """Return how long an answer and a blocking wait may take; None if it is better not to block.

    A wait that is over asks once more, to cancel it. One after the other, and then a look-up of
    names, must fit into the timeout.
    """
    blocking = timeout - _STALL_S
    if not blocking >= _WORTH_S:
        return None
    answer = min(_SILENT_S, blocking / 2)
    return answer, blocking - answer


def perform(store: Store, timeout: float, steps: Steps[T]) -> T:
    """Run a protocol on a store. Raises ``StoreLostError`` a second after the timeout."""
    return run(store, timeout, steps, Call())


def perform_shared(store: Store, timeout: float, steps: Steps[T]) -> T:
    """Run a protocol over the caller's own connection, on a helper thread, with a deadline.

    For a few requests that a store answers at once, soon after the caller has used it: to make a
    connection, as ``perform`` does, can take seconds and print torch's warnings.

    Raises:
        StoreLostError: The store has failed, or has not answered shortly after ``timeout``.
    """
    call, connection = Call(), Connection(store)
    until = clock.monotonic() + timeout
    helper = BackgroundCall(
        lambda: drive(steps, connection, polling(connection, call, until), call)[1],
        "rankcall-store",
    )
    if not helper.ended(timeout + _SLOW_S):
        call.is_abandoned = True
        helper.give_up()
        raise connection.lost(TimeoutError("no answer in time"))
    result: T = helper.outcome()
    return result


class Standby:
    """Runs a protocol on the calling thread, over a connection that it makes for it.

    For a thread that was started beforehand: Python 3.12 starts none while the interpreter exits.
    Another thread waits for it with a deadline, and then calls ``release``.
    """

    def __init__(self) -> None:
        self._call = Call()

    def perform(self, store: Store, timeout: float, steps: Steps[T]) -> T:
        """Run a protocol. Raises ``StoreLostError`` if the store has failed, or was released."""
        call = self._call
        connection = call.connection = separate_connection(store, timeout)
        try:
            until = clock.monotonic() + timeout
            result: T = drive(steps, connection, polling(connection, call, until), call)[1]
            return result
        finally:
            call.connection = None
            connection.close()

    def release(self) -> None:
        """Let the thread go on, with an error, unless it still connects.

        Only its own connection ends: the job may still need the others.
        """
        self._call.abandon()
