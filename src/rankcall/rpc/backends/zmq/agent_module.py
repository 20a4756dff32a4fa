"""The C++ agent: where its sources are, its build, and the libzmq that it uses."""

from __future__ import annotations

from functools import cache
from importlib.machinery import ExtensionFileLoader, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rankcall._native import NativeModule
from rankcall.errors import BackendUnavailableError

AGENT = NativeModule(
    "rankcall_rpc",
    Path(__file__).parents[2] / "native",
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
