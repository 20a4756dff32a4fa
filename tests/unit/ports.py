"""Ports for tests that have to name one before a process listens on it."""

from __future__ import annotations

import contextlib
import os
import socket


def bound(taken: socket.socket) -> int:
    """Bind a socket to a port that no program gets which asks for any port."""
    for port in range(12_000 + os.getpid() * 37 % 15_000, 32_000):
        with contextlib.suppress(OSError):
            taken.bind(("127.0.0.1", port))
            return port
    raise OSError("no port below the ephemeral ones is free")


def free_port() -> int:
    """Return such a port on which no process listens."""
    with socket.socket() as probe:
        return bound(probe)
