"""Every error rankcall raises on purpose.

RankcallError
├── CorruptRun          (ValueError)    a ring or run directory that cannot be read as one
├── RunNotFound         (FileNotFoundError)
├── CaptureUnavailable  (RuntimeError)  recording was asked for in a way this machine cannot do
├── ExtraMissing        (ImportError)   a sink needs a package that is not installed
├── ExportFailed        (OSError)       a report or an export that cannot be written
└── TorchMissing        (ImportError)   torch is absent, or older than rankcall needs
"""

from __future__ import annotations

__all__ = [
    "CaptureUnavailable",
    "CorruptRun",
    "ExportFailed",
    "ExtraMissing",
    "RankcallError",
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
