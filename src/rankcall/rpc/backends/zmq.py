"""ZMQ: rankcall's agent over ZeroMQ, shared memory within a host, CURVE between hosts."""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch.distributed.rpc import RpcBackendOptions, _is_current_rpc_agent_set, api
from torch.distributed.rpc.constants import DEFAULT_INIT_METHOD, DEFAULT_RPC_TIMEOUT_SEC

from rankcall import background
from rankcall.background import EXIT_S, exit_budget
from rankcall.errors import AuthenticationFailed, BackendUnavailable, RpcTimeout
from rankcall.rpc._group import (
    StaticGroup,
    check_arguments,
    init_deadline,
    set_group,
    undone_on_error,
)
from rankcall.rpc._members import MemberLog, life
from rankcall.rpc._place import Place
from rankcall.rpc._roll import Roll, check_names, claim_place
from rankcall.rpc._secret import derive_keys, find_secret
from rankcall.rpc.backends._zmq_dynamic import DynamicGroup
from rankcall.rpc.devices import Node, as_device, as_device_map, device_list, reverse_maps, validate
from rankcall.rpc.native import agent_module

__all__ = [
    "ZmqRpcBackendOptions",
    "construct_rpc_backend_options_handler",
    "init_backend_handler",
]

_GIB = 1 << 30
_FOREVER_S = 1e9


class ZmqRpcBackendOptions(RpcBackendOptions):
    """The options of the ZMQ back end.

    ``num_worker_threads``: how many requests run at once. ``device_maps``, ``devices``: as
    TensorPipe's. ``host``: the address where workers on other hosts reach this one (default:
    ``RANKCALL_RPC_HOST``, or that of the way to the store). ``secret_file``: see the guide; without
    a secret nothing listens on the network. ``heartbeat_timeout``: seconds of silence after which a
    worker on another host is given up. ``max_message_bytes``: the most that one frame may hold.
    ``arena_bytes``: the most shared memory to send in; 0 for none.
    """

    def __init__(
        self,
        *,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        num_worker_threads: int = 16,
        device_maps: Mapping[str, Mapping[Any, Any]] | None = None,
        devices: Sequence[Any] | None = None,
        host: str | None = None,
        secret_file: str | os.PathLike[str] | None = None,
        heartbeat_timeout: float = 10.0,
        max_message_bytes: int = 8 * _GIB,
        arena_bytes: int = 2 * _GIB,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        for name, value, least in (
            ("num_worker_threads", num_worker_threads, 1),
            ("max_message_bytes", max_message_bytes, 1 << 16),
            ("arena_bytes", arena_bytes, 0),
        ):
            if not isinstance(value, int):
                raise TypeError(f"{name} must be an int; got {value!r}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}; got {value}")
        if heartbeat_timeout <= 0:
            raise ValueError(f"heartbeat_timeout must be positive; got {heartbeat_timeout}")
        self.num_worker_threads = num_worker_threads
        self.device_maps = {to: as_device_map(each) for to, each in (device_maps or {}).items()}
        self.devices = [as_device(device) for device in devices or ()]
        self.host = host
        self.secret_file = secret_file
        self.heartbeat_timeout = heartbeat_timeout
        self.max_message_bytes = max_message_bytes
        self.arena_bytes = arena_bytes

    def set_device_map(self, to: str, device_map: Mapping[Any, Any]) -> None:
        """Add to the map of devices here to devices at worker ``to``."""
        self.device_maps[to] = as_device_map({**self.device_maps.get(to, {}), **device_map})


def construct_rpc_backend_options_handler(
    rpc_timeout: float, init_method: str, **kwargs: Any
) -> ZmqRpcBackendOptions:
    """Return the options. An unknown keyword is a ``TypeError``."""
    return ZmqRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def init_backend_handler(
    store: dist.Store,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: ZmqRpcBackendOptions,
) -> Any:
    """Bring this worker's agent up and return it, in use; see TENSORPIPE's for the contract.

    Also raises ``BackendUnavailable`` where pyzmq or a compiler is missing, and
    ``AuthenticationFailed`` where workers of several hosts have no common secret.
    """
    check_arguments(store, rpc_backend_options, ZmqRpcBackendOptions)
    library = _library()
    agent_module()  # built before the clock starts
    deadline = init_deadline(rpc_backend_options.rpc_timeout)
    roll = None
    if world_size:
        roll = claim_place(dist.PrefixStore("roll", store), name, rank, world_size, deadline)
        rank = roll.rank
    worker = Worker(name, rank, library, rpc_backend_options)
    try:
        return (
            _join_static(worker, roll, store, deadline) if roll else _join(worker, store, deadline)
        )
    except BaseException:
        worker.place.close()
        raise


class Worker:
    """This process's agent with its folder and its addresses."""

    def __init__(self, name: str, rank: int, library: str, options: ZmqRpcBackendOptions) -> None:
        self.name, self.rank, self.options = name, rank, options
        self.session = secrets.randbits(63)
        self.place = Place(self.session)
        self.agent = agent_module().ZmqAgent(
            name,
            rank,
            options.rpc_timeout,
            library,
            self.session,
            options.num_worker_threads,
            options.max_message_bytes,
            int(options.heartbeat_timeout * 1000),
        )
        self.agent.on_close(self.place.close)
        self.local = f"ipc://{self.place.path}/in"
        self.agent.bind_local(self.local)
        self.agent.open_arena(f"{self.place.path}/", options.arena_bytes)
        self.network = self._bind_network()

    def _bind_network(self) -> str:
        secret = find_secret(self.options.secret_file)
        if secret is None:
            return ""
        self.agent.use_keys(*derive_keys(secret))
        address = self.options.host or os.environ.get("RANKCALL_RPC_HOST")
        address = address or _way_to_store(self.options.init_method)
        shown = f"[{address}]" if ":" in address else address
        return str(self.agent.bind_network(f"tcp://{shown}:*")).rstrip("\0")

    def card(self) -> dict[str, Any]:
        """Return what the others need to know of this worker."""
        options = self.options
        node = Node(self.name, torch.cuda.device_count(), options.device_maps, options.devices)
        return {
            "node": node.to_json(),
            "rank": self.rank,
            "session": self.session,
            "host": self.place.host,
            **life(),
            "local": self.local,
            "network": self.network,
            "max_message_bytes": options.max_message_bytes,
        }

    def meet(self, card: Mapping[str, Any]) -> None:
        """Connect to another worker, or to this one. Raises ``AuthenticationFailed``."""
        name, here = card["node"]["name"], card["host"] == self.place.host
        if not here and not (card["network"] and self.network):
            raise AuthenticationFailed(
                f"worker {name!r} is on another host ({card['host'].split()[0]}) than "
                f"{self.name!r} ({self.place.host.split()[0]}), and not both were given a secret: "
                "set RANKCALL_RPC_SECRET_FILE to a 0600 file with the same content on every host"
            )
        arena = card["local"].removeprefix("ipc://").removesuffix("in") if here else ""
        endpoint, pid = (card["local"], card["pid"]) if here else (card["network"], 0)
        self.agent.add_peer(
            name, card["rank"], card["session"], endpoint, arena, pid, card["max_message_bytes"]
        )


def _join(worker: Worker, store: dist.Store, deadline: float) -> Any:
    group = DynamicGroup(worker, MemberLog(dist.PrefixStore("dynamic", store)))
    group.join(deadline)
    set_group(group)
    _end_at_exit()
    return worker.agent


def _join_static(worker: Worker, roll: Roll, store: dist.Store, deadline: float) -> Any:
    cards = roll.exchange("init", worker.card(), deadline)
    nodes = [Node.from_json(card["node"]) for card in cards]
    check_names(node.name for node in nodes)
    roll.describe = lambda rank: f"{nodes[rank].name!r} (rank {rank})"
    validate(nodes, static=True)
    reverse = reverse_maps(worker.name, nodes)
    devices = device_list(nodes[worker.rank], reverse)
    if torch.cuda.is_available() and devices:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    agent = worker.agent
    agent.set_devices(worker.options.device_maps, reverse, devices)
    for card in cards:
        worker.meet(card)
    roll.hopeless = lambda: "; ".join(sorted(agent.gone().values()))
    agent.on_join(Quiescence(agent, roll).wait)
    agent.on_control(lambda sender, payload: "")
    with undone_on_error():
        api._init_rpc_states(agent)  # type: ignore[no-untyped-call]
        roll.exchange("started", None, deadline)
        _reach([card for card in cards if card["host"] != worker.place.host], agent, deadline)
        roll.exchange("ready", None, deadline)
    set_group(StaticGroup(agent, roll, store))
    _end_at_exit()
    return agent


def _reach(cards: Sequence[Mapping[str, Any]], agent: Any, deadline: float) -> None:
    """Hear from every worker on another host. Raises ``AuthenticationFailed``."""
    left = max(0.1, deadline - time.monotonic())
    names = [card["node"]["name"] for card in cards]
    answers = [agent.control(name, "", left) for name in names]
    for name, answer in zip(names, answers, strict=True):
        try:
            answer.wait()
        except RuntimeError as error:
            raise AuthenticationFailed(
                f"worker {name!r} on another host cannot be reached, or does not let this one in; "
                f"is RANKCALL_RPC_SECRET_FILE's content the same there? ({error})"
            ) from error


class Quiescence:
    """Waits until no call is under way anywhere in a static group."""

    def __init__(self, agent: Any, roll: Roll) -> None:
        self._counts, self._roll = agent.counts, roll

    def wait(self, shutdown: bool, timeout: float) -> None:
        """Return on all workers at once; ``timeout`` in seconds, 0 for none.

        Two rounds in a row must find as many calls ended as started, and the same number
        (Mattern's four counters, 1987): a call that starts another lies between no two of them.
        """
        deadline = time.monotonic() + (timeout or _FOREVER_S)
        before = None
        while True:
            self._wait_for_own(deadline)
            told = self._roll.exchange("join", self._counts(), deadline)
            started, ended = map(sum, zip(*told, strict=True))
            if started == ended == before:
                return
            before = started if started == ended else None

    def _wait_for_own(self, deadline: float) -> None:
        while True:
            started, ended = self._counts()
            if started == ended:
                return
            if time.monotonic() > deadline:
                raise RpcTimeout(f"{started - ended} calls of this worker have not come back")
            time.sleep(0.001)


def _library() -> str:
    """Return the shared object that brings libzmq in."""
    try:
        import zmq
        from zmq.backend.cython import _zmq
    except ImportError as error:
        raise BackendUnavailable(
            f"the RPC back end ZMQ needs pyzmq: pip install 'rankcall[rpc]' ({error})"
        ) from error
    assert zmq.has("curve")
    return str(_zmq.__file__)


def _way_to_store(init_method: str) -> str:
    """Return this host's address on the way to the store's host; loopback where there is none."""
    url = urlparse(init_method)
    host = url.hostname if url.scheme == "tcp" else os.environ.get("MASTER_ADDR")
    try:
        family, *_, address = socket.getaddrinfo(host or "127.0.0.1", 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


_close: Callable[[], None] | None = None


def _end_at_exit() -> None:
    """Close the agent at exit, before whatever is registered by now."""
    global _close
    if _close is not None:
        atexit.unregister(_close)
    _close = background.at_exit(_at_exit)


def _at_exit() -> None:
    """Take down what a program that ends without ``shutdown`` left running."""
    if _is_current_rpc_agent_set() and isinstance(
        api._get_current_rpc_agent(), agent_module().ZmqAgent
    ):
        # The agent has a patience of its own; what it takes is not there for other waits.
        exit_budget.spend(lambda _: api._finalize_shutdown(), EXIT_S)  # type: ignore[no-untyped-call]
