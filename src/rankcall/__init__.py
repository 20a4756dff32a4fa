"""rankcall: which rank, in which collective, called from which line.

Reading a run (``load``) needs no torch; recording loads it on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "CaptureUnavailable": "rankcall.errors",
    "CorruptRun": "rankcall.errors",
    "ExportFailed": "rankcall.errors",
    "ExtraMissing": "rankcall.errors",
    "RankcallError": "rankcall.errors",
    "Recording": "rankcall.capture.recording",
    "Run": "rankcall.run",
    "RunNotFound": "rankcall.errors",
    "TorchMissing": "rankcall.errors",
    "disable": "rankcall.capture.session",
    "enable": "rankcall.capture.session",
    "load": "rankcall.run",
}
_MODULES = ("hooks", "trace")

__all__ = [
    "CaptureUnavailable",
    "CorruptRun",
    "ExportFailed",
    "ExtraMissing",
    "RankcallError",
    "Recording",
    "Run",
    "RunNotFound",
    "TorchMissing",
    "disable",
    "enable",
    "hooks",
    "load",
    "trace",
]

if TYPE_CHECKING:
    from rankcall import hooks, trace
    from rankcall.capture.recording import Recording
    from rankcall.capture.session import disable, enable
    from rankcall.errors import (
        CaptureUnavailable,
        CorruptRun,
        ExportFailed,
        ExtraMissing,
        RankcallError,
        RunNotFound,
        TorchMissing,
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
