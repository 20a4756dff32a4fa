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
from rankcall.c10d.errors import check_store, lost
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
    idle: list[Connection] = field(default_factory=list)  # of our own, for the next calls


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
            # torch has it since 2.13. A PrefixStore makes two other requests instead.
            counts=isinstance(store, TCPStore) and hasattr(store, "barrier"),
        )
        state = _states.setdefault(store, state)
    return state


on_fork(_states.clear)  # a child must not talk on its parent's connection


def own_connection(
    store: Store, state: StoreState, within_s: float, name: str = ""
) -> Connection | None:
    """Take a connection of our own; make one if there is not. None if that takes too long.

    A connection that comes too late is kept for a later call. Raises ``StoreLostError`` if the
    store refuses connections; ``name`` is the call for which it is needed.
    """
    try:
        return state.idle.pop()
    except IndexError:
        pass
    place = where(store)

    def connect() -> None:
        state.idle.append(_cloned(store, state))

    call = Call()
    call.addresses = known_addresses(store, state)
    call.helper = BackgroundCall(connect, "rankcall-store-connect")
    note_connecting(call)
    left = within_s
    while not call.helper.ended(min(left, _LOOK_S)):
        left -= _LOOK_S
        # A host that ends after the helper's own look leaves torch trying to connect.
        is_lost = bool(state.addresses) and is_closed(store, state.addresses)
        if is_lost or left <= 0:
            call.helper.give_up()
            if is_lost:
                raise lost(place, "it closed the connection", name=name)
            return None
    try:
        call.helper.outcome()
    except Exception as error:  # also if no thread could be started
        raise lost(place, str(error), name=name) from error
    try:
        return state.idle.pop()
    except IndexError:  # another thread was faster
        return None


def separate_connection(store: Store, answer_s: float, name: str = "") -> Connection:
    """Make a connection of our own on this thread, or raise ``StoreLostError``.

    Connecting takes as long as it takes. Answers over it take ``answer_s`` seconds at most.
    """
    state = state_of(store)
    if not state.is_tcp:
        return Connection(store)
    place = where(store)
    try:
        own = _cloned(store, state)
    except RuntimeError as error:
        raise lost(place, str(error), name=name) from error
    own.limit(answer_s)
    return own


def _cloned(store: Store, state: StoreState) -> Connection:
    """Connect once more to the host of a store. Raises ``RuntimeError`` as torch does."""
    # Without this look, torch would go on trying to connect until the store's timeout.
    if is_closed(store, known_addresses(store, state)):
        raise RuntimeError("it closed the connection")
    # The clone's own socket is the one that this process did not have before. torch tells it only
    # in the client's repr, which looks up the name of an address.
    open_before = open_sockets().keys()
    client = store.clone()  # type: ignore[attr-defined]
    client.set_timeout(_READ)  # the clone's own, not that of the user's store
    own = own_socket(client, open_before)
    if own is not None:
        # An append is not answered. By Nagle's algorithm the request behind it would wait until the
        # host has acknowledged it, which hosts delay by up to 40 ms.
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


def connect_to(address: str, port: int, within_s: float) -> Store | None:
    """Connect to a store; None if that fails or takes too long, also if its host is stopped."""

    def connect() -> Store:
        resolved = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        call.addresses = frozenset((str(info[4][0]), port) for info in resolved)
        wait = timedelta(seconds=max(1.0, within_s))
        return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=wait)

    call = Call()
    call.helper = BackgroundCall(connect, "rankcall-store-connect")
    note_connecting(call)
    if not call.helper.ended(within_s):
        call.helper.give_up()
        return None
    try:
        store: Store = call.helper.outcome()
    except (RuntimeError, OSError):
        return None
    store.set_timeout(timedelta(seconds=300))  # as torch's own default
    return store
