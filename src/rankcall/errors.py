"""Every error rankcall raises on purpose.

RankcallError
├── CorruptRun          (ValueError)    a ring or run directory that cannot be read as one
├── RunNotFound         (FileNotFoundError)
├── CaptureUnavailable  (RuntimeError)  recording was asked for in a way this machine cannot do
├── ExtraMissing        (ImportError)   a sink needs a package that is not installed
├── ExportFailed        (OSError)       a report or an export that cannot be written
├── TorchMissing        (ImportError)   torch is absent, or older than rankcall needs
├── BackendNotFound     (ValueError, KeyError)  no back end has that name; lists those there are
├── DuplicateBackend    (RuntimeError)  a back end of that name is registered already
├── BackendUnavailable  (RuntimeError)  a back end that this installation or machine cannot run
├── InvalidDeviceMap    (ValueError)    a worker's devices or device maps break a rule
├── AuthenticationFailed (RuntimeError) workers that need a common secret have none, or several
└── RpcTimeout          (RuntimeError, TimeoutError)  a group did not form or end in time
"""

from __future__ import annotations

__all__ = [
    "AuthenticationFailed",
    "BackendNotFound",
    "BackendUnavailable",
    "CaptureUnavailable",
    "CorruptRun",
    "DuplicateBackend",
    "ExportFailed",
    "ExtraMissing",
    "InvalidDeviceMap",
    "RankcallError",
    "RpcTimeout",
    "RunNotFound",
    "TorchMissing",
]


class RankcallError(Exception):
    """Catch this to catch whatever rankcall raises on purpose."""


class CorruptRun(RankcallError, ValueError):
    """Raised when a ring file or a run directory is not one, or is damaged beyond reading."""


class RunNotFound(RankcallError, FileNotFoundError):
    """Raised when there is no run at the given path, or no run at all."""


class CaptureUnavailable(RankcallError, RuntimeError):
    """Raised when the capture that was asked for by name cannot work here."""


class ExtraMissing(RankcallError, ImportError):
    """Raised when a part needs an optional package; names the extra to install."""


class ExportFailed(RankcallError, OSError):
    """Raised when a report or an export cannot be written: the disk is full, the place is not."""


class TorchMissing(RankcallError, ImportError):
    """Raised when a part that needs torch finds none, or one older than 2.11."""


class BackendNotFound(RankcallError, ValueError, KeyError):
    """Raised when no back end has the given name; the message lists those there are."""

    # KeyError would show the message in quotes.
    __str__ = Exception.__str__


class DuplicateBackend(RankcallError, RuntimeError):
    """Raised when a back end is registered under a name that is taken."""


class BackendUnavailable(RankcallError, RuntimeError):
    """Raised when a known back end lacks a package or a compiler; the message says which."""


class InvalidDeviceMap(RankcallError, ValueError):
    """Raised when a worker's devices, or its maps to other workers' devices, break a rule."""


class AuthenticationFailed(RankcallError, RuntimeError):
    """Raised when workers that reach each other over a network do not share one secret."""


class RpcTimeout(RankcallError, RuntimeError, TimeoutError):
    """Raised when workers did not come together in time.

    ``missing``: the ranks that did not arrive, in ascending order; empty where it is not known.
    """

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing
