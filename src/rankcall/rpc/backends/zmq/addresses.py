"""The address under which the workers of other hosts reach a worker, and what it listens at."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable
from urllib.parse import urlparse

from rankcall.whole_numbers import whole_number

_LOOPBACK = "127.0.0.1"
_ELSEWHERE = "192.0.2.1"  # reserved for documentation; nothing is ever sent to it


def own_address(host: str | None, init_method: str) -> str:
    """Return the address under which other hosts reach this worker, as a number.

    ``host`` or ``RANKCALL_RPC_HOST`` if set, else the address of this host on the way to the store.
    Raises ``ValueError`` if that is not the address of one host.
    """
    wanted = host or os.environ.get("RANKCALL_RPC_HOST")
    if not wanted:
        return _way_to_store(init_method)
    try:
        address = socket.getaddrinfo(wanted, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise ValueError(f"host={wanted!r} is not the address of a host: {error}") from error
    if ipaddress.ip_address(address).is_unspecified:
        raise ValueError(
            f"host={wanted!r} is not an address that other hosts can reach. To listen on every "
            "interface pass bind=, and as host= the address that the others use"
        )
    return str(ipaddress.ip_address(address))


def endpoints(address: str, port: int | str) -> Iterable[str]:
    """Yield the endpoints to try: a port, a range of ports as "29600-29700", or any port (0)."""
    shown = f"[{address}]" if ":" in address else address
    first, dash, last = str(port).partition("-")
    begin = whole_number(first, most=65535)
    end = whole_number(last, most=65535) if dash else begin
    if begin is None or end is None or begin > end:
        raise ValueError(f'port must be a port, a range as "29600-29700", or 0; got {port!r}')
    for number in range(begin, end + 1):
        yield f"tcp://{shown}:{number or '*'}"


def is_loopback(endpoint: str) -> bool:
    """Return whether an endpoint ``tcp://address:port`` can only be reached from its own host."""
    address = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return ipaddress.ip_address(address).is_loopback


def _way_to_store(init_method: str) -> str:
    """Return this host's address on the way to the store's host.

    A host name often resolves to a loopback address on the host itself, which other hosts cannot
    use, so the default route decides then. If the user wrote a loopback address for the store, all
    workers are on one host.
    """
    url = urlparse(init_method)
    host = url.hostname if url.scheme == "tcp" else os.environ.get("MASTER_ADDR")
    address = _source_address(host) if host else ""
    if not address or (ipaddress.ip_address(address).is_loopback and not _is_plain_loopback(host)):
        address = _source_address(_ELSEWHERE) or address
    return address or _LOOPBACK


def _is_plain_loopback(host: str | None) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host or "") in (
            ipaddress.ip_address(_LOOPBACK),
            ipaddress.ip_address("::1"),
        )
    except ValueError:
        return False


def _source_address(host: str) -> str:
    """Return the address that packets to a host would come from, or an empty string.

    The kernel chooses it when a UDP socket is connected, by the routing table. ``hostname -i`` and
    its like ask the resolver instead, which often says 127.0.1.1.
    """
    try:
        # Port 9 is that of the discard service; any would do.
        family, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""
