"""``init_rpc`` and ``shutdown``: torch's, except that they always end and say who was missing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as torch_rpc
from torch.distributed.rendezvous import _rendezvous_helper
from torch.distributed.rpc import RpcBackendOptions, api

from _rankcall_hook import attach
from rankcall.durations import Duration, seconds
from rankcall.errors import RpcTimeout, warn_once
from rankcall.rpc.backend_registry import Backend, BackendType, construct_rpc_backend_options
from rankcall.rpc.current_group import current_group, set_group
from rankcall.rpc.deadlines import bounded, init_deadline

# torch's rendezvous is a generator, and the store that it has made ends with it. Other workers may
# still be on their way to that store, so the generators are kept until shutdown.
_rendezvous: list[Iterator[Any]] = []


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Make this process worker ``name``, ready to call the others and to be called.

    As ``torch.distributed.rpc.init_rpc``, except that it ends within the options' ``rpc_timeout``
    (at least 5 s), and may be called again after a failure: workers that do so meet, also if they
    failed at different times.

    Args:
        name: This worker's name, unique in the group.
        backend: A member of rankcall's ``BackendType`` or of torch's, or a name.
        rank: This worker's rank; -1 for the one that the rendezvous gives.
        world_size: The number of workers. None or 0 makes the group dynamic: workers join and leave
            at any time.
        rpc_backend_options: The options, of the back end's own type.

    Raises:
        BackendNotFoundError, TypeError, DeviceMapError: An argument is wrong.
        RpcTimeout: Workers are missing; the error names them.
        RuntimeError: RPC is on already, or ranks, sizes or names disagree.
    """
    try:  # as torch's init_rpc does in a job that is to be recorded
        attach(init_rpc, (name, backend, rank, world_size), {})  # type: ignore[no-untyped-call]
    except Exception as error:
        warn_once(f"not recording: {type(error).__name__}: {error}")
    member = _member(backend, rpc_backend_options)
    options = rpc_backend_options
    if options is None:
        options = construct_rpc_backend_options(member)
    if torch_rpc._is_current_rpc_agent_set():
        raise RuntimeError("RPC is already initialized: call rankcall.rpc.shutdown() first")
    store, rank = _store(name, options, rank, world_size)
    dist_autograd._init(rank)
    torch_rpc._set_profiler_node_id(rank)
    torch_rpc._init_rpc_backend(member, store, name, rank, world_size, options)  # type: ignore[no-untyped-call]


def shutdown(graceful: bool = True, timeout: Duration = 60.0) -> None:
    """Leave the group and take this worker down, within ``timeout``.

    Args:
        graceful: Whether to wait first until the other workers of a static group shut down too and
            no call is in flight. A member of a dynamic group tells the others and leaves.
        timeout: How long that may take, in seconds or as a ``timedelta``.

    Raises:
        RpcTimeout: Workers did not shut down in time; the error names them. This worker is taken
            down all the same.
        RuntimeError: RPC is not on.
    """
    timeout_s = seconds(timeout, "timeout", zero=True)
    if not torch_rpc._is_current_rpc_agent_set():
        raise RuntimeError("RPC has not been initialized: call rankcall.rpc.init_rpc() first")
    group = current_group()
    if graceful and group is None:
        # Another package's back end, or torch's own dynamic group: torch knows how it ends.
        api.shutdown(graceful=True, timeout=timeout_s)
        return
    try:
        if graceful and group is not None:
            group.leave(time.monotonic() + timeout_s)
    finally:
        set_group(None)
        api._finalize_shutdown()  # type: ignore[no-untyped-call]
        _rendezvous.clear()


def _member(backend: Any, options: RpcBackendOptions | None) -> Any:
    """Return the back end: ours, or one of torch's that we do not have."""
    if options is not None and not isinstance(options, RpcBackendOptions):
        raise TypeError(f"rpc_backend_options must be RpcBackendOptions; got {options!r}")
    if backend is None:
        return BackendType.TENSORPIPE if options is None else _of_options(options)
    if isinstance(backend, str):
        return BackendType[backend]
    if not isinstance(backend, torch_rpc.backend_registry.BackendType):
        raise TypeError(f"backend must be a member of BackendType or a name; got {backend!r}")
    return BackendType.__members__.get(backend.name, backend)


def _of_options(options: RpcBackendOptions) -> Backend:
    """Return the back end whose options have this type.

    The type is compared by the name in the handler's annotation: that is a string if its module
    postpones annotations, and to resolve it could fail in another package's module.
    """
    for member in BackendType:
        made = getattr(member.value.construct_rpc_backend_options_handler, "__annotations__", {})
        if type(options).__name__ == _name(made.get("return")):
            return member
    raise TypeError(f"no back end has options of type {type(options).__name__}; pass backend=")


def _name(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")


def _store(
    name: str, options: RpcBackendOptions, rank: int, world_size: int | None
) -> tuple[dist.Store, int]:
    """Return the group's store, with ``rpc_timeout`` as its timeout, and this worker's rank."""
    deadline = init_deadline(options.rpc_timeout)
    timeout = timedelta(seconds=deadline - time.monotonic())
    meeting = _rendezvous_helper(options.init_method, rank, world_size or None, timeout=timeout)
    try:
        store, met_rank, _ = bounded(lambda: next(meeting), deadline, f"init of {name!r}")
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise RpcTimeout(
            f"RPC init of worker {name!r} found no store, or not all workers, at "
            f"{options.init_method} within {options.rpc_timeout:g} s: {error}"
        ) from error
    _rendezvous.append(meeting)
    store.set_timeout(timeout)
    rank = met_rank if rank == -1 else rank
    if not world_size:  # workers come at any time, some for the second time
        return dist.PrefixStore("rpc_dynamic", store), rank
    return dist.PrefixStore("rpc", store), rank
