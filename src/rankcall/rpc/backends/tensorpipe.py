"""TENSORPIPE: torch's TensorPipe agent, brought up and taken down by rankcall.

A dynamic group is torch's own: its agent rewrites a list of names in the store whenever a worker
joins or leaves, so that nothing around it can make it sound. ZMQ has dynamic groups that are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rpc import (
    TensorPipeAgent,
    TensorPipeRpcBackendOptions,
    api,
    backend_registry,
)
from torch.distributed.rpc.constants import DEFAULT_NUM_WORKER_THREADS

from rankcall.c10d.client import perform
from rankcall.c10d.parts import publish_once
from rankcall.rpc.backends import check_arguments
from rankcall.rpc.current_group import set_group, undone_on_error
from rankcall.rpc.deadlines import bounded, init_deadline, seconds_left
from rankcall.rpc.device_maps import WorkerDevices, device_list, reverse_maps, validate
from rankcall.rpc.static_group import StaticGroup, StaticMembership, form_group

__all__ = ["construct_rpc_backend_options_handler", "init_backend_handler"]


def construct_rpc_backend_options_handler(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
    device_maps: Mapping[str, Mapping[Any, Any]] | None = None,
    devices: Sequence[Any] | None = None,
    _transports: Sequence[str] | None = None,
    _channels: Sequence[str] | None = None,
) -> TensorPipeRpcBackendOptions:
    """Return torch's TensorPipe options. An unknown keyword is a ``TypeError``."""
    return TensorPipeRpcBackendOptions(
        rpc_timeout=rpc_timeout,
        init_method=init_method,
        num_worker_threads=num_worker_threads,
        device_maps=None if device_maps is None else {k: dict(v) for k, v in device_maps.items()},
        devices=None if devices is None else list(devices),
        _transports=None if _transports is None else list(_transports),
        _channels=None if _channels is None else list(_channels),
    )


def init_backend_handler(
    store: dist.Store,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: TensorPipeRpcBackendOptions,
) -> TensorPipeAgent:
    """Bring this worker's agent up and return it, in use.

    With a world size: every worker of a static group calls it, and returns when all can call each
    other. Ends within ``rpc_timeout`` seconds, and at least 5 s. Raises ``TypeError``,
    ``DeviceMapError``, ``RpcTimeout``, and ``RuntimeError`` for ranks, sizes or names that
    disagree.
    """
    check_arguments(store, rpc_backend_options, TensorPipeRpcBackendOptions)
    if not world_size:
        start = backend_registry._tensorpipe_init_backend_handler
        agent: TensorPipeAgent = start(store, name, rank, None, rpc_backend_options)  # type: ignore[no-untyped-call]
        return agent
    deadline = init_deadline(rpc_backend_options.rpc_timeout)
    _refuse_a_mix(store, name, deadline)

    def join(membership: StaticMembership) -> TensorPipeAgent:
        return _join_static(membership, name, rpc_backend_options, deadline)

    return form_group(join, store, name, rank, world_size, deadline)


def _join_static(
    membership: StaticMembership, name: str, options: TensorPipeRpcBackendOptions, deadline: float
) -> TensorPipeAgent:
    mine = WorkerDevices(name, torch.cuda.device_count(), options.device_maps, options.devices)
    records = membership.introduce({"node": mine.to_json()}, deadline)
    nodes = [WorkerDevices.from_json(record["node"]) for record in records]
    validate(nodes, static=True)
    reverse = reverse_maps(name, nodes)
    devices = device_list(mine, reverse)
    if torch.cuda.is_available() and devices:
        # Others may send to a device before this process has used one.
        torch.cuda.init()  # type: ignore[no-untyped-call]
    rank, world_size = membership.rank, membership.world_size
    # The constructor of torch's agent waits for all others, and cannot be told to begin again.
    # So first make sure that all are in this epoch: one may have given this attempt up.
    membership.exchange("introduced", None, deadline)
    agent = bounded(
        lambda: TensorPipeAgent(
            membership.store, name, rank, world_size, options, reverse, devices
        ),
        deadline,
        f"init of {name!r}",
    )
    with undone_on_error():
        api._init_rpc_states(agent)  # type: ignore[no-untyped-call]
        problem = _warm_up(deadline)
        membership.exchange("ready", None, deadline)  # names the workers that died meanwhile
        if problem is not None:
            raise problem
    set_group(StaticGroup(agent, membership, membership.store))
    return agent


def _refuse_a_mix(store: dist.Store, name: str, deadline: float) -> None:
    """Raise ``RuntimeError`` if the group has dynamic members.

    torch's agent does the same with this key; but the agent of a static group gets a store with a
    prefix of its attempt, where it does not see the key of a dynamic member.
    """
    key = "rpcIsStaticGroup"
    if perform(store, seconds_left(deadline), publish_once(key, b"true")) != b"true":
        raise RuntimeError(
            "RPC group mixes statically and dynamically initialized members which is not "
            f"supported: worker {name!r} was given a world size, and other workers were not"
        )


def _warm_up(deadline: float) -> RuntimeError | None:
    """Have the agents connect now, so that the user's first call does not pay for it.

    The error is returned and not raised: the exchange after it finds out which workers died, which
    is the better error. A fifth of the time is kept for that exchange.
    """
    try:
        api._all_gather(None, timeout=max(0.1, 0.8 * (deadline - time.monotonic())))
    except RuntimeError as error:
        return error
    return None
