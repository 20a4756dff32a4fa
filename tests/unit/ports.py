"""Ports for tests that have to name one before a process listens on it."""

from __future__ import annotations

import contextlib
import os
import socket
from itertools import chain

# Below the ephemeral ports: the kernel gives none of them to a program that asks for any port. A
# process that the tests start may listen seconds after its port was chosen, so no port is chosen
# twice: each process of the tests goes through the range once, and those with neighbouring ids
# begin far apart.
_RANGE = range(12_000, 32_000)
_first = os.getpid() * 997 % len(_RANGE)
_not_tried = chain(_RANGE[_first:], _RANGE[:_first])


def bound(taken: socket.socket) -> int:
    """Bind a socket to a port that nobody else gets, on the loopback address."""
    for port in _not_tried:
        with contextlib.suppress(OSError):
            taken.bind(("127.0.0.1", port))
            return port
    raise OSError(f"this process has tried every port of {_RANGE.start} to {_RANGE.stop}")


def free_port() -> int:
    """Return such a port, for a process that is started later."""
    with socket.socket() as probe:
        return bound(probe)
