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

import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar

from torch.distributed import DistStoreError, HashStore, Store, TCPStore

from rankcall import background
from rankcall._requests import METHODS, Arrive, Steps, Until, Wait
from rankcall.process import open_sockets
from rankcall.store._errors import StoreLostError, check_store, lost
from rankcall.store._keys import Keys, attempt_of_this_process, keys_of
from rankcall.store._location import (
    Address,
    addresses_of,
    is_closed,
    own_socket,
    root_of,
    shut_down_connections_to,
    where,
)

BEYOND_S = 0.85  # the time after its timeout in which a call names the missing or gives up
_HEARD_S = 1.5  # a store that answered so recently is there; only this machine is too busy
_STALL_S = 12.0  # the time that look-ups may take
_WORTH_S = 3.0  # a shorter blocking wait is not worth it
_SILENT_S = 30.0  # a host that has not answered a request for so long is lost
_CONNECT_S = 1.0  # how long a helper waits for a connection of our own
_LOOK_S = 1.0  # how often a wait for a connection looks whether the host has ended
_READ = timedelta(seconds=1)  # for keys that were there a moment ago
_LONGEST_S = 1e6  # a wait goes down to poll(), which takes milliseconds as an int
_FIRST_POLL_S, _POLL_GROWTH, _POLL_SHARE, _LONGEST_POLL_S = 0.00005, 1.5, 0.1, 0.25
_ABSENT = "rankcall: no such key"
_EXIT_S = 1.0
_CHECKED = 256  # calls whose arguments a process remembers for each store

T = TypeVar("T")


class Clock:
    """The only clock of this package. Tests put another one in its place."""

    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)


clock = Clock()


class Connection:
    """One way to a store, for one thread at a time. Its methods are the requests.

    ``heard`` is when the last answer came.
    """

    def __init__(self, client: Store, own_socket: socket.socket | None = None) -> None:
        self._client: Any = client  # torch's types leave out append, clone and timeout
        self._socket = own_socket
        self._extended = bool(root_of(client).has_extended_api())  # type: ignore[attr-defined]
        self._reads_many = self._extended and (
            own_socket is not None or isinstance(root_of(client), HashStore)
        )
        self.limited_to = 0.0  # seconds for an answer
        self.where = where(client)
        self.is_broken = False
        self.heard = 0.0

    @property
    def appends(self) -> bool:
        """Whether the store can append to a key."""
        return self._extended

    def limit(self, seconds: float) -> None:
        """Let no answer take longer than this from now on, on a connection of our own."""
        if self._socket is not None and seconds != self.limited_to:
            whole, part = divmod(min(max(seconds, 0.001), _LONGEST_S), 1.0)
            limit = struct.pack("ll", int(whole), int(part * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self.limited_to = seconds

    def add(self, key: str, amount: int) -> int:
        return self._client.add(key, amount)  # type: ignore[no-any-return]

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._client.check(list(keys)))

    def read(self, key: str) -> bytes | None:
        # One round trip that never waits, unlike get().
        value = bytes(self._client.compare_set(key, _ABSENT, _ABSENT))
        return None if value == _ABSENT.encode() else value

    def read_many(self, keys: Sequence[str]) -> list[bytes | None]:
        if len(keys) < 2 or not self._reads_many:
            return [self.read(key) for key in keys]
        if self.check(keys):
            try:
                return list(self._client.multi_get(list(keys)))
            except DistStoreError:
                return [self.read(key) for key in keys]  # one was removed in between
        half = len(keys) // 2
        return self.read_many(keys[:half]) + self.read_many(keys[half:])

    def set(self, key: str, value: bytes) -> None:
        self._client.set(key, value)

    def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes | None:
        held = bytes(self._client.compare_set(key, expected, value))
        # An absent key is answered with what was expected; a key that held that has been set.
        return None if expected and held == expected != value else held

    def append(self, key: str, value: bytes) -> None:
        self._client.append(key, value)

    def delete(self, key: str) -> None:
        self._client.delete_key(key)

    def list_keys(self) -> list[str]:
        return list(self._client.list_keys())

    def now(self) -> float:
        return clock.monotonic()

    def sleep(self, seconds: float) -> None:
        clock.sleep(seconds)

    def block(self, keys: Sequence[str], seconds: float) -> bool:
        """Wait for keys as long as the store allows; return whether they are there."""
        try:
            self._client.wait(keys, _span(int(seconds) or max(seconds, 0.001)))
        except DistStoreError:
            return False
        return True

    def arrive(self, request: Arrive, seconds: float) -> bool:
        """Append, count this process in, and return whether all are in, in that time."""
        for key, value in request.appends:
            self._client.append(key, value)
        try:
            self._client.barrier(request.key, request.size, _span(int(seconds) or seconds))
        except DistStoreError:
            return False
        return True

    def lost(self, error: Exception) -> StoreLostError:
        """Return the error for a request that failed; the connection is of no more use."""
        self.is_broken = True
        return lost(self.where, str(error))

    def shut_down(self) -> None:
        """Let a thread that waits for an answer go on, with an error."""
        self.is_broken = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the connection."""
        self.is_broken = True
        if self._socket is not None:
            self._socket.close()
        self._client = None

    def __del__(self) -> None:
        if hasattr(self, "is_broken"):
            self.close()


@lru_cache(maxsize=64)
def _span(seconds: float) -> timedelta:
    """Return a time in the store's type. It takes long to make, so waits are in whole seconds."""
    return timedelta(seconds=min(seconds, _LONGEST_S))


@dataclass
class LocalState:
    """The state that this process keeps for a store object, as long as that lives."""

    answers_slowly: bool  # a request may take longer than it was given
    is_tcp: bool
    appends: bool
    counts: bool  # whether the store takes ``Arrive``
    attempt: int  # of the job, when this process first used the store
    addresses: frozenset[Address] = frozenset()  # of a TCPStore; looked up once
    idle: list[Connection] = field(default_factory=list)
    members: dict[Any, Any] = field(default_factory=dict)
    seen: dict[str, tuple[bytes, float]] = field(default_factory=dict)  # of roll calls
    checked: dict[Any, Any] = field(default_factory=dict)  # arguments that were in order

    def remember(self, arguments: Any, request: Any) -> None:
        """Remember that some arguments are in order."""
        if len(self.checked) < _CHECKED:
            self.checked[arguments] = request

    def keys(self, prefix: str, attempt: int | None, world_size: int) -> Keys:
        """Return the keys of a world under a prefix."""
        which = self.attempt if attempt is None else attempt
        return keys_of(prefix, which, world_size, self.appends, self.counts)


_states: weakref.WeakKeyDictionary[Store, LocalState] = weakref.WeakKeyDictionary()
_forgotten_by_children: list[Callable[[], None]] = []
_running: weakref.WeakSet[Call] = weakref.WeakSet()
_is_watching: list[bool] = []


def local_state(store: Store) -> LocalState:
    """Return the state that this process keeps for a store object; or raise ``TypeError``."""
    state = _states.get(store) if isinstance(store, Store) else None
    if state is None:
        check_store(store)
        if not _is_watching:
            _is_watching.append(True)
            os.register_at_fork(after_in_child=_after_fork)
            background.at_exit(_release_helpers)
        root = root_of(store)
        state = LocalState(
            answers_slowly=not isinstance(root, HashStore),
            is_tcp=isinstance(root, TCPStore),
            appends=bool(root.has_extended_api()),  # type: ignore[attr-defined]
            # A PrefixStore makes two other requests instead.
            counts=isinstance(store, TCPStore) and hasattr(store, "barrier"),
            attempt=attempt_of_this_process(),
        )
        state = _states.setdefault(store, state)
    return state


def on_fork(forget: Callable[[], None]) -> None:
    """Call ``forget`` in a forked child, once any store has been used."""
    _forgotten_by_children.append(forget)


def _after_fork() -> None:
    for forget in _forgotten_by_children:
        forget()


on_fork(_states.clear)  # a child must not talk on its parent's connection
on_fork(_running.clear)


class Call:
    """One call of a public function. Its last part may run on a helper thread.

    A call that its caller has given up is *abandoned*. Its helper stops at the next answer. Only
    then the call's resources become free.
    """

    # Class attributes, because most calls end without ever changing one.
    is_abandoned = False
    connection: Connection | None = None
    is_late = False  # the deadline has passed, and the helper asks which ranks are missing
    addresses: frozenset[Address] = frozenset()  # of the store, if it may not answer
    helper: background.BackgroundCall[Any] | None = None
    has_helper = False
    _frees: tuple[Callable[[], None], ...] = ()

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
            with _deciding_lock:
                if self.has_helper:
                    self._frees += (free,)
                    return
        free()

    def abandon(self) -> None:
        """Give the call up."""
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
    state: LocalState | None = None,
) -> T:
    """Run a protocol on a store; return what it returns, or raise what it raises.

    Raises ``StoreLostError`` if it has not ended ``BEYOND_S`` after the timeout; or what
    ``unnamed``
    returns, if the store was there a moment ago and is only too slow to name the missing ranks.
    """
    state = state or local_state(store)
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
    state: LocalState,
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
    call.addresses = _known_addresses(store, state)
    helper = call.helper = background.BackgroundCall(work, "rankcall-store")
    _running.add(call)
    try:
        has_ended = helper.ended(min(deadline + BEYOND_S - clock.monotonic(), _LONGEST_S))
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


def own_connection(store: Store, state: LocalState, seconds: float) -> Connection | None:
    """Take a connection of our own; make one if there is not. None if that takes too long."""
    try:
        return state.idle.pop()
    except IndexError:
        pass
    place = where(store)

    def connect() -> None:
        state.idle.append(_cloned(store, state, place))

    call = Call()
    call.addresses = _known_addresses(store, state)
    call.helper = background.BackgroundCall(connect, "rankcall-store-connect")
    _note_connecting(call)
    left = seconds
    while not call.helper.ended(min(left, _LOOK_S)):
        left -= _LOOK_S
        # A host that ends after the helper's own look leaves torch trying to connect.
        is_lost = bool(state.addresses) and is_closed(store, state.addresses)
        if is_lost or left <= 0:
            call.helper.give_up()
            if is_lost:
                raise lost(place, "it closed the connection")
            return None
    try:
        call.helper.outcome()
    except StoreLostError:
        raise
    except Exception as error:
        raise lost(place, str(error)) from error
    try:
        return state.idle.pop()
    except IndexError:  # another thread was faster
        return None


def separate_connection(store: Store, seconds: float) -> Connection:
    """Make a connection of our own on this thread, or raise ``StoreLostError``.

    Connecting takes as long as it takes.

    Answers over it take ``seconds`` at most.
    """
    state = local_state(store)
    if not state.is_tcp:
        return Connection(store)
    place = where(store)
    try:
        own = _cloned(store, state, place)
    except RuntimeError as error:
        raise lost(place, str(error)) from error
    own.limit(seconds)
    return own


def _cloned(store: Store, state: LocalState, place: str) -> Connection:
    # Without this, torch would go on trying until the store's timeout.
    if is_closed(store, _known_addresses(store, state)):
        raise lost(place, "it closed the connection")
    open_before = open_sockets().keys()
    client = store.clone()  # type: ignore[attr-defined]
    client.set_timeout(_READ)
    own = own_socket(client, open_before)
    if own is not None:
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(client, own)


_connecting: list[Call] = []


def _note_connecting(call: Call) -> None:
    """Keep a call that connects until it has ended, so that an exit can release it."""
    _connecting[:] = [earlier for earlier in _connecting if not _has_ended(earlier)]
    _connecting.append(call)


def _known_addresses(store: Store, state: LocalState) -> frozenset[Address]:
    """Return the addresses of a TCPStore. A connection that is reset later has none any more."""
    if not state.addresses:
        state.addresses = addresses_of(store)
    return state.addresses


def give_back(state: LocalState, connection: Connection) -> None:
    """Return a connection of our own, for the next call."""
    if connection.is_broken:
        connection.close()
    else:
        state.idle.append(connection)


def _release_helpers() -> None:
    """Let helpers that wait for a store end before the interpreter does."""
    calls = [call for call in (*_running, *_connecting) if not _has_ended(call)]
    for call in calls:
        call.abandon()
    _wait_for(calls, _EXIT_S / 4)
    for call in calls:
        if call.addresses and not _has_ended(call):
            shut_down_connections_to(call.addresses)
    _wait_for(calls, _EXIT_S)


def _has_ended(call: Call) -> bool:
    return call.helper is None or call.helper.ended(0)


def _wait_for(calls: Iterable[Call], seconds: float) -> None:
    until = clock.monotonic() + seconds
    for call in calls:
        if call.helper is not None:
            left = max(0.0, until - clock.monotonic())
            background.exit_budget.spend(call.helper.ended, left)


def connect_to(address: str, port: int, seconds: float) -> Store | None:
    """Connect to a store; None if that fails or takes too long, also if its host is stopped."""

    def connect() -> Store:
        resolved = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        call.addresses = frozenset((str(info[4][0]), port) for info in resolved)
        wait = timedelta(seconds=max(1.0, seconds))
        return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=wait)

    call = Call()
    call.helper = background.BackgroundCall(connect, "rankcall-store-connect")
    _note_connecting(call)
    if not call.helper.ended(seconds):
        call.helper.give_up()
        return None
    try:
        store: Store = call.helper.outcome()
    except (RuntimeError, OSError):
        return None
    store.set_timeout(timedelta(seconds=300))  # as torch's own default
    return store
