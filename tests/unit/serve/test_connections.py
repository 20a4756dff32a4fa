"""The page while others use up what they can of its connections and descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import DEADLINE_S, Served

from rankcall.testing.synthetic import synthetic_run

pytest.importorskip("starlette", reason="needs rankcall[serve]")
pytest.importorskip("uvicorn", reason="needs rankcall[serve]")

import uvicorn
from uvicorn.protocols.http import h11_impl
from uvicorn.server import ServerState

from rankcall.serve import connections
from rankcall.serve.connections import Connections, _peer_of, _Places

# Holds as many connections as it can with what it is given to send, from many addresses. Each that
# is closed is replaced at once, so the page never has rest.
HOLDER = """
import resource, selectors, socket, sys
port, count = map(int, sys.argv[1:3])
sent = sys.argv[3].encode().decode("unicode_escape")
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
count = min(count, hard - 50)
waiting = selectors.DefaultSelector()
made = 0
def connect():
    global made
    made += 1
    connection = socket.socket()
    connection.bind((f"127.0.{made // 250 % 250}.{made % 250 + 1}", 0))
    connection.settimeout(30)
    try:
        connection.connect(("127.0.0.1", port))
        connection.sendall(sent.encode("latin-1"))
    except OSError:
        pass
    connection.setblocking(False)
    waiting.register(connection, selectors.EVENT_READ)
for _ in range(count):
    connect()
print("holds", flush=True)
while True:
    for key, _ in waiting.select():
        try:
            if key.fileobj.recv(65536):
                continue
        except OSError:
            pass
        waiting.unregister(key.fileobj)
        key.fileobj.close()
        connect()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small run."""
    folder = tmp_path_factory.mktemp("served") / "run"
    synthetic_run(folder, 2, 20)
    return folder


@contextlib.contextmanager
def holding(port: int, count: int, sent: str) -> Iterator[None]:
    """Hold connections to a page for the length of a block."""
    command = [sys.executable, "-c", HOLDER, str(port), str(count), sent]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(holder.stdout, selectors.EVENT_READ)
            assert selector.select(DEADLINE_S)
        assert holder.stdout.readline() == "holds\n"
        yield
        assert holder.poll() is None
    finally:
        holder.kill()
        holder.communicate(timeout=DEADLINE_S)


UNFINISHED = {
    "nothing": "",
    "a part of a header": "GET / HTTP/1.1\\r\\nHo",
    "no end of the headers": "GET / HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\n",
    "no token": "GET /events HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\n\\r\\n",
    "no body": "POST /login HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\nOrigin: http://127.0.0.1\\r\\n"
    "Content-Length: 100\\r\\n\\r\\n",
}


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(sent, id=name, marks=pytest.mark.slow if name == "no body" else ())
        for name, sent in UNFINISHED.items()
    ],
)
def test_unfinished_requests_cost_no_viewer_anything(run: Path, sent: str) -> None:
    """While a process holds 3,000 of them and renews each, every request with the token works.

    The page has 1,024 descriptors, which is what most systems allow.
    """
    with Served(run, descriptors=1024) as served, holding(served.port, 3000, sent):
        for _ in range(20):
            assert served.ask("/api/diagnosis").status == 200
        assert served.ask(Authorization=None).status == 401
    assert "Traceback" not in served.err


def opened(served: Served) -> socket.socket:
    """Open a stream of changes; return it when its first event has come."""
    viewer = socket.create_connection(("127.0.0.1", served.port), DEADLINE_S)
    viewer.sendall(served.stream_request())
    text = b""
    while b"data: " not in text:
        part = viewer.recv(1 << 16)
        assert part, text
        text += part
    return viewer


def test_more_viewers_than_places(run: Path) -> None:
    """With few descriptors, 300 streams do not lock out the next: the oldest makes room."""
    with Served(run, descriptors=256) as served, contextlib.ExitStack() as stack:
        viewers = [stack.enter_context(opened(served)) for _ in range(300)]
        assert served.ask().status == 200
        stack.enter_context(opened(served))
        viewers[0].settimeout(DEADLINE_S)
        with contextlib.suppress(ConnectionResetError):
            while viewers[0].recv(1 << 16):
                pass  # the first viewer's stream has an end
        assert served.end() == 0
    assert "Traceback" not in served.err


def test_a_stranger_has_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection without a request with the token is closed; one that has shown it stays."""
    import uvicorn
    from uvicorn.server import ServerState

    monkeypatch.setattr(connections, "STRANGER_S", 0.05)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["connection"].has_shown_token()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await asyncio.sleep(DEADLINE_S)

    async def connect() -> None:
        config = uvicorn.Config(app, log_level="error", ws="none")
        config.load()
        make, state = connections.Connections().protocol(), ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: make(config=config, server_state=state, app_state={}), "127.0.0.1", 0
        )
        port = server.sockets[0].getsockname()[1]
        (slow, slow_out), (viewer, viewer_out) = [
            await asyncio.open_connection("127.0.0.1", port) for _ in range(2)
        ]
        viewer_out.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        slow_out.write(b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(slow.read(), DEADLINE_S) == b""
        assert b"200 OK" in await asyncio.wait_for(viewer.readline(), DEADLINE_S)
        assert len(state.connections) == 1
        for out in (slow_out, viewer_out):
            out.close()
        for task in list(state.tasks):
            task.cancel()
        server.close()

    asyncio.run(connect())


class Held:
    """A connection of a peer."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.is_open = True

    def close(self) -> None:
        """Close it."""
        self.is_open = False


def test_the_largest_peer_makes_room() -> None:
    """Of the peer that has most connections the oldest is closed; of equal peers, the oldest."""
    places: Any = _Places(4)
    held = [Held(peer) for peer in "baaa"]
    for connection in held:
        places.take(connection)
    later = [Held(peer) for peer in "cdef"]
    closed = []
    for connection in later:
        places.take(connection)
        closed.append([other for other in (*held, *later) if not other.is_open])
    assert closed == [held[1:2], held[1:3], held[:3], held[:4]]
    assert not places.leave(held[0])
    assert places.leave(later[0])
    places.take(Held("g"))
    assert all(connection.is_open for connection in later)


def test_whose_address_it_is() -> None:
    """Addresses that one host has many of are one peer."""
    for address in ("127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.9"):
        assert _peer_of(address) == "loopback"
    assert _peer_of("10.0.0.1") == _peer_of("::ffff:10.0.0.1") != _peer_of("10.0.0.2")
    assert _peer_of("2001:db8::1") == _peer_of("2001:db8::ffff:2") != _peer_of("2001:db8:0:1::1")
    assert _peer_of("fe80::1%eth0") == _peer_of("fe80::2")


def test_a_connection_without_addresses_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not be given a place, and would be read from without a deadline."""

    def fail(transport: asyncio.Transport) -> None:
        raise OSError(12, "no memory")

    async def asked() -> None:
        loop, said = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda _, context: said.append(context["exception"]))
        config = uvicorn.Config(lambda: None)
        config.load()
        state = ServerState()
        made = Connections().protocol()

        def protocol() -> asyncio.Protocol:
            return made(config=config, server_state=state, app_state={})

        server = await loop.create_server(protocol, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(1), DEADLINE_S) == b""
            writer.close()
        assert [error.errno for error in said] == [12]
        assert not state.connections

    monkeypatch.setattr(h11_impl, "get_local_addr", fail)
    asyncio.run(asked())
