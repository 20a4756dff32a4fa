"""Where a store is: its place, its addresses, and this process's connections to it.

torch tells which socket is a client's only in the client's repr. But that looks up the name of an
address, for seconds if no name server answers. So the connections of a TCPStore are found among the
sockets of this process by their port. The repr is read only if that is not enough: if two stores
have one port, after a reset, and without /proc.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress

from torch.distributed import Store, TCPStore

from rankcall.process import open_sockets, second_handle

Address = tuple[str, int]


def root_of(store: Store) -> Store:
    """Return the store below all prefixes."""
    below: Store = getattr(store, "_underlying_non_prefix_store", store)
    return below


def where(store: Store) -> str:
    """Name the place of a store, without its repr."""
    root = root_of(store)
    if isinstance(root, TCPStore):
        return f"at {root.host}:{root.port}"
    path = getattr(root, "path", None)
    return f"in {path}" if path else f"({type(root).__name__})"


def addresses_of(store: Store) -> frozenset[Address]:
    """Return the address that a TCPStore client is connected to; empty if it is not known."""
    port = port_of(store)
    if not port:
        return frozenset()
    peers = {_peer_once(connection) for connection in _connections(lambda to: to[1] == port)}
    if len(peers) > 1:
        own = _socket_by_repr(store)
        peers = {_peer_once(own)} if own is not None else set()
    return frozenset(address for address in peers if address)


def is_closed(store: Store, addresses: Collection[Address]) -> bool:
    """Return whether the other end has closed this process's connections to a TCPStore.

    A connection that was reset has no address any more. So if no connection to ``addresses``, which
    the store had earlier, is left, it is closed, too. False if it is not known.
    """
    if addresses:
        return all(map(_has_ended_once, _connections(addresses.__contains__)))
    own = _socket_by_repr(store) if port_of(store) else None
    return own is not None and _has_ended_once(own)


def own_socket(client: Store, open_before: Collection[int]) -> socket.socket | None:
    """Return a second handle on the socket of a new TCPStore client; None if it is not found.

    ``open_before`` are the inodes of the sockets that this process had before the client was made.
    """
    port = port_of(client)
    connections = list(_connections(lambda to: to[1] == port, except_for=open_before))
    if len(connections) == 1:
        return connections[0]
    for connection in connections:  # another thread has connected at the same time
        connection.close()
    return _socket_by_repr(client)


def is_hosted_here(store: Store) -> bool:
    """Return whether this process hosts a TCPStore: it listens on the store's port.

    False if it is not known (without /proc). It may be true of a store on another machine, if this
    process hosts a second one with the same port.
    """
    port = port_of(store)
    if not port:
        return False
    for inode, descriptor in open_sockets().items():
        handle = second_handle(descriptor, inode)
        if handle is None:
            continue
        with handle, suppress(OSError):
            if handle.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and (
                handle.getsockname()[1:2] == (port,)
            ):
                return True
    return False


def shut_down_connections_to(addresses: Collection[Address]) -> None:
    """Shut down this process's connections to a store that does not answer."""
    for connection in _connections(addresses.__contains__):
        with connection, suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def has_ended(connection: socket.socket) -> bool:
    """Return whether no more data can come over a connection. Never waits, and takes no data."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:  # reset
        return True


def _has_ended_once(connection: socket.socket) -> bool:
    """Return whether a connection has ended; close this handle on it."""
    with connection:
        return has_ended(connection)


def _connections(
    is_wanted: Callable[[Address], bool], except_for: Collection[int] = ()
) -> Iterator[socket.socket]:
    """Yield second handles on this process's connections to some addresses.

    A process may have thousands of sockets. So a caller closes each handle before the next is made.
    The sockets with the inodes ``except_for`` are left out.
    """
    for inode, descriptor in open_sockets().items():
        handle = second_handle(descriptor, inode) if inode not in except_for else None
        if handle is None:
            continue
        address = _peer(handle)
        if address is not None and is_wanted(address):
            yield handle
        else:
            handle.close()


def _peer_once(connection: socket.socket) -> Address | None:
    """Return the other end of a connection; close this handle on it."""
    with connection:
        return _peer(connection)


def _peer(connection: socket.socket) -> Address | None:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        host, port = connection.getpeername()[:2]
    except OSError:  # not connected
        return None
    return host, port


def port_of(store: Store) -> int:
    """Return the port of a TCPStore; 0 of another store."""
    root = root_of(store)
    return root.port if isinstance(root, TCPStore) else 0


def _socket_by_repr(client: Store) -> socket.socket | None:
    """Return a second handle on the socket that a TCPStore client's repr names."""
    match = re.search(r"fd=(\d+)", repr(root_of(client)))
    if not match:
        return None
    with suppress(OSError):
        descriptor = int(match.group(1))
        return second_handle(descriptor, os.fstat(descriptor).st_ino)
    return None
