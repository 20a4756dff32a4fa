"""rankcall: which rank, in which collective, called from which line.

Reading a run (``load``) needs no torch; recording loads it on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rankcall._version import __version__ as __version__

_HOME = {
    "RankcallError": "rankcall.errors",
    "Recording": "rankcall.capture.recording",
    "Run": "rankcall.run.load",
    "checkpointed": "rankcall.capture.checkpoints",
    "disable": "rankcall.capture.session",
    "enable": "rankcall.job.attach",
    "expect": "rankcall.capture.phases",
    "load": "rankcall.run.load",
    "previous_attempt": "rankcall.recovery.previous",
    "phase": "rankcall.capture.named_phases",
    "within": "rankcall.job.call_deadline",
}
_MODULES = ("errors", "hooks", "join", "rpc", "store", "trace", "watch")

__all__ = [
    "RankcallError",
    "Recording",
    "Run",
    "checkpointed",
    "disable",
    "enable",
    "errors",
    "expect",
    "hooks",
    "join",
    "load",
    "phase",
    "previous_attempt",
    "rpc",
    "store",
    "trace",
    "watch",
    "within",
]

if TYPE_CHECKING:
    from rankcall import errors, hooks, rpc, store
    from rankcall.capture.checkpoints import checkpointed
    from rankcall.capture.named_phases import phase
    from rankcall.capture.phases import expect
    from rankcall.capture.recording import Recording
    from rankcall.capture.session import disable
    from rankcall.errors import RankcallError
    from rankcall.job.attach import enable
    from rankcall.job.call_deadline import within
    from rankcall.recovery.previous import previous_attempt
    from rankcall.run.load import Run, load


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"rankcall.{name}")
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    return _error_of_version_0_1(name)


def _error_of_version_0_1(name: str) -> Any:
    """Return an error that the top level had in version 0.1, with a ``DeprecationWarning``."""
    from rankcall import errors

    now = errors._RENAMED.get(name, name)
    if now not in errors.__all__:
        raise AttributeError(f"module 'rankcall' has no attribute {name!r}")
    errors.warn_renamed(f"rankcall.{name}", f"rankcall.errors.{now}", stacklevel=4)
    return getattr(errors, now)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
