"""Share the page's connections out, so that nobody can use up those of the others.

A connection is a *stranger* until a request on it has shown the token. Strangers have few places
and little time, so unfinished requests, of which a process can make thousands, cost no viewer
anything. Viewers have most of the places. All places together need half of the descriptors that
this process may have.

A newcomer always gets a place. If all are taken, the connection that came first is closed, of the
peer that has most of them. A limit for each peer was not chosen: viewers behind one proxy, or
behind ssh, all have one address. A browser whose stream is closed asks for a new one.
"""

from __future__ import annotations

import asyncio
import ipaddress
import resource
from collections import Counter
from functools import partial
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["Connections"]

STRANGER_S = 10.0  # to send a request with the token
# Both are smaller if there are fewer descriptors: a quarter and three quarters of their half.
_MOST_STRANGERS, _MOST_VIEWERS = 512, 1024
_DESCRIPTORS = 4096  # are asked for
# New connections that asyncio takes on before it looks at older ones again. A viewer shows its
# token within three such turns, and must not lose its place in them to newer strangers.
AT_ONCE = 32


class Connections:
    """The connections of one server. They belong to its event loop."""

    def __init__(self) -> None:
        room = _descriptors() // 2
        self._strangers = _Places(max(1, min(_MOST_STRANGERS, room // 4)))
        self._viewers = _Places(max(1, min(_MOST_VIEWERS, room - room // 4)))

    def protocol(self) -> Any:
        """Return what makes uvicorn's protocol for a new connection."""
        return partial(_Connection, self)

    def enter(self, connection: _Connection) -> None:
        """Give a new connection a place among the strangers."""
        self._strangers.take(connection)

    def promote(self, connection: _Connection) -> None:
        """Give a connection that has shown the token a place among the viewers."""
        if self._strangers.leave(connection):
            self._viewers.take(connection)

    def leave(self, connection: _Connection) -> None:
        """Free the place of a connection that has ended."""
        self._strangers.leave(connection)
        self._viewers.leave(connection)


class _Connection(H11Protocol):
    """uvicorn's connection, which takes a place and may lose it."""

    def __init__(self, all_connections: Connections, *, app_state: Any, **parameters: Any) -> None:
        # Each request finds its connection in its state: request.state.connection.
        super().__init__(app_state={**app_state, "connection": self}, **parameters)
        self._all = all_connections
        self._deadline: asyncio.TimerHandle | None = None
        self.peer = ""

    def connection_made(self, transport: Any) -> None:
        try:
            super().connection_made(transport)
        except OSError:  # the system does not tell the addresses of this connection's ends
            # asyncio would read from it all the same: without a place, and without a deadline.
            transport.abort()
            raise
        self.peer = _peer_of(self.client[0]) if self.client else ""
        self._deadline = self.loop.call_later(STRANGER_S, self.close)
        self._all.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        self._all.leave(self)
        super().connection_lost(exc)

    def has_shown_token(self) -> None:
        """Make this connection a viewer's."""
        self._stop_deadline()
        self._all.promote(self)

    def close(self) -> None:
        """Close it without waiting for a peer that may never read."""
        self._stop_deadline()
        self.transport.abort()

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()


class _Places:
    """A number of places for connections, in the order in which they came."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: dict[_Connection, None] = {}

    def take(self, connection: _Connection) -> None:
        """Take a place; if there is none, close the oldest connection of the largest peer."""
        if len(self._taken) >= self._most:
            counts = Counter(other.peer for other in self._taken)
            largest = max(counts.values())
            oldest = next(other for other in self._taken if counts[other.peer] == largest)
            del self._taken[oldest]
            oldest.close()
        self._taken[connection] = None

    def leave(self, connection: _Connection) -> bool:
        """Free a connection's place; return whether it had one."""
        if connection not in self._taken:
            return False
        del self._taken[connection]
        return True


def _peer_of(host: str) -> str:
    """Return who an address belongs to: a host has many loopback and many IPv6 addresses."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None and not address.is_loopback:
            return str(ipaddress.ip_network((address, 64), strict=False))
        address = address.ipv4_mapped or address
    return "loopback" if address.is_loopback else str(address)


def _descriptors() -> int:
    """Raise this process's limit of descriptors as far as it needs; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return _DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
