"""Join interrupts a rank's collective: it breaks connections, and aborts groups."""

from __future__ import annotations

import socket
from typing import Any

import torch

from rankcall.join.connections import abort_devices, break_connections, endpoints


class Backend:
    """A back end that logs the calls to it."""

    def __init__(self, name: str, log: list[str], fails: bool = False) -> None:
        self.name, self.log, self.fails = name, log, fails

    def abort(self) -> None:
        self.log.append(f"abort {self.name}")
        if self.fails:
            raise RuntimeError("no communicator yet")


class Nccl(Backend):
    """A back end whose aborts stand between a group start and a group end."""

    def _group_start(self) -> None:
        self.log.append("start")

    def _group_end(self) -> None:
        self.log.append("end")


class Group:
    """A group with back ends by device; None for a device without one."""

    def __init__(self, **backends: Backend | None) -> None:
        self.backends = backends
        self._device_types = [torch.device(name) for name in backends]

    def _get_backend(self, device: torch.device) -> Backend:
        backend = self.backends[device.type]
        if backend is None:
            raise RuntimeError("No backend type associated with device type cuda")
        return backend


def test_groups_on_devices_are_aborted() -> None:
    """Each back end is aborted once, in the given order; one that fails does not stop the rest."""
    log: list[str] = []
    shared = Nccl("shared", log)
    groups = [
        Group(cuda=Nccl("new", log, fails=True)),
        Group(cpu=Backend("gloo", log), cuda=shared),
        Group(cuda=shared),
        Group(cuda=None),
        Group(xpu=Backend("xccl", log)),
    ]
    assert abort_devices(groups) == 2
    assert log == ["start", "abort new", "abort shared", "abort xccl", "end"]


def test_nothing_to_abort() -> None:
    """Groups on the CPU are not aborted: their abort would wake no thread."""
    log: list[str] = []
    assert abort_devices([Group(cpu=Backend("gloo", log)), object()]) == 0
    assert log == []
    assert abort_devices() == 0


def pair() -> tuple[Any, Any]:
    """Return the two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return near, server.accept()[0]


def end_of(connection: socket.socket) -> str:
    """Write an end as /proc does: the bytes of the address in reverse order, then the port."""
    address, port = connection.getsockname()
    return "".join(f"{int(part):02X}" for part in reversed(address.split("."))) + f":{port:04X}"


def test_only_connections_to_the_others_are_broken() -> None:
    """Connections are chosen by their far end; those of an excluded port stay open."""
    (near, far), (kept, kept_far) = pair(), pair()
    with near, far, kept, kept_far:
        assert {end_of(end) for end in (near, far, kept, kept_far)} <= set(endpoints())
        theirs = [end_of(far), end_of(kept_far), "0100007F:0001"]
        assert break_connections(theirs, [kept_far.getsockname()[1]]) == 1
        assert far.recv(1) == b""
        kept.sendall(b"x")
        assert kept_far.recv(1) == b"x"
