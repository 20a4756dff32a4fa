"""The ZMQ agent in C++ (see agent.h), built like the recorder."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from rankcall._native import NativeModule
from rankcall.errors import BackendUnavailable

AGENT = NativeModule(
    "rankcall_rpc",
    Path(__file__).parent,
    "module.cpp",
    BackendUnavailable,
    defines=("USE_DISTRIBUTED", "USE_RPC", "TORCH_EXTENSION_NAME=rankcall_rpc"),
)


@cache
def agent_module() -> Any:
    """Return the loaded agent module, building it first if need be. Raises BackendUnavailable."""
    return AGENT.load()
