"""Break the connections to the other ranks, so that a collective that waits for them ends.

Gloo cannot end a collective from outside: its ``abort()`` does not wake a waiting thread, but a
closed connection does. NCCL's abort works.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rankcall.process import open_sockets, second_handle

_ESTABLISHED = "01"
_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")


def endpoints() -> list[str]:
    """Return the local ends of this process's TCP connections; empty without /proc."""
    return sorted(local for _, local, _ in _connections())


def break_connections(theirs: Iterable[str], but_ports: Iterable[int] = ()) -> int:
    """Shut down each connection whose far end is in ``theirs``; return how many there were.

    Connections with a port of ``but_ports`` at either end stay open: ranks report causes through
    the store. Afterwards this process's process groups are unusable, and their collectives raise.
    """
    far, spared = set(theirs), {f"{port:04X}" for port in but_ports}
    broken = 0
    for inode, local, remote in list(_connections()):
        ports = {local.rpartition(":")[2], remote.rpartition(":")[2]}
        if remote in far and not ports & spared:
            broken += _shut_down(inode)
    return broken


def abort_devices(groups: Iterable[Any] | None = None) -> int:
    """Abort the collectives of groups on devices; return the number of back ends aborted.

    ``groups`` is by default every group of this process. The newest group comes first, and NCCL's
    aborts stand between a group start and a group end, as in torch, because the abort of one
    communicator can wait for the abort of another.
    """
    if groups is None:
        groups = reversed(list(dist.distributed_c10d._world.pg_map))
    all_backends = [backend for group in groups for backend in _on_devices(group)]
    backends = list({id(backend): backend for backend in all_backends}.values())
    grouping = next((backend for backend in backends if hasattr(backend, "_group_start")), None)
    aborted = 0
    with contextlib.suppress(Exception):
        if grouping is not None:
            grouping._group_start()
        for backend in backends:
            with contextlib.suppress(Exception):
                backend.abort()
                aborted += 1
        if grouping is not None:
            grouping._group_end()
    return aborted


def _on_devices(group: Any) -> Iterator[Any]:
    """Yield the back ends of a group for devices other than the CPU."""
    for device in getattr(group, "_device_types", ()):
        if device.type != "cpu":
            with contextlib.suppress(RuntimeError):  # the group has no back end for this device
                yield group._get_backend(device)


def _connections() -> Iterator[tuple[int, str, str]]:
    """Yield inode, local and remote end of each established connection of this process."""
    own_inodes = open_sockets()
    for table in _TABLES:
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                inode = int(fields[9])
                if fields[3] == _ESTABLISHED and inode in own_inodes:
                    yield inode, _plain(fields[1]), _plain(fields[2])


def _plain(end: str) -> str:
    """Return an IPv4 address that is written as IPv6 (::ffff:a.b.c.d) in its IPv4 form."""
    address, _, port = end.partition(":")
    mapped = "0000000000000000FFFF0000"
    return f"{address.removeprefix(mapped)}:{port}"


def _shut_down(inode: int) -> bool:
    """Shut one socket down, unless its descriptor now belongs to another socket."""
    handle = second_handle(open_sockets().get(inode, -1), inode)
    if handle is None:
        return False
    with handle, contextlib.suppress(OSError):
        handle.shutdown(socket.SHUT_RDWR)
        return True
    return False
