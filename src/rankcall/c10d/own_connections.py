"""Connections of our own to a store: clones of the user's, made once and kept for the next call."""

from __future__ import annotations

import socket
import weakref
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import HashStore, Store, TCPStore

from rankcall.background import BackgroundCall
from rankcall.c10d.calls import Call, note_connecting, on_fork, watch_the_process
from rankcall.c10d.connection import Connection
from rankcall.c10d.errors import StoreLostError, check_store, lost
from rankcall.c10d.location import Address, addresses_of, is_closed, own_socket, root_of, where
from rankcall.process import open_sockets

_LOOK_S = 1.0  # how often a wait for a connection looks whether the host has ended
_READ = timedelta(seconds=1)  # for keys that were there a moment ago


@dataclass
class StoreState:
    """What this process knows of a store object, and its connections, as long as that lives."""

    answers_slowly: bool  # a request may take longer than it was given
    is_tcp: bool
    appends: bool
    counts: bool  # whether the store takes ``Arrive``
    addresses: frozenset[Address] = frozenset()  # of a TCPStore; looked up once
    idle: list[Connection] = field(default_factory=list)


_states: weakref.WeakKeyDictionary[Store, StoreState] = weakref.WeakKeyDictionary()


def state_of(store: Store) -> StoreState:
    """Return the state that this process keeps for a store object; or raise ``TypeError``."""
    state = _states.get(store) if isinstance(store, Store) else None
    if state is None:
        check_store(store)
        watch_the_process()
        root = root_of(store)
        state = StoreState(
            answers_slowly=not isinstance(root, HashStore),
            is_tcp=isinstance(root, TCPStore),
            appends=bool(root.has_extended_api()),  # type: ignore[attr-defined]
            # A PrefixStore makes two other requests instead.
            counts=isinstance(store, TCPStore) and hasattr(store, "barrier"),
        )
        state = _states.setdefault(store, state)
    return state


on_fork(_states.clear)  # a child must not talk on its parent's connection


def own_connection(store: Store, state: StoreState, seconds: float) -> Connection | None:
    """Take a connection of our own; make one if there is not. None if that takes too long."""
    try:
        return state.idle.pop()
    except IndexError:
        pass
    place = where(store)

    def connect() -> None:
        state.idle.append(_cloned(store, state, place))

    call = Call()
    call.addresses = known_addresses(store, state)
    call.helper = BackgroundCall(connect, "rankcall-store-connect")
    note_connecting(call)
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
    state = state_of(store)
    if not state.is_tcp:
        return Connection(store)
    place = where(store)
    try:
        own = _cloned(store, state, place)
    except RuntimeError as error:
        raise lost(place, str(error)) from error
    own.limit(seconds)
    return own


def _cloned(store: Store, state: StoreState, place: str) -> Connection:
    # Without this, torch would go on trying until the store's timeout.
    if is_closed(store, known_addresses(store, state)):
        raise lost(place, "it closed the connection")
    open_before = open_sockets().keys()
    client = store.clone()  # type: ignore[attr-defined]
    client.set_timeout(_READ)
    own = own_socket(client, open_before)
    if own is not None:
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(client, own)


def known_addresses(store: Store, state: StoreState) -> frozenset[Address]:
    """Return the addresses of a TCPStore. A connection that is reset later has none any more."""
    if not state.addresses:
        state.addresses = addresses_of(store)
    return state.addresses


def give_back(state: StoreState, connection: Connection) -> None:
    """Return a connection of our own, for the next call."""
    if connection.is_broken:
        connection.close()
    else:
        state.idle.append(connection)


def connect_to(address: str, port: int, seconds: float) -> Store | None:
    """Connect to a store; None if that fails or takes too long, also if its host is stopped."""

    def connect() -> Store:
        resolved = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        call.addresses = frozenset((str(info[4][0]), port) for info in resolved)
        wait = timedelta(seconds=max(1.0, seconds))
        return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=wait)

    call = Call()
    call.helper = BackgroundCall(connect, "rankcall-store-connect")
    note_connecting(call)
    if not call.helper.ended(seconds):
        call.helper.give_up()
        return None
    try:
        store: Store = call.helper.outcome()
    except (RuntimeError, OSError):
        return None
    store.set_timeout(timedelta(seconds=300))  # as torch's own default
    return store
