"""Can this node exchange data with the others, over the interface that the job uses?

Each agent answers on a port of its own, which it notes in the job's store together with a token:
only who can read the store can use it. Before a node takes part, it sends a MiB to itself and to
some of the others, has it sent back, and asks for their time.

A transfer that fails tells that one of two nodes is not well, or the network between them. If a
node fails with several others, and with more than half of those that it tried, it is the culprit.
Otherwise the link is suspect, and nobody leaves for it. A node that gives no sign of life in the
store meanwhile may have ended, and its failures count for nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rankcall.background import BackgroundCall
from rankcall.process import boot_id
from rankcall.recovery.rendezvous import Rendezvous
from rankcall.run.recoveries import ABSENT, FAILED, SUSPECT, WELL, Check

_BYTES = 1 << 20  # enough to need many packets; a link that drops some is slow, and does it still
_TOKEN_BYTES = 16
_CLOCK = struct.Struct("!q")
# For one transfer. A machine that is busy with other work may take seconds to begin.
_TRANSFER_S = 30.0
_GREET_S = 15.0  # until who has connected has shown the token
_MOST_AT_ONCE = 32  # transfers that one node answers; others wait in the queue of the socket
_MOST_PEERS = 8  # that one node tries: the next ones by name, so that each is tried by as many
_MOST_NODES = 4096  # in the store; the newest ones
_AT_ONCE = 256  # of them in one request
_MOST_ENTRY = 1024  # bytes
_ALIVE_S = 5.0  # for a sign of life, beside two heartbeats; and for nodes that gave none before
_POLL_S = 0.5
_SIOCGIFADDR = 0x8915
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


@dataclass(frozen=True)
class Node:
    """How to reach a node's agent, as it stands in the job's store.

    ``member`` is the agent's name in torch's rendezvous, where it gives its signs of life.
    """

    name: str
    member: str
    address: str
    port: int
    token: str
    boot_id: str
    hosts_store: bool

    @classmethod
    def decode(cls, data: bytes) -> Node:
        """Return what a value in the store says. Raises ``ValueError`` if it is damaged."""
        try:
            fields: Any = json.loads(data[:_MOST_ENTRY])
            node = cls(**fields)
            sound = (
                all(
                    isinstance(text, str) and 0 < len(text) <= 255
                    for text in (node.name, node.member, node.address)
                )
                and type(node.port) is int
                and 0 < node.port < 1 << 16
                and len(bytes.fromhex(node.token)) == _TOKEN_BYTES
                and isinstance(node.boot_id, str)
            )
            socket.inet_pton(_family(node.address), node.address)
        except (ValueError, TypeError, OSError, RecursionError) as error:
            raise ValueError("this is no node of a job") from error
        if not sound:
            raise ValueError("this is no node of a job")
        return node


@dataclass(frozen=True)
class Link:
    """What a transfer to another node found: ``error`` is empty if it went well.

    ``ahead_s`` is how far the other node's clock is ahead of ours, to within ``within_s``.
    """

    node: Node
    error: str = ""
    ahead_s: float = 0.0
    within_s: float = 0.0


class Responder:
    """Answers transfers of other nodes until the process ends, on threads of its own."""

    def __init__(self, address: str, clock: Callable[[], int] = time.time_ns) -> None:
        self._socket = socket.create_server(
            (address, 0), family=_family(address), backlog=4 * _MOST_AT_ONCE
        )
        self._clock = clock
        self._free = threading.Semaphore(_MOST_AT_ONCE)
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self.port = int(self._socket.getsockname()[1])
        BackgroundCall(self._serve, "rankcall-links")

    def close(self) -> None:
        """Answer no more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed, or there are no descriptors left
                if self._socket.fileno() < 0:
                    return
                time.sleep(_POLL_S)
                continue
            if not self._free.acquire(timeout=_TRANSFER_S):
                connection.close()
                continue
            BackgroundCall(partial(self._answer, connection), "rankcall-links")

    def _answer(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                token = _receive(connection, _TOKEN_BYTES, time.monotonic() + _GREET_S)
                if not hmac.compare_digest(token, self.token):
                    return
                deadline = time.monotonic() + _TRANSFER_S
                _send(connection, _CLOCK.pack(self._clock()), deadline)
                _send(connection, _receive(connection, _BYTES, deadline), deadline)
        finally:
            self._free.release()


def transfer(node: Node, seconds: float = _TRANSFER_S) -> Link:
    """Send a MiB to a node and back, and compare its clock with ours. Never raises ``OSError``."""
    deadline, content = time.monotonic() + seconds, os.urandom(_BYTES)
    try:
        with socket.create_connection((node.address, node.port), timeout=seconds) as connection:
            asked_ns = time.time_ns()
            _send(connection, bytes.fromhex(node.token), deadline)
            (theirs_ns,) = _CLOCK.unpack(_receive(connection, _CLOCK.size, deadline))
            answered_ns = time.time_ns()
            _send(connection, content, deadline)
            if _receive(connection, _BYTES, deadline) != content:
                return Link(node, "what came back is not what was sent")
    except TimeoutError:
        return Link(node, f"no answer within {seconds:g} s")
    except OSError as error:
        return Link(node, error.strerror or str(error))
    within_s = max(0, answered_ns - asked_ns) / 2e9
    return Link(node, "", (theirs_ns - (asked_ns + answered_ns) / 2) / 1e9, within_s)


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(min(1 << 16, size - len(parts)))
        if not part:
            raise ConnectionError("the connection was closed")
        parts += part
    return bytes(parts)


def _send(connection: socket.socket, content: bytes, deadline: float) -> None:
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    connection.sendall(content)


class Links:
    """The links of this node to the others of its job. One thread uses it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._own: Node | None = None
        self._responder: Responder | None = None
        self._gone: set[str] = set()  # the tokens of agents that have ended: not tried again

    def close(self) -> None:
        """Answer other nodes no more."""
        if self._responder is not None:
            self._responder.close()

    def checks(self, rendezvous: Rendezvous) -> list[Check]:
        """Return how the network and the clock of this node are. Raises what the store raises."""
        began = time.monotonic()
        try:
            own = self._own or self._enter(rendezvous)
        except OSError as error:
            text = f"this node cannot listen on its interface: {error.strerror}"
            return [Check("network", FAILED, text, time.monotonic() - began)]
        itself = transfer(own)
        if itself.error:
            text = f"no transfer from {own.name} to itself over {own.address}: {itself.error}"
            return [Check("network", FAILED, text, time.monotonic() - began)]
        links = self._try(self._next(self._others(rendezvous, own)), rendezvous)
        state, text = judge(self._name, links)
        network = Check("network", state, text, time.monotonic() - began)
        state, text = judge_clock(own, links, rendezvous.clock_tolerance_s)
        return [network, Check("clock", state, text)]

    def _enter(self, rendezvous: Rendezvous) -> Node:
        """Begin to answer, and note in the store where."""
        store = rendezvous.store()
        address = job_address(rendezvous.store_host)
        self._responder = responder = Responder(address)
        own = Node(
            *(self._name, rendezvous.member, address, responder.port, responder.token.hex()),
            boot_id=boot_id(),
            hosts_store=rendezvous.hosts_store(),
        )
        number = store.add("links/nodes", 1)
        store.set(f"links/{number}", json.dumps(asdict(own)).encode())
        self._own = own
        return own

    def _others(self, rendezvous: Rendezvous, own: Node) -> list[Node]:
        """Return the other nodes that have noted themselves, the newest agent of each."""
        store = rendezvous.store()
        last = int(store.add("links/nodes", 0))
        keys = [f"links/{number}" for number in range(max(1, last - _MOST_NODES + 1), last + 1)]
        nodes: dict[str, Node] = {}
        for first in range(0, len(keys), _AT_ONCE):
            for value in _values(store, keys[first : first + _AT_ONCE]):
                with contextlib.suppress(ValueError):
                    node = Node.decode(value)
                    nodes[node.name] = node
        return [
            node
            for node in nodes.values()
            if node.name != own.name
            and node.token not in self._gone
            and (node.boot_id == own.boot_id or not _is_local(node))
        ]

    def _next(self, nodes: Sequence[Node]) -> list[Node]:
        """Return the nodes to try, and with them the store's host, which has the job's clock."""
        in_order = sorted(nodes, key=lambda node: (node.name < self._name, node.name))
        chosen = in_order[:_MOST_PEERS]
        return chosen + [node for node in in_order[_MOST_PEERS:] if node.hosts_store][:1]

    def _try(self, nodes: Sequence[Node], rendezvous: Rendezvous) -> list[Link]:
        """Return the transfers that tell something: those that went well, or to nodes that live.

        A node lives if it gives another sign of life. One that gives none any more has ended, and
        one of which there was none may have, too: it has not taken part yet.
        """
        began, before = time.monotonic(), rendezvous.heartbeats()
        deadline = began + _TRANSFER_S + 2 * rendezvous.heartbeat_s + _ALIVE_S
        links: list[Link] = []
        failed: dict[Node, Link] = {}
        waiting = {
            node: BackgroundCall(partial(transfer, node), "rankcall-links") for node in nodes
        }
        while (waiting or failed) and time.monotonic() < deadline:
            if waiting:
                next(iter(waiting.values())).ended(_POLL_S)
            else:
                time.sleep(_POLL_S)
            for node in [node for node, call in waiting.items() if call.ended(0)]:
                link = waiting.pop(node).outcome()
                if link.error:
                    failed[node] = link
                else:
                    links.append(link)
            if not waiting and not failed:
                break
            now = rendezvous.heartbeats()
            is_early = time.monotonic() < began + _ALIVE_S
            for node in [*waiting, *failed]:
                known = node.member in before
                if node.member not in now and (known or node in failed or not is_early):
                    self._gone.add(node.token)
                    failed.pop(node, None)
                    if node in waiting:
                        waiting.pop(node).give_up()
                elif node in failed and now.get(node.member) != before.get(node.member):
                    links.append(failed.pop(node))
        for call in waiting.values():
            call.give_up()
        return links


def _values(store: Any, keys: list[str]) -> list[bytes]:
    """Return the values of keys. An agent that ended early may have left a number and no value."""
    if not store.check(keys):
        keys = [key for key in keys if store.check([key])]
    return [bytes(value) for value in store.multi_get(keys)] if keys else []


def judge(name: str, links: Sequence[Link]) -> tuple[str, str]:
    """Return the state of a node's network, and why, from its transfers to nodes that are there."""
    if not links:
        return WELL, "no other node is there yet"
    failed = [link for link in links if link.error]
    if not failed:
        return WELL, f"transfers to {_nodes(len(links))} went well"
    named = ", ".join(f"{link.node.name} ({link.error})" for link in failed[:3])
    more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
    if len(failed) > 1 and 2 * len(failed) > len(links):
        tried = f"{len(failed)} of {_nodes(len(links))}"
        return FAILED, f"no transfer from {name} to {named}{more}: {tried}"
    return (
        SUSPECT,
        f"no transfer between {name} and {named}{more}: either node may be at fault",
    )


def judge_clock(own: Node, links: Sequence[Link], tolerance_s: float) -> tuple[str, str]:
    """Return the state of a node's clock, and why.

    torch's agents compare their heartbeats with clocks of other nodes: a node whose clock is late
    counts as dead while it lives. If most nodes agree with this one, the store's host is at fault.
    """
    if own.hosts_store:
        return WELL, "this node hosts the store"
    reached = [link for link in links if not link.error]
    host = next((link for link in reached if link.node.hosts_store), None)
    if host is None:
        return ABSENT, "the clock of the store's host is not known"
    off = [link for link in reached if abs(link.ahead_s) - link.within_s > tolerance_s]
    side = "behind" if host.ahead_s > 0 else "ahead of"
    text = f"{abs(host.ahead_s):.3g} s {side} {host.node.name}, which hosts the store"
    if host not in off:
        return WELL, text
    return (FAILED if 2 * len(off) > len(reached) else SUSPECT), text


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def job_address(store_host: str) -> str:
    """Return the address of this node in the network that the job uses.

    The variables of the back ends name its interface. Without them, it is the one over which the
    store is reached.
    """
    for variable in _INTERFACES:
        for name in os.environ.get(variable, "").split(","):
            address = _address_of(name.strip().lstrip("="))
            if address:
                return address
    return _address_towards(store_host) or "127.0.0.1"


def _address_of(interface: str) -> str:
    """Return the IPv4 address of an interface; empty if there is none of that name."""
    if not 0 < len(interface) < 16:
        return ""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        asked = struct.pack("256s", interface.encode())
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)[20:24])
    return ""


def _address_towards(host: str) -> str:
    """Return the address from which packets to a host go; empty if it is not known."""
    with contextlib.suppress(OSError):
        for family, kind, *_, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(place)  # sends nothing
                return str(probe.getsockname()[0]).partition("%")[0]
    return ""


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _is_local(node: Node) -> bool:
    return node.address.startswith("127.") or node.address == "::1"
