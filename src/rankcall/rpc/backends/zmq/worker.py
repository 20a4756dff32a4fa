"""A worker of the ZMQ back end: its agent, its directory, its addresses; how it meets others."""

from __future__ import annotations

import dataclasses
import resource
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rankcall.errors import AuthenticationError, BackendUnavailableError
from rankcall.process import Process
from rankcall.rpc.backends.zmq.addresses import endpoints, is_loopback, own_address
from rankcall.rpc.backends.zmq.agent_module import agent_module
from rankcall.rpc.backends.zmq.curve_keys import derive_keys
from rankcall.rpc.backends.zmq.options import ZmqRpcBackendOptions
from rankcall.rpc.backends.zmq.worker_dir import WorkerDir
from rankcall.rpc.device_maps import WorkerDevices
from rankcall.secret import find_secret

_DESCRIPTORS_A_PEER = 2  # a connection in each direction
_SPARE_DESCRIPTORS = 16  # for the program's own files, and to say that there are too few


class ZmqWorker:
    """This process's agent with its directory and its addresses."""

    def __init__(self, name: str, rank: int, library: str, options: ZmqRpcBackendOptions) -> None:
        self.name, self.rank, self.options = name, rank, options
        # One for each life of a worker: messages to a former life are told apart by it. Random, so
        # that workers need not agree on it.
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
            self.agent.on_close(self.dir.close)  # after the agent's last use of the files in it
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
        secret = find_secret("RANKCALL_RPC_SECRET", options.secret_file)
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
        node = WorkerDevices(
            self.name, torch.cuda.device_count(), options.device_maps, options.devices
        )
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
