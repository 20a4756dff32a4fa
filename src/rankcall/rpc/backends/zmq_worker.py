"""A worker of the ZMQ back end: its options, its agent, its directory and its addresses."""

from __future__ import annotations

import dataclasses
import os
import resource
import secrets
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.machinery import ExtensionFileLoader, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.distributed.rpc import RpcBackendOptions
from torch.distributed.rpc.constants import DEFAULT_INIT_METHOD, DEFAULT_RPC_TIMEOUT_SEC

from rankcall._native import NativeModule
from rankcall.errors import AuthenticationError, BackendUnavailableError
from rankcall.process import Process
from rankcall.rpc.backends.addresses import (
    derive_keys,
    endpoints,
    find_secret,
    is_loopback,
    own_address,
)
from rankcall.rpc.backends.worker_dir import WorkerDir
from rankcall.rpc.device_maps import Node, as_device, as_device_map

AGENT = NativeModule(
    "rankcall_rpc",
    Path(__file__).parents[1] / "native",
    "module.cpp",
    BackendUnavailableError,
    defines=("USE_DISTRIBUTED", "USE_RPC", "TORCH_EXTENSION_NAME=rankcall_rpc"),
)


@cache
def agent_module() -> Any:
    """Return the loaded agent module, building it first if need be.

    Raises BackendUnavailableError.
    """
    return AGENT.load()


_GIB = 1 << 30
_HEARTBEATS_S = (0.1, 86_400.0)
_DESCRIPTORS_A_PEER = 2  # a connection in each direction
_SPARE_DESCRIPTORS = 16  # for the program's own files, and to say that there are too few


class ZmqRpcBackendOptions(RpcBackendOptions):
    """The options of the ZMQ back end.

    Args:
        rpc_timeout: Seconds until a call without an answer fails; 0 for never.
        init_method: Where the group's store is, as for torch.
        num_worker_threads: How many requests run at once.
        device_maps: For each worker, which of its devices a device here is sent to.
        devices: The devices of this worker.
        host: The address under which other hosts reach this worker (default:
            ``RANKCALL_RPC_HOST``, or this host's address on the way to the store).
        bind: The address to listen at, if it is not ``host``; ``"0.0.0.0"`` for all.
        port: The port to listen at, or a range of them as ``"29600-29700"``; 0 for any.
        secret_file: The file with the common secret. Without one, nothing listens on the network.
        heartbeat_timeout: Seconds of silence after which a worker is given up.
        max_message_bytes: The largest message head or tensor that this worker accepts.
        arena_bytes: The most shared memory to send in; 0 for none.
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
        bind: str | None = None,
        port: int | str = 0,
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
        if not _HEARTBEATS_S[0] <= heartbeat_timeout <= _HEARTBEATS_S[1]:
            raise ValueError(
                f"heartbeat_timeout must be from {_HEARTBEATS_S[0]} to {_HEARTBEATS_S[1]:.0f} "
                f"seconds; got {heartbeat_timeout}"
            )
        list(endpoints("", port))  # raises ValueError
        self.num_worker_threads = num_worker_threads
        self.device_maps = {
            to: as_device_map(device_map) for to, device_map in (device_maps or {}).items()
        }
        self.devices = [as_device(device) for device in devices or ()]
        self.host, self.bind, self.port = host, bind, port
        self.secret_file = secret_file
        self.heartbeat_timeout = heartbeat_timeout
        self.max_message_bytes = max_message_bytes
        self.arena_bytes = arena_bytes

    def set_device_map(self, to: str, device_map: Mapping[Any, Any]) -> None:
        """Add to the map of devices here to devices at worker ``to``."""
        self.device_maps[to] = as_device_map({**self.device_maps.get(to, {}), **device_map})


class Worker:
    """This process's agent with its directory and its addresses."""

    def __init__(self, name: str, rank: int, library: str, options: ZmqRpcBackendOptions) -> None:
        self.name, self.rank, self.options = name, rank, options
        self.session = secrets.randbits(63)
        self.process = Process.current()
        self.dir = WorkerDir(self.session)
        try:
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
            self.agent.on_close(self.dir.close)
            self.local = f"ipc://{self.dir.path}/in"
            self.agent.bind_local(self.local)
            self.agent.open_slabs(f"{self.dir.path}/", options.arena_bytes)
            self.network = self._bind_network()
        except BaseException:
            self.dir.close()
            raise

    def _bind_network(self) -> str:
        """Listen on the network if there is a secret; return the endpoint for the others."""
        options = self.options
        secret = find_secret(options.secret_file)
        if secret is None:
            return ""
        address = own_address(options.host, options.init_method)
        problem = ""
        for endpoint in endpoints(options.bind or address, options.port):
            try:
                bound = self.agent.bind_network(endpoint, *derive_keys(secret)).rstrip("\0")
            except RuntimeError as error:
                problem = str(error)
                continue
            return next(iter(endpoints(address, bound.rpartition(":")[2])))
        raise BackendUnavailableError(
            f"worker {self.name!r}: {problem}. Pass a free port= (or a range of ports), and as "
            "bind= an address of this machine"
        )

    def record(self) -> dict[str, Any]:
        """Return what the others need to know of this worker."""
        options = self.options
        node = Node(self.name, torch.cuda.device_count(), options.device_maps, options.devices)
        return {
            "node": node.to_json(),
            "rank": self.rank,
            "session": self.session,
            "host": self.dir.host,
            "process": dataclasses.asdict(self.process),
            "local": self.local,
            "network": self.network,
            "max_message_bytes": options.max_message_bytes,
        }

    def shares_memory_with(self, record: Mapping[str, Any]) -> bool:
        """Return whether a worker is on this host, and sees the same shared memory."""
        return bool(record["host"] == self.dir.host)

    def meet(self, record: Mapping[str, Any]) -> None:
        """Have the agent know another worker, or this one.

        Raises ``AuthenticationError`` if there is no common secret, and
        ``BackendUnavailableError`` if one of the two has no address that the other can reach.
        """
        name, process = record["node"]["name"], Process(**record["process"])
        is_local = self.shares_memory_with(record)
        if not is_local:
            self._check_way(record, process)
        # A pid of another namespace may belong to any process here.
        same_namespace = process.pid_namespace == self.process.pid_namespace
        self.agent.add_peer(
            name,
            record["rank"],
            record["session"],
            record["local"] if is_local else record["network"],
            record["local"].removeprefix("ipc://").removesuffix("in") if is_local else "",
            process.pid if is_local and same_namespace else 0,
            record["max_message_bytes"],
        )

    def _check_way(self, record: Mapping[str, Any], process: Process) -> None:
        name, host = record["node"]["name"], record["host"].split()[0]
        both = f"worker {name!r} ({host}) and worker {self.name!r} ({self.dir.host.split()[0]})"
        if not (record["network"] and self.network):
            raise AuthenticationError(
                f"{both} are on different hosts, and not both were given a secret: "
                "set RANKCALL_RPC_SECRET_FILE to a 0600 file with the same content on every host"
            )
        if process.boot_id == self.process.boot_id:
            return  # containers on one machine
        for owner, endpoint in ((name, record["network"]), (self.name, self.network)):
            if is_loopback(endpoint):
                raise BackendUnavailableError(
                    f"{both} are on different hosts, but {owner!r} listens at {endpoint}, which "
                    "only its own host can reach: pass host= to its options, or set "
                    "RANKCALL_RPC_HOST there, to an address that the other hosts can reach"
                )


def check_descriptors(name: str, peers: int) -> None:
    """Raise ``BackendUnavailableError`` if worker ``name`` cannot connect to so many more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(list(Path("/proc/self/fd").iterdir()))
    needed = open_now + _DESCRIPTORS_A_PEER * peers + _SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and needed > soft:
        others = f"{peers} more workers" if peers != 1 else "another worker"
        raise BackendUnavailableError(
            f"worker {name!r} needs {needed} file descriptors to talk to {others}, and the limit "
            f"of its process is {soft}: raise it with `ulimit -n {max(needed, 4096)}` before the "
            f"job starts (the hard limit is {hard})"
        )


def zmq_library() -> str:
    """Return the path of the shared object that loads libzmq. Raises ``BackendUnavailableError``.

    It is pyzmq's own extension module. It is not imported: that takes as long as all the rest of a
    worker's start.
    """
    package = find_spec("zmq")
    folders = package.submodule_search_locations if package else None
    spec = PathFinder.find_spec("_zmq", [f"{folder}/backend/cython" for folder in folders or ()])
    if spec is None or not isinstance(spec.loader, ExtensionFileLoader):
        reason = "this pyzmq has no extension module" if package else "no module named zmq"
        raise BackendUnavailableError(
            f"the RPC back end ZMQ needs pyzmq: pip install 'rankcall[rpc]' ({reason})"
        )
    return str(spec.origin)
