"""torch.distributed.rpc with a sound registry of back ends, starts and ends that always end.

torch's functions and classes are re-exported as they are; ``init_rpc``, ``shutdown`` and
``backend_registry`` are ours. Importing this module imports torch.
"""

from __future__ import annotations

from torch.distributed.rpc import (
    RRef,
    TensorPipeRpcBackendOptions,
    WorkerInfo,
    functions,
    get_worker_info,
    is_available,
    remote,
    rpc_async,
    rpc_sync,
)

from rankcall.capture.session import check_torch
from rankcall.rpc import backend_registry
from rankcall.rpc.backend_registry import (
    BackendType,
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
    unregister_backend,
)
from rankcall.rpc.lifecycle import init_rpc, shutdown

check_torch()


__all__ = [
    "BackendType",
    "BackendValue",
    "RRef",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "backend_registered",
    "backend_registry",
    "construct_rpc_backend_options",
    "functions",
    "get_worker_info",
    "init_backend",
    "init_rpc",
    "is_available",
    "register_backend",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "unregister_backend",
]
