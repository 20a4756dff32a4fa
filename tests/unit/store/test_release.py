"""What a call leaves behind: no reference to the user's store, and no connection at the end."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, Store, TCPStore
from world import wait_until

from rankcall import store
from rankcall.c10d import calls, location, own_connections
from rankcall.c10d import client as c10d_client
from rankcall.c10d.location import addresses_of, shut_down_connections_to

CALLS: dict[str, Callable[[Store], Any]] = {
    "barrier": lambda client: store.barrier(client, 2, "p", 0.1, 0),
    "barrier, long": lambda client: store.barrier(client, 2, "q", 4.5, 0),
    "barrier without ranks": lambda client: store.barrier(client, 2, "r", 0.1),
    "synchronize": lambda client: store.synchronize(client, b"", 0, 2, "s", 0.1),
    "get_all": lambda client: store.get_all(client, 0, "x", 2, timeout=0.1),
    "rollcall": lambda client: store.rollcall(client, 0, 2, timeout=0.1),
    "clean_up": lambda client: store.clean_up(client, 0, 2, "p", timeout=0.1),
}


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Switch the garbage collector off, as training jobs do."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(
            kind,
            name,
            marks=[pytest.mark.slow] if kind != "TCPStore" and name == "barrier, long" else [],
        )
        for kind in ("TCPStore", "HashStore", "FileStore")
        for name in CALLS
    ],
)
def test_a_store_is_let_go(kind: str, name: str, tmp_path: Path) -> None:
    """A store is freed when its owner lets go of it, whatever has failed on it."""
    if kind == "TCPStore":
        client: Store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    else:
        client = HashStore() if kind == "HashStore" else FileStore(str(tmp_path / "store"), 2)
    for _ in range(2):
        with suppress(RuntimeError):
            CALLS[name](client)
    reference = weakref.ref(client)
    del client
    wait_until(lambda: reference() is None)  # a helper that connects too slowly ends after its call


class Slow(TCPStore):
    """A store to which a connection takes longer than any call."""

    def __init__(self, go_on: threading.Event) -> None:
        super().__init__("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.go_on = go_on

    def clone(self) -> Any:
        """Connect when the test says so."""
        assert self.go_on.wait(60)
        return super().clone()  # type: ignore[misc]


@pytest.mark.usefixtures("no_collector")
def test_a_store_is_let_go_once_it_is_connected_to() -> None:
    """A connection that takes longer than the call keeps the store only as long as it takes."""
    go_on = threading.Event()
    client = Slow(go_on)
    with pytest.raises(RuntimeError):
        store.synchronize(client, b"", 0, 2, "s", 0.1)
    reference = weakref.ref(client)
    del client
    assert reference() is not None
    go_on.set()
    wait_until(lambda: reference() is None)


def test_only_connections_to_that_store_are_shut_down() -> None:
    """One to the same port of another host is the user's."""
    with ExitStack() as stack:
        lost = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = lost.getsockname()[1]
        other = stack.enter_context(socket.create_server(("127.0.0.2", port)))
        ours = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
        users = stack.enter_context(socket.create_connection(("127.0.0.2", port), 10))
        far_end, _ = other.accept()
        stack.enter_context(far_end)
        shut_down_connections_to({("127.0.0.1", port)})
        assert ours.recv(1) == b""
        users.sendall(b"x")
        assert far_end.recv(1) == b"x"


def server() -> TCPStore:
    """Return a store that this process hosts."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def inode_of(client: Store) -> int:
    """Return the inode of a client's socket, which torch tells in its repr only."""
    match = re.search(r"fd=(\d+)", repr(client))
    assert match
    return os.fstat(int(match[1])).st_ino


def test_no_name_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store's repr asks a name server, which may not answer for seconds. No call needs it."""
    asked: list[Store] = []

    monkeypatch.setattr(location, "_socket_by_repr", asked.append)
    client = server()
    store.barrier(client, 1, "p", 300, 0)
    store.barrier(client, 1, "p", 1, 0)
    (own,) = own_connections.state_of(client).idle
    assert own._socket is not None
    assert os.fstat(own._socket.fileno()).st_ino == inode_of(own._client)
    assert {port for _, port in addresses_of(client)} == {client.port}
    separate = own_connections.separate_connection(server(), 5)  # as the watcher's first connection
    assert separate._socket is not None
    assert asked == []


class Crowded(TCPStore):
    """A store to which another thread connects at the same time."""

    def clone(self) -> Any:
        """Make two connections."""
        self.other = socket.create_connection((self.host, self.port), 10)
        return super().clone()  # type: ignore[misc]


def test_two_threads_that_connect_at_once() -> None:
    """Each finds its own socket: a wrong one would be shut down in the other's place."""
    client = Crowded("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    own = own_connections._cloned(client, own_connections.state_of(client))
    assert own._socket is not None
    assert os.fstat(own._socket.fileno()).st_ino == inode_of(own._client)
    client.other.close()


def test_sockets_that_cannot_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without /proc, a connection of our own has a time limit all the same: the repr names it."""
    for module in (own_connections, location):
        monkeypatch.setattr(module, "open_sockets", dict)
    client = server()
    own = own_connections._cloned(client, own_connections.state_of(client))
    assert own._socket is not None
    assert os.fstat(own._socket.fileno()).st_ino == inode_of(own._client)


def test_a_call_that_was_given_up_leaves_the_next_calls_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caller gives the call up just as its helper returns the connection for the next call."""
    return_connection, is_known = c10d_client.give_back, threading.Event()

    class Running(weakref.WeakSet[calls.Call]):
        def add(self, item: calls.Call) -> None:
            super().add(item)
            is_known.set()

    def give_back(state: Any, connection: Any) -> None:
        return_connection(state, connection)
        assert is_known.wait(60)  # the helper may be done before its caller has noted the call
        for call in list(calls._running):
            call.abandon()

    monkeypatch.setattr(calls, "_running", Running())
    monkeypatch.setattr(c10d_client, "give_back", give_back)
    client = server()
    with pytest.raises(RuntimeError, match="was given up"):
        store.barrier(client, 1, "p", 1, 0)
    (own,) = own_connections.state_of(client).idle
    assert not own.is_broken


def test_a_forked_child_can_give_a_call_up() -> None:
    """A thread that the child does not have may have held the lock at the fork."""
    with suppress(RuntimeError):
        store.barrier(HashStore(), 2, "p", 0.01, 0)
    with calls._deciding_lock:
        holder = threading.Thread(target=fork_and_abandon, args=(statuses := [],))
        holder.start()
        holder.join(60)
    assert statuses == [0]


def fork_and_abandon(statuses: list[int]) -> None:
    """Abandon a call in a forked child; note the child's exit status."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        calls.Call().abandon()
        os._exit(0)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def test_one_port_of_two_hosts() -> None:
    """Only the connection to the store's own host counts as the store's."""
    client = server()
    with socket.create_connection(("127.0.0.2", client.port), 10):
        ((host, port),) = addresses_of(client)
    assert (host.removeprefix("::ffff:"), port) == ("127.0.0.1", client.port)
