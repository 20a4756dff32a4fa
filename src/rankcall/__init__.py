"""rankcall: which rank, in which collective, called from which line.

Reading a run (``load``) needs no torch; recording loads it on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "BarrierTimeout": "rankcall.errors",
    "CaptureUnavailable": "rankcall.errors",
    "CorruptRun": "rankcall.errors",
    "ExportFailed": "rankcall.errors",
    "ExtraMissing": "rankcall.errors",
    "PeerError": "rankcall.errors",
    "RankcallError": "rankcall.errors",
    "Recording": "rankcall.capture.recording",
    "Run": "rankcall.run",
    "RunNotFound": "rankcall.errors",
    "StoreLost": "rankcall.errors",
    "TorchMissing": "rankcall.errors",
    "UnevenInputs": "rankcall.errors",
    "WorldMismatch": "rankcall.errors",
    "disable": "rankcall.capture.session",
    "enable": "rankcall.capture.session",
    "load": "rankcall.run",
}
_MODULES = ("hooks", "join", "store", "trace")

__all__ = [
    "BarrierTimeout",
    "CaptureUnavailable",
    "CorruptRun",
    "ExportFailed",
    "ExtraMissing",
    "PeerError",
    "RankcallError",
    "Recording",
    "Run",
    "RunNotFound",
    "StoreLost",
    "TorchMissing",
    "UnevenInputs",
    "WorldMismatch",
    "disable",
    "enable",
    "hooks",
    "join",
    "load",
    "store",
    "trace",
]

if TYPE_CHECKING:
    from rankcall import hooks, join, store, trace
    from rankcall.capture.recording import Recording
    from rankcall.capture.session import disable, enable
    from rankcall.errors import (
        BarrierTimeout,
        CaptureUnavailable,
        CorruptRun,
        ExportFailed,
        ExtraMissing,
        PeerError,
        RankcallError,
        RunNotFound,
        StoreLost,
        TorchMissing,
        UnevenInputs,
        WorldMismatch,
    )
    from rankcall.run import Run, load


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
