"""The options of the ZMQ back end."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.rpc import RpcBackendOptions
from torch.distributed.rpc.constants import DEFAULT_INIT_METHOD, DEFAULT_RPC_TIMEOUT_SEC

from rankcall.durations import Duration, seconds
from rankcall.rpc.backends.zmq.addresses import endpoints
from rankcall.rpc.device_maps import as_device, as_device_map

_GIB = 1 << 30
# Heartbeats are sent four times in this time, and the agent's threads look five times a second, so
# a shorter time than 0.1 s would call workers dead that are only late. The longest, a day, fits
# into libzmq's int of milliseconds.
_HEARTBEATS_S = (0.1, 86_400.0)


class ZmqRpcBackendOptions(RpcBackendOptions):
    """The options of the ZMQ back end.

    Args:
        rpc_timeout: How long until a call without an answer fails, in seconds or as a
            ``timedelta``; 0 for never.
        init_method: Where the group's store is, as for torch.
        num_worker_threads: How many requests run at once.
        device_maps: For each worker, which of its devices a device here is sent to.
        devices: The devices of this worker.
        host: The address under which other hosts reach this worker (default:
            ``RANKCALL_RPC_HOST``, or this host's address on the way to the store).
        bind: The address to listen at, if it is not ``host``; ``"0.0.0.0"`` for all.
        port: The port to listen at, or a range of them as ``"29600-29700"``; 0 for any.
        secret_file: The file with the common secret. Without one, nothing listens on the network.
        heartbeat_timeout: The silence after which a worker is given up, in seconds or as a
            ``timedelta``. The attribute of this name is in seconds.
        max_message_bytes: The largest message head or tensor that this worker accepts.
        arena_bytes: The most shared memory to send in; 0 for none.
    """

    def __init__(
        self,
        *,
        rpc_timeout: Duration = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        num_worker_threads: int = 16,
        device_maps: Mapping[str, Mapping[Any, Any]] | None = None,
        devices: Sequence[Any] | None = None,
        host: str | None = None,
        bind: str | None = None,
        port: int | str = 0,
        secret_file: str | os.PathLike[str] | None = None,
        heartbeat_timeout: Duration = 10.0,
        max_message_bytes: int = 8 * _GIB,
        arena_bytes: int = 2 * _GIB,
    ) -> None:
        super().__init__(seconds(rpc_timeout, "rpc_timeout", zero=True), init_method)
        heartbeat_timeout_s = seconds(heartbeat_timeout, "heartbeat_timeout", zero=True)
        for name, value, least in (
            ("num_worker_threads", num_worker_threads, 1),
            ("max_message_bytes", max_message_bytes, 1 << 16),
            ("arena_bytes", arena_bytes, 0),
        ):
            if not isinstance(value, int):
                raise TypeError(f"{name} must be an int; got {value!r}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}; got {value}")
        if not _HEARTBEATS_S[0] <= heartbeat_timeout_s <= _HEARTBEATS_S[1]:
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
        self.heartbeat_timeout = heartbeat_timeout_s
        self.max_message_bytes = max_message_bytes
        self.arena_bytes = arena_bytes

    def set_device_map(self, to: str, device_map: Mapping[Any, Any]) -> None:
        """Add to the map of devices here to devices at worker ``to``."""
        self.device_maps[to] = as_device_map({**self.device_maps.get(to, {}), **device_map})
