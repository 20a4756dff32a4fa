"""ZMQ: rankcall's agent over ZeroMQ, shared memory within a host, CURVE between hosts.

The agent itself is C++, in ``rpc/native``. This package brings it up and takes it down.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from rankcall.rpc.backends import check_arguments
from rankcall.rpc.backends.zmq.agent_module import agent_module, zmq_library
from rankcall.rpc.backends.zmq.at_exit import end_at_exit
from rankcall.rpc.backends.zmq.dynamic_group import DynamicGroup
from rankcall.rpc.backends.zmq.member_log import MemberLog
from rankcall.rpc.backends.zmq.options import ZmqRpcBackendOptions
from rankcall.rpc.backends.zmq.static_start import join_static
from rankcall.rpc.backends.zmq.worker import ZmqWorker
from rankcall.rpc.current_group import set_group
from rankcall.rpc.deadlines import init_deadline
from rankcall.rpc.static_group import StaticMembership, form_group

__all__ = [
    "ZmqRpcBackendOptions",
    "construct_rpc_backend_options_handler",
    "init_backend_handler",
]


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

    Also raises ``BackendUnavailableError`` if pyzmq, a compiler, file descriptors or a usable
    address is missing, and ``AuthenticationError`` if workers of several hosts have no common
    secret.
    """
    check_arguments(store, rpc_backend_options, ZmqRpcBackendOptions)
    library = zmq_library()
    agent_module()  # built before the deadline counts: the compiler takes longer than an init
    deadline = init_deadline(rpc_backend_options.rpc_timeout)

    def join(membership: StaticMembership) -> Any:
        with _new_worker(name, membership.rank, library, rpc_backend_options) as worker:
            join_static(worker, membership, deadline)
        return worker.agent

    if world_size:
        agent = form_group(join, store, name, rank, world_size, deadline)
    else:
        with _new_worker(name, rank, library, rpc_backend_options) as worker:
            group = DynamicGroup(worker, MemberLog(dist.PrefixStore("dynamic", store)))
            group.join(deadline)
        set_group(group)
        agent = worker.agent
    end_at_exit()
    return agent


@contextmanager
def _new_worker(
    name: str, rank: int, library: str, options: ZmqRpcBackendOptions
) -> Iterator[ZmqWorker]:
    """Return a worker, and remove its directory if it does not come up.

    After that, the agent itself removes the directory, when it is shut down.
    """
    worker = ZmqWorker(name, rank, library, options)
    try:
        yield worker
    except BaseException:
        worker.dir.close()
        raise
