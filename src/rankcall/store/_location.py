"""Where a store is: its place, its addresses, and this process's connections to it.

torch tells which socket is a client's only in the client's repr. But that looks up the name of an
address, for seconds if no name server answers. So the connections of a TCPStore are found among the
sockets of this process by their port. The repr is read only if two hosts have a store at one port,
or if the sockets cannot be listed because there is no /proc.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Collection, Iterator
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
    """Return the addresses that a TCPStore client is connected to; empty for other stores."""
    found = set()
    for connection in _connections_of(store):
        with connection:
            found.add(_peer(connection))
    return frozenset(address for address in found if address)


def is_closed(store: Store, addresses: Collection[Address]) -> bool:
    """Return whether this process's connections to a TCPStore are closed by the other end.

    A connection that was reset has no address any more. So a store that has no connection left is
    closed, too. ``addresses`` are those that the store had earlier; empty if they are not known.
    """
    if not _port(store):
        return False
    for connection in _connections_of(store, addresses):
        with connection:
            try:
                if connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    return False
            except BlockingIOError:
                return False
            except OSError:
                continue  # reset
    return True


def own_socket(client: Store, open_before: Collection[int]) -> socket.socket | None:
    """Return a second handle on the socket of a new TCPStore client; None if it is not found.

    ``open_before`` are the inodes of the sockets that this process had before the client was made.
    """
    found: list[socket.socket] = []
    for connection in _connections_to(_port(client), open_before):
        found.append(connection)
        if len(found) == 2:  # another thread has connected at the same time
            break
    if len(found) == 1:
        return found[0]
    for connection in found:
        connection.close()
    return _socket_by_repr(client)


def shut_down_connections_to(addresses: Collection[Address]) -> None:
    """Shut down this process's connections to a store that does not answer."""
    for connection in _connections():
        with connection, suppress(OSError):
            if _peer(connection) in addresses:
                connection.shutdown(socket.SHUT_RDWR)


def _connections_of(store: Store, addresses: Collection[Address] = ()) -> Iterator[socket.socket]:
    """Yield second handles on this process's connections to a TCPStore."""
    if not _port(store):
        return
    if not open_sockets():  # they cannot be listed
        found = _socket_by_repr(store)
        yield from [found] if found is not None else []
        return
    if not addresses:
        at_port: set[Address | None] = set()
        for connection in _connections_to(_port(store)):
            with connection:
                at_port.add(_peer(connection))
        if len({address[0] for address in at_port if address}) > 1:
            found = _socket_by_repr(store)
            yield from [found] if found is not None else []
            return
    for connection in _connections_to(_port(store)):
        if addresses and _peer(connection) not in addresses:
            connection.close()
        else:
            yield connection


def _connections_to(port: int, except_for: Collection[int] = ()) -> Iterator[socket.socket]:
    """Yield second handles on the connections to a port of any host."""
    for connection in _connections(except_for):
        if (_peer(connection) or ("", 0))[1] == port:
            yield connection
        else:
            connection.close()


def _connections(except_for: Collection[int] = ()) -> Iterator[socket.socket]:
    """Yield second handles on the sockets of this process, except for those with some inodes.

    A process may have thousands of sockets. So a caller closes each handle before the next is made.
    """
    for inode, descriptor in open_sockets().items():
        handle = second_handle(descriptor, inode) if inode not in except_for else None
        if handle is not None:
            yield handle


def _peer(connection: socket.socket) -> Address | None:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        host, port = connection.getpeername()[:2]
    except OSError:  # not connected
        return None
    return host, port


def _port(store: Store) -> int:
    root = root_of(store)
    return root.port if isinstance(root, TCPStore) else 0


def _socket_by_repr(client: Store) -> socket.socket | None:
    """Return a second handle on the socket that a TCPStore client's repr names."""
    found = re.search(r"fd=(\d+)", repr(root_of(client)))
    if not found:
        return None
    with suppress(OSError):
        descriptor = int(found.group(1))
        return second_handle(descriptor, os.fstat(descriptor).st_ino)
    return None
