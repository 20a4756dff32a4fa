"""Break the connections to the other ranks, so that a collective that waits for them ends.

Gloo offers no way to end a collective from outside: ``abort()`` wakes nobody, a closed connection
does. NCCL's abort does what it says.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

_ESTABLISHED = "01"
_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")


def endpoints() -> list[str]:
    """Return the local ends of this process's TCP connections; none where there is no /proc."""
    return sorted(local for _, local, _ in _connections())


def break_connections(theirs: Iterable[str], but_ports: Iterable[int] = ()) -> int:
    """Shut down each connection whose far end is in ``theirs``; return how many there were.

    ``but_ports`` are left alone, at either end: the store's, which the causes go through. All
    process groups of this process are dead afterwards; their collectives raise.
    """
    far, spared = set(theirs), {f"{port:04X}" for port in but_ports}
    broken = 0
    for inode, local, remote in list(_connections()):
        ports = {local.rpartition(":")[2], remote.rpartition(":")[2]}
        if remote in far and not ports & spared:
            broken += _shut_down(inode)
    return broken


def abort_devices(groups: Iterable[Any] | None = None) -> int:
    """Abort the collectives of groups on devices, whose abort works; return how many back ends.

    ``groups``: by default all of this process. The newest first, and NCCL's between a start and an
    end, as torch does it: the abort of one communicator can wait for that of another.
    """
    if groups is None:
        groups = reversed(list(dist.distributed_c10d._world.pg_map))
    backends = list({id(each): each for group in groups for each in _on_devices(group)}.values())
    together = next((each for each in backends if hasattr(each, "_group_start")), None)
    aborted = 0
    with contextlib.suppress(Exception):
        if together is not None:
            together._group_start()
        for each in backends:
            with contextlib.suppress(Exception):
                each.abort()
                aborted += 1
        if together is not None:
            together._group_end()
    return aborted


def _on_devices(group: Any) -> Iterator[Any]:
    """Yield the back ends of a group for devices other than the CPU."""
    for device in getattr(group, "_device_types", ()):
        if device.type != "cpu":
            with contextlib.suppress(RuntimeError):  # it has none for this one
                yield group._get_backend(device)


def _connections() -> Iterator[tuple[int, str, str]]:
    """Yield inode, local and remote end of each established connection of this process."""
    mine = _own_sockets()
    for table in _TABLES:
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                inode = int(fields[9])
                if fields[3] == _ESTABLISHED and inode in mine:
                    yield inode, _plain(fields[1]), _plain(fields[2])


def _plain(end: str) -> str:
    """Write an IPv4 address that came as IPv6 (::ffff:a.b.c.d) as IPv4."""
    address, _, port = end.partition(":")
    mapped = "0000000000000000FFFF0000"
    return f"{address.removeprefix(mapped)}:{port}"


def _own_sockets() -> dict[int, int]:
    """Return this process's sockets: inode to file descriptor."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:["):
                    found[int(target[8:-1])] = int(name)
    return found


def _shut_down(inode: int) -> bool:
    """Shut one socket down, unless its descriptor means another one by now."""
    descriptor = _own_sockets().get(inode)
    if descriptor is None:
        return False
    with contextlib.suppress(OSError):
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if os.fstat(connection.fileno()).st_ino == inode:
                connection.shutdown(socket.SHUT_RDWR)
                return True
    return False
