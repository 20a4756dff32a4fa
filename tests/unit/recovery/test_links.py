"""Transfers between nodes before they take part, and what they say about a node."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

from rankcall.process import boot_id
from rankcall.recovery import links as module
from rankcall.recovery.links import (
    Link,
    Links,
    Node,
    Responder,
    job_address,
    judge,
    judge_clock,
    transfer,
)

HERE = "127.0.0.1"


def node(name: str, port: int = 9, token: bytes = bytes(16), *, hosts_store: bool = False) -> Node:
    """Return how to reach an agent on this machine."""
    return Node(name, f"{name}_1_0", HERE, port, token.hex(), boot_id(), hosts_store)


@pytest.fixture
def responder() -> Iterator[Responder]:
    """Return a node that answers, whose clock is an hour ahead."""
    import time

    answering = Responder(HERE, clock=lambda: time.time_ns() + 3600 * 10**9)
    yield answering
    answering.close()


@pytest.fixture
def peer() -> Iterator[Callable[[Callable[[socket.socket], object]], Node]]:
    """Return what makes a node that does what it is told with a connection."""
    sockets: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def make(behave: Callable[[socket.socket], object]) -> Node:
        listening = socket.create_server((HERE, 0))
        sockets.append(listening)

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                behave(connection)

        threads.append(threading.Thread(target=serve, daemon=True))
        threads[-1].start()
        return node("node-b", listening.getsockname()[1])

    yield make
    for listening in sockets:
        listening.close()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_a_transfer(responder: Responder) -> None:
    """It goes there and back, and tells how far the other clock is ahead."""
    link = transfer(node("node-b", responder.port, responder.token))
    assert link.error == ""
    assert abs(link.ahead_s - 3600) <= link.within_s + 1e-3


def test_the_token_is_needed(responder: Responder) -> None:
    """Who does not know it learns nothing, and the next one is answered."""
    link = transfer(node("node-b", responder.port))
    assert link.error
    assert transfer(node("node-b", responder.port, responder.token)).error == ""


def test_many_at_once(responder: Responder, monkeypatch: pytest.MonkeyPatch) -> None:
    """More transfers than are answered at once wait for their turn."""
    from concurrent.futures import ThreadPoolExecutor

    peer = node("node-b", responder.port, responder.token)
    with ThreadPoolExecutor(2 * module._MOST_AT_ONCE) as pool:
        links = list(pool.map(transfer, [peer] * 2 * module._MOST_AT_ONCE))
    assert {link.error for link in links} == {""}


def _damages(connection: socket.socket) -> None:
    import time

    deadline = time.monotonic() + 30
    module._receive(connection, 16, deadline)
    module._send(connection, module._CLOCK.pack(0), deadline)
    content = bytearray(module._receive(connection, module._BYTES, deadline))
    content[4711] ^= 1
    module._send(connection, bytes(content), deadline)


def test_peers_that_do_not_answer_well(
    peer: Callable[[Callable[[socket.socket], object]], Node],
) -> None:
    """Each is an error, within the deadline."""
    ended = threading.Event()
    assert transfer(peer(lambda _: ended.wait(30)), seconds=0.2).error == "no answer within 0.2 s"
    ended.set()
    assert transfer(peer(_damages)).error == "what came back is not what was sent"
    assert "closed" in transfer(peer(lambda connection: connection.recv(16))).error
    with socket.create_server((HERE, 0)) as free:
        port = free.getsockname()[1]
    assert "refused" in transfer(node("node-b", port)).error


def test_what_the_store_says() -> None:
    """A node comes back as it was written."""
    own = node("node-a", 4711, os.urandom(16), hosts_store=True)
    assert Node.decode(json.dumps(asdict(own)).encode()) == own


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("name", ""),
        ("name", "x" * 256),
        ("member", None),
        ("address", "localhost"),  # a name would be looked up, which may take for ever
        ("address", 7),
        ("port", 0),
        ("port", 1 << 16),
        ("port", True),
        ("port", "9"),
        ("token", "00"),
        ("token", "no number"),
        ("boot_id", None),
        ("other", 1),
    ],
)
def test_damage_in_the_store(name: str, value: object) -> None:
    """Nothing of it is used."""
    fields = {**asdict(node("node-a")), name: value}
    with pytest.raises(ValueError, match="no node of a job"):
        Node.decode(json.dumps(fields).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"[" * 100_000, b"\xff", b'{"name": "a"}'])
def test_other_values_in_the_store(data: bytes) -> None:
    """They are no nodes, either."""
    with pytest.raises(ValueError, match="no node of a job"):
        Node.decode(data)


def _links(errors: str, *, ahead_s: float = 0.0) -> list[Link]:
    """Return links to nodes: ``+`` one that went well, ``-`` one that failed."""
    return [
        Link(node(f"node-{index}"), "" if sign == "+" else "no route", ahead_s, 0.001)
        for index, sign in enumerate(errors, 1)
    ]


@pytest.mark.parametrize(
    ("errors", "state", "words"),
    [
        ("", "well", "no other node is there yet"),
        ("++", "well", "transfers to 2 nodes went well"),
        ("-", "suspect", "between node-a and node-1 (no route)"),
        ("+-", "suspect", "between node-a and node-2 (no route)"),
        ("--", "failed", "from node-a to node-1 (no route), node-2 (no route): 2 of 2 nodes"),
        ("--+", "failed", "2 of 3 nodes"),
        ("--++", "suspect", "either node may be at fault"),  # others may be as well at fault
        ("-----", "failed", "and 2 more: 5 of 5 nodes"),
    ],
)
def test_who_is_the_culprit(errors: str, state: str, words: str) -> None:
    """With one other node the link is suspect; with several, and most of them, this node is."""
    found = judge("node-a", _links(errors))
    assert found[0] == state
    assert words in found[1]


@pytest.mark.parametrize(
    ("ahead_s", "others_s", "state", "words"),
    [
        (0.0, (), "well", "node-1, which hosts the store"),
        (9.9, (), "well", "9.9 s behind"),
        (12.0, (), "failed", "12 s behind node-1"),
        (-12.0, (), "failed", "12 s ahead of node-1"),
        (12.0, (12.0, 12.0), "failed", "12 s behind"),
        (12.0, (0.0, 0.0), "suspect", "12 s behind"),  # the host's clock is wrong, not ours
        (0.0, (12.0, 12.0), "well", "0 s"),
    ],
)
def test_the_clock(ahead_s: float, others_s: tuple[float, ...], state: str, words: str) -> None:
    """It is compared with that of the store's host, unless most nodes have another one, too."""
    links = [Link(node("node-1", hosts_store=True), "", ahead_s, 0.001)]
    links += [
        Link(node(f"node-{number}"), "", seconds, 0.001)
        for number, seconds in enumerate(others_s, 2)
    ]
    found = judge_clock(node("node-a"), links, 10.0)
    assert found[0] == state
    assert words in found[1]


def test_a_clock_that_cannot_be_compared() -> None:
    """A slow answer proves nothing, the store's host has the right time, and it may not answer."""
    slow = [Link(node("node-1", hosts_store=True), "", 12.0, 5.0)]
    assert judge_clock(node("node-a"), slow, 10.0)[0] == "well"
    assert judge_clock(node("node-a", hosts_store=True), [], 10.0)[0] == "well"
    assert judge_clock(node("node-a"), _links("+-", ahead_s=99.0), 10.0)[0] == "absent"


class Meeting:
    """The part of a rendezvous that links use: a store, and signs of life."""

    store_host, heartbeat_s, clock_tolerance_s = HERE, 0.0, 10.0

    def __init__(self, name: str, store: Any, alive: dict[str, int]) -> None:
        self.member, self._store, self._alive = f"{name}_1_0", store, alive
        self.beating = True

    def store(self) -> Any:
        return self._store

    def hosts_store(self) -> bool:
        return self.member == "node-0_1_0"

    def heartbeats(self) -> dict[str, object]:
        if self.beating:
            self._alive.update({name: at + 1 for name, at in self._alive.items()})
        return dict(self._alive)


@pytest.fixture
def links_of() -> Iterator[Callable[[str], Links]]:
    """Return what makes the links of a node."""
    made: list[Links] = []

    def make(name: str) -> Links:
        made.append(Links(name))
        return made[-1]

    yield make
    for links in made:
        links.close()


@pytest.fixture
def store() -> Any:
    """Return a store that all nodes share."""
    from torch.distributed import HashStore

    return HashStore()


def _entered(store: Any, *nodes: Node) -> None:
    for other in nodes:
        number = store.add("links/nodes", 1)
        store.set(f"links/{number}", json.dumps(asdict(other)).encode())


def test_nodes_that_meet(links_of: Callable[[str], Links], store: Any) -> None:
    """The first finds nobody; the second exchanges data with it, and knows its time."""
    alive: dict[str, int] = {}
    checks = links_of("node-0").checks(Meeting("node-0", store, alive))  # type: ignore[arg-type]
    assert [(check.state, check.text) for check in checks] == [
        ("well", "no other node is there yet"),
        ("well", "this node hosts the store"),
    ]
    store.add("links/nodes", 1)  # an agent that was ended before it could note itself
    store.set("links/3", b"damaged")
    store.add("links/nodes", 1)
    second = links_of("node-1")
    for _ in range(2):  # it notes itself once
        checks = second.checks(Meeting("node-1", store, alive))  # type: ignore[arg-type]
        assert checks[0].text == "transfers to 1 node went well"
        assert (checks[1].name, checks[1].state) == ("clock", "well")
    assert int(store.add("links/nodes", 0)) == 4


def test_nodes_that_are_gone(
    links_of: Callable[[str], Links], store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transfer that fails counts only if the other node gives a sign of life after it."""
    with socket.create_server((HERE, 0)) as free:
        port = free.getsockname()[1]  # refused once it is closed: the agents have ended
    _entered(store, *(node(f"node-{index}", port, bytes([index] * 16)) for index in (1, 2)))
    meeting = Meeting("node-0", store, {"node-1_1_0": 1, "node-2_1_0": 1})
    meeting.beating = False
    links = links_of("node-0")
    with monkeypatch.context() as patch:
        patch.setattr(module, "_ALIVE_S", 0.0)
        patch.setattr(module, "_TRANSFER_S", 0.5)
        checks = links.checks(meeting)  # type: ignore[arg-type]
    assert (checks[0].state, checks[0].text) == ("well", "no other node is there yet")
    meeting.beating = True
    checks = links.checks(meeting)  # type: ignore[arg-type]
    assert checks[0].state == "failed"
    meeting._alive.clear()  # now they are known to be gone, and are not tried again
    assert links.checks(meeting)[0].state == "well"  # type: ignore[arg-type]
    assert len(links._gone) == 2


def test_addresses_of_another_machine(links_of: Callable[[str], Links], store: Any) -> None:
    """A loopback address of another machine leads to this one, and is not tried."""
    _entered(store, replace(node("node-1"), boot_id="another"))
    checks = links_of("node-0").checks(Meeting("node-0", store, {}))  # type: ignore[arg-type]
    assert checks[0].text == "no other node is there yet"


def test_some_of_many_are_tried() -> None:
    """Those that follow by name, so that each is tried by as many; and the store's host."""
    nodes = [node(f"node-{number:02}", hosts_store=number == 3) for number in range(40)]
    chosen = [other.name for other in Links("node-35")._next(nodes[:35] + nodes[36:])]
    assert chosen[:4] == ["node-36", "node-37", "node-38", "node-39"]
    assert chosen[4:] == ["node-00", "node-01", "node-02", "node-03"]
    chosen = [other.name for other in Links("node-20")._next(nodes[:20] + nodes[21:])]
    assert len(chosen) == 9
    assert chosen[-1] == "node-03"


@pytest.mark.parametrize(
    ("variables", "host", "address"),
    [
        ({"GLOO_SOCKET_IFNAME": "lo"}, "192.0.2.1", HERE),
        ({"NCCL_SOCKET_IFNAME": "=lo"}, "192.0.2.1", HERE),
        ({"GLOO_SOCKET_IFNAME": "absent0, lo"}, "192.0.2.1", HERE),
        ({"GLOO_SOCKET_IFNAME": "a-name-that-is-too-long"}, "localhost", HERE),
        ({}, "127.0.0.1", HERE),
        ({}, "::1", "::1"),
        ({}, "", HERE),
    ],
)
def test_the_interface_of_the_job(
    variables: dict[str, str], host: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The back ends' variables name it; otherwise it is the one towards the store."""
    for name in module._INTERFACES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert job_address(host) == address


def test_a_node_that_cannot_listen(
    links_of: Callable[[str], Links], store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that has no such address is not well."""
    monkeypatch.setattr(module, "job_address", lambda host: "192.0.2.77")
    checks = links_of("node-0").checks(Meeting("node-0", store, {}))  # type: ignore[arg-type]
    assert [check.state for check in checks] == ["failed"]
    assert "cannot listen" in checks[0].text


def test_a_node_that_does_not_reach_itself(
    links_of: Callable[[str], Links], store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even its loopback works."""
    monkeypatch.setattr(module, "transfer", lambda to: Link(to, "no route"))
    checks = links_of("node-0").checks(Meeting("node-0", store, {}))  # type: ignore[arg-type]
    assert [check.state for check in checks] == ["failed"]
    assert checks[0].text == f"no transfer from node-0 to itself over {HERE}: no route"


def test_the_signs_of_life_of_torch() -> None:
    """The names under which nodes note themselves are those of torch's heartbeats."""
    from rankcall.recovery.rendezvous import Rendezvous

    class Described:
        """Prints as torch's descriptor of a node."""

        def __repr__(self) -> str:
            return "node-a_1_0"

    named = Described()
    state = SimpleNamespace(last_heartbeats={named: 7})
    handler = SimpleNamespace(
        _this_node=named, _state_holder=SimpleNamespace(state=state), num_nodes_waiting=lambda: 0
    )
    rendezvous = Rendezvous(handler)
    assert rendezvous.heartbeats() == {rendezvous.member: 7}
