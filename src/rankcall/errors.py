"""Every error rankcall raises on purpose.

RankcallError
├── CorruptRun          (ValueError)    a ring or run directory that cannot be read as one
├── RunNotFound         (FileNotFoundError)
├── CaptureUnavailable  (RuntimeError)  recording was asked for in a way this machine cannot do
├── PeerError           (RuntimeError)  another rank failed, so that this one cannot go on
├── TorchMissing        (ImportError)   torch is absent, or older than rankcall needs
└── UnevenInputs        (RuntimeError)  ranks have different numbers of batches, or left early
"""

from __future__ import annotations

__all__ = [
    "CaptureUnavailable",
    "CorruptRun",
    "PeerError",
    "RankcallError",
    "RunNotFound",
    "TorchMissing",
    "UnevenInputs",
]


class RankcallError(Exception):
    """Catch this to catch whatever rankcall raises on purpose."""


class CorruptRun(RankcallError, ValueError):
    """Raised when a ring file or a run directory is not one, or is damaged beyond reading."""


class RunNotFound(RankcallError, FileNotFoundError):
    """Raised when there is no run at the given path, or no run at all."""


class CaptureUnavailable(RankcallError, RuntimeError):
    """Raised when the capture that was asked for by name cannot work here."""


class TorchMissing(RankcallError, ImportError):
    """Raised when a part that needs torch finds none, or one older than 2.11."""


class PeerError(RankcallError, RuntimeError):
    """Raised where another rank failed, with what it said before it went.

    ``rank`` and ``host`` say who failed; ``cause`` is its error in one line, ``traceback`` its
    traceback as text, empty where the rank was lost without a word.
    """

    def __init__(
        self, message: str, *, rank: int = -1, host: str = "", cause: str = "", traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.cause = cause
        self.traceback = traceback


class UnevenInputs(RankcallError, RuntimeError):
    """Raised where ranks have different numbers of batches and cannot, or must not, go on so."""
