"""Run a protocol on a real store: over which connection, on which thread, and for how long.

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

import math
from collections.abc import Callable
from enum import Enum
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
from rankcall.c10d.requests import METHODS, Arrive, Steps, StoreGoneError, Until, Wait

# The time after its timeout in which a call names the missing or gives up. The public functions
# promise to end one second after their timeout; the rest is for the caller's own thread to wake.
BEYOND_S = 0.85
# A store that answered so recently is there; only this machine is too busy to name the missing.
_HEARD_S = 1.5
# The time that a blocking wait leaves for torch's look-ups of names, which its warning about a
# timed-out wait makes. A name server that is not there holds them up for 5 s or more.
_STALL_S = 12.0
_WORTH_S = 3.0  # a shorter blocking wait is not worth it: the helper has to run all the same
_SILENT_S = 30.0  # a host that has not answered a request for so long is lost
_CONNECT_S = 1.0  # how long a helper waits for a connection of our own
# A helper that polls asks again after a tenth of the time that it has waited: so it notices an
# arrival at most a tenth late, and a store of a thousand ranks is not asked more often than it can
# answer. The first poll is early, because rank 0 waits in it for the others after each exchange:
# 0.05 ms instead of 0.2 was worth a tenth of an exchange of 16 ranks; no pause was not better.
_FIRST_POLL_S, _POLL_GROWTH, _POLL_SHARE, _LONGEST_POLL_S = 0.00005, 1.5, 0.1, 0.25

T = TypeVar("T")


class Over(Enum):
    """The connection over which a protocol makes its requests; the thread follows from it."""

    KEPT = "kept"
    """A connection of our own, which is kept for the next call. For all but the two cases below.

    The protocol runs on the calling thread as long as it may block there, and then on a helper.
    """

    CALLERS = "caller's"
    """The caller's own connection, on a helper thread.

    For a few requests that the store answers at once, soon after the caller has used it: to make a
    connection of our own can take seconds and print torch's warnings. What the caller still waits
    for over its connection is never shut down.
    """

    NEW = "new"
    """A connection of our own that is made for this call and closed after it, on this thread.

    For a thread that was started beforehand, because Python 3.12 starts none while the interpreter
    exits. Connecting takes as long as it takes. So another thread waits for this one with a
    deadline, and then abandons the call.
    """


def perform(
    store: Store,
    timeout_s: float,
    steps: Steps[T],
    *,
    over: Over = Over.KEPT,
    call: Call | None = None,
    state: StoreState | None = None,
) -> T:
    """Run a protocol on a store; return what it returns, or raise what it raises.

    Args:
        store: Any store. No reference to it is kept after the call, also if that fails; only a
            helper that was given up keeps it until the request that it makes is answered.
        timeout_s: How long the protocol's waits may take. The call ends ``BEYOND_S`` later at the
            latest (``Over.NEW``: when another thread abandons it).
        steps: The protocol.
        over: The connection to use.
        call: The call, for a caller that names it in errors, abandons it from another thread, or
            has resources that a helper may still use when this function has raised.
        state: What this process knows of the store, for a caller that has looked it up before.

    Raises:
        StoreLostError: The store has failed, has not answered in time, or the call was abandoned.
    """
    call = call or Call()
    if over is Over.NEW:
        return _perform_here(store, timeout_s, steps, call)
    if state is None:
        state = state_of(store)
    deadline = clock.monotonic() + timeout_s
    if not state.answers_slowly:  # memory of this process: every request is answered at once
        connection = Connection(store)
        waits = _blocking(connection, call, deadline, deadline)
        result: T = _drive(steps, connection, waits, call)[1]
        return result
    request: Any = None
    times = _blocking_times(timeout_s) if state.is_tcp and over is Over.KEPT else None
    if times is not None:
        answer_s, wait_s = times
        try:
            own: Connection | None = state.idle.pop()
        except IndexError:  # there is none, or another thread was faster
            own = own_connection(store, state, answer_s, call.name)
        if own is not None:
            try:
                if own.limited_to != answer_s:
                    own.limit(answer_s)
                waits = _blocking(own, call, deadline - timeout_s + wait_s, deadline)
                has_ended, value = _drive(steps, own, waits, call)
            finally:
                give_back(state, own)
            if has_ended:
                result = value
                return result
            request = value
    return _perform_aside(store, state, timeout_s, deadline, steps, call, request, over)


def _perform_here(store: Store, timeout_s: float, steps: Steps[T], call: Call) -> T:
    """Run a protocol on this thread, over a connection that is made for it."""
    connection = call.connection = separate_connection(store, timeout_s, call.name)
    try:
        waits = _polling(connection, call, clock.monotonic() + timeout_s)
        result: T = _drive(steps, connection, waits, call)[1]
        return result
    except _AbandonedError:
        raise lost(where(store), "the call was given up", is_silent=True, name=call.name) from None
    finally:
        call.let_go()
        connection.close()


def _perform_aside(
    store: Store,
    state: StoreState,
    timeout_s: float,
    deadline: float,
    steps: Steps[T],
    call: Call,
    request: Any,
    over: Over,
) -> T:
    """Go on with a protocol on a helper thread; wait for it until shortly after the deadline."""

    def work() -> T:
        own: Connection | None = None
        try:
            if state.is_tcp and over is Over.KEPT:
                own = own_connection(store, state, min(_CONNECT_S, timeout_s / 4), call.name)
            if own is not None:
                # The caller gives up before; this ends a helper that could not be shut down.
                own.limit(timeout_s + 2 * BEYOND_S)
                call.connection = own
            connection = own or Connection(store)
            call.connection = connection
            waits = _polling(connection, call, deadline)
            result: T = _drive(steps, connection, waits, call, request)[1]
            return result
        finally:
            call.let_go()  # the call may live on, and must not keep the store
            if own is not None:
                give_back(state, own)
            call.end_helper()

    call.begin_helper()
    if over is Over.KEPT:
        call.addresses = known_addresses(store, state)
    helper = call.helper = BackgroundCall(work, "rankcall-store")
    if over is Over.KEPT:
        # Not for the caller's connection: an exit would shut down what the job may still use.
        note_running(call)
    try:
        has_ended = helper.ended(min(deadline + BEYOND_S - clock.monotonic(), LONGEST_S))
        if not has_ended:
            connection = call.connection
            heard = connection.heard if connection is not None else 0.0
            call.abandon()
            raise lost(
                where(store),
                f"no answer within the timeout of {timeout_s:g} s",
                is_silent=True,
                answered_lately=call.is_late or clock.monotonic() - heard < _HEARD_S,
                name=call.name,
            )
    except BaseException:  # also an interrupt
        call.abandon()
        raise
    call.end_helper()  # also if no thread could be started
    result: T = helper.outcome()
    return result


@lru_cache(maxsize=64)
def _blocking_times(timeout_s: float) -> tuple[float, float] | None:
    """Return how long an answer and a blocking wait may take; None if it is better not to block.

    A wait that is over asks once more, to cancel it. One after the other, and then a look-up of
    names, must fit into the timeout.
    """
    blocking_s = timeout_s - _STALL_S
    if not blocking_s >= _WORTH_S:
        return None
    answer_s = min(_SILENT_S, blocking_s / 2)
    return answer_s, blocking_s - answer_s


class _AbandonedError(Exception):
    """Ends the thread that works on an abandoned call, at its next request."""


_PENDING = object()  # a wait's answer: the time for waiting in this way is over, the call's is not


def _drive(
    steps: Steps[T],
    connection: Connection,
    wait: Callable[[Any], Any],
    call: Call,
    request: Any = None,
) -> tuple[bool, Any]:
    """Make the requests of a protocol, from ``request`` on.

    ``wait`` answers the requests that wait.

    Returns:
        True and the protocol's result; or, if ``wait`` has answered ``_PENDING``, False and the
        request with which another way of waiting goes on.
    """
    try:
        if request is None:
            request = next(steps)
        while True:
            if call.is_abandoned:
                raise _AbandonedError
            make = _METHODS.get(request.__class__)
            try:
                answer = wait(request) if make is None else make(connection, *request)
            except RuntimeError as error:  # also of a FileStore whose file is gone
                lost_store = connection.lost(error, call.name)
                if lost_store.is_silent:
                    raise lost_store from error
                try:
                    request = steps.throw(StoreGoneError())
                except StoreGoneError:
                    raise lost_store from error
                continue
            if answer is _PENDING:
                return False, request
            connection.heard = clock.monotonic()
            request = steps.send(answer)
    except StopIteration as end:
        return True, end.value


# Of the requests that do not wait.
_METHODS = {kind: getattr(Connection, name) for kind, name in METHODS.items()}


def _blocking(connection: Connection, call: Call, until: float, deadline: float) -> Any:
    """Return a function that answers waits until some time, by blocking in them."""

    def wait(request: Any) -> Any:
        if request.__class__ is Arrive:
            left = max(until - clock.monotonic(), 0.001)
            # None and not _PENDING: the request has taken effect, and must not be made again.
            return connection.arrive(request, left) or None
        if request.__class__ is Until:
            return _polling(connection, call, until, until >= deadline)(request)
        while not connection.block(request.keys, until - clock.monotonic()):
            connection.heard = clock.monotonic()
            if clock.monotonic() >= until:
                is_last = until >= deadline
                return _polling(connection, call, until)(request) if is_last else _PENDING
        return True

    return wait


def _polling(connection: Connection, call: Call, until: float, is_last: bool = True) -> Any:
    """Return a function that answers waits until some time, by asking again and again.

    ``is_last`` says that the call's deadline has come at that time.
    """

    def wait(request: Any) -> Any:
        if request.__class__ is Arrive:
            # To wait in it would print a warning of torch's if the others come later.
            for key, value in request.instead:
                connection.append(key, value)
            return False
        began, pause = clock.monotonic(), _FIRST_POLL_S
        enough_at = began + request.seconds if request.__class__ is Until else math.inf
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
                raise _AbandonedError
            if now >= enough_at:
                return None
            if now >= until:
                call.is_late = is_last
                return answer if is_last else _PENDING
            clock.sleep(min(pause, until - now, enough_at - now))
            share = max((now - began) * _POLL_SHARE, 0.001)
            pause = min(pause * _POLL_GROWTH, share, _LONGEST_POLL_S)

    return wait
