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
    "PeerError": "rankcall.errors",
    "RankcallError": "rankcall.errors",
    "Recording": "rankcall.capture.recording",
    "Run": "rankcall.run",
    "RunNotFound": "rankcall.errors",
    "TorchMissing": "rankcall.errors",
    "UnevenInputs": "rankcall.errors",
    "disable": "rankcall.capture.session",
    "enable": "rankcall.capture.session",
    "load": "rankcall.run",
}
_MODULES = ("hooks", "join")

__all__ = [
    "CaptureUnavailable",
    "CorruptRun",
    "PeerError",
    "RankcallError",
    "Recording",
    "Run",
    "RunNotFound",
    "TorchMissing",
    "UnevenInputs",
    "disable",
    "enable",
    "hooks",
    "join",
    "load",
]

if TYPE_CHECKING:
    from rankcall import hooks, join
    from rankcall.capture.recording import Recording
    from rankcall.capture.session import disable, enable
    from rankcall.errors import (
        CaptureUnavailable,
        CorruptRun,
        PeerError,
        RankcallError,
        RunNotFound,
        TorchMissing,
        UnevenInputs,
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
