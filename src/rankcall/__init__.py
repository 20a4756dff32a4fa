"""rankcall: which rank, in which collective, called from which line.

Reading a run (``load``) needs no torch; recording loads it on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rankcall._version import __version__ as __version__

_HOME = {
    "AuthenticationFailed": "rankcall.errors",
    "BackendNotFound": "rankcall.errors",
    "BackendUnavailable": "rankcall.errors",
    "BarrierTimeout": "rankcall.errors",
    "CaptureUnavailable": "rankcall.errors",
    "CorruptRun": "rankcall.errors",
    "DuplicateBackend": "rankcall.errors",
    "ExportFailed": "rankcall.errors",
    "ExtraMissing": "rankcall.errors",
    "InvalidDeviceMap": "rankcall.errors",
    "PeerError": "rankcall.errors",
    "RankcallError": "rankcall.errors",
    "Recording": "rankcall.capture.recording",
    "RpcTimeout": "rankcall.errors",
    "Run": "rankcall.run.load",
    "RunNotFound": "rankcall.errors",
    "StoreLost": "rankcall.errors",
    "TorchMissing": "rankcall.errors",
    "UnevenInputs": "rankcall.errors",
    "WorldMismatch": "rankcall.errors",
    "disable": "rankcall.capture.session",
    "enable": "rankcall.job.attach",
    "expect": "rankcall.capture.phases",
    "load": "rankcall.run.load",
}
_MODULES = ("hooks", "join", "rpc", "store", "trace", "watch")

__all__ = [
    "AuthenticationFailed",
    "BackendNotFound",
    "BackendUnavailable",
    "BarrierTimeout",
    "CaptureUnavailable",
    "CorruptRun",
    "DuplicateBackend",
    "ExportFailed",
    "ExtraMissing",
    "InvalidDeviceMap",
    "PeerError",
    "RankcallError",
    "Recording",
    "RpcTimeout",
    "Run",
    "RunNotFound",
    "StoreLost",
    "TorchMissing",
    "UnevenInputs",
    "WorldMismatch",
    "disable",
    "enable",
    "expect",
    "hooks",
    "join",
    "load",
    "rpc",
    "store",
    "trace",
    "watch",
]

if TYPE_CHECKING:
    from rankcall import hooks, rpc, store
    from rankcall.capture.phases import expect
    from rankcall.capture.recording import Recording
    from rankcall.capture.session import disable
    from rankcall.errors import (
        AuthenticationFailed,
        BackendNotFound,
        BackendUnavailable,
        BarrierTimeout,
        CaptureUnavailable,
        CorruptRun,
        DuplicateBackend,
        ExportFailed,
        ExtraMissing,
        InvalidDeviceMap,
        PeerError,
        RankcallError,
        RpcTimeout,
        RunNotFound,
        StoreLost,
        TorchMissing,
        UnevenInputs,
        WorldMismatch,
    )
    from rankcall.job.attach import enable
    from rankcall.run.load import Run, load


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"rankcall.{name}")
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'rankcall' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
