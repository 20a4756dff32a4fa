"""Every error rankcall raises on purpose.

RankcallError
├── AuthenticationFailed (RuntimeError)  workers that need a common secret have none, or several
├── BackendNotFound      (ValueError, KeyError)  no back end has that name; lists those there are
├── BackendUnavailable   (RuntimeError)  a back end that this installation or machine cannot run
├── BarrierTimeout       (RuntimeError)  not all ranks came in time; also a DistStoreError
│   └── RpcTimeout       (TimeoutError)  an RPC group did not form or end in time
├── CaptureUnavailable   (RuntimeError)  recording was asked for in a way this machine cannot do
├── CorruptRun           (ValueError)    a ring or run directory that cannot be read as one
├── DuplicateBackend     (RuntimeError)  a back end of that name is registered already
├── ExportFailed         (OSError)       a report or an export that cannot be written
├── ExtraMissing         (ImportError)   a sink needs a package that is not installed
├── InvalidDeviceMap     (ValueError)    a worker's devices or device maps break a rule
├── PeerError            (RuntimeError)  another rank failed, so that this one cannot go on
├── RunNotFound          (FileNotFoundError)
├── StoreLost            (RuntimeError)  the store's host is gone; also a DistNetworkError
├── TorchMissing         (ImportError)   torch is absent, or older than rankcall needs
├── UnevenInputs         (RuntimeError)  ranks have different numbers of batches, or left early
└── WorldMismatch        (ValueError)    ranks disagree on the world size, or on who is which
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
    "RpcTimeout",
    "RunNotFound",
    "StoreLost",
    "TorchMissing",
    "UnevenInputs",
    "WorldMismatch",
]


class RankcallError(Exception):
    """Catch this to catch whatever rankcall raises on purpose."""


class _Explained(RankcallError):
    """An error with attributes, which it keeps when it is pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[_Explained], args: tuple[Any, ...], state: dict[str, Any]) -> _Explained:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class AuthenticationFailed(RankcallError, RuntimeError):
    """Raised when workers that reach each other over a network do not share one secret."""


class BackendNotFound(RankcallError, ValueError, KeyError):
    """Raised when no back end has the given name; the message lists those there are."""

    # KeyError would show the message in quotes.
    __str__ = Exception.__str__


class BackendUnavailable(RankcallError, RuntimeError):
    """Raised when a known back end lacks a package or a compiler; the message says which."""


class BarrierTimeout(_Explained, RuntimeError):
    """Raised when not every rank came to a barrier or an exchange in time.

    ``missing_ranks``: sorted and complete; empty where the barrier was called without ranks.
    ``arrived``: how many came, of ``world_size``. ``hosts``: the host of each missing rank that is
    known. ``key_prefix``, ``rank`` (None without), ``timeout`` in seconds and ``what`` are the
    caller's own.
    """

    def __init__(
        self,
        message: str,
        *,
        missing_ranks: Sequence[int] = (),
        arrived: int = 0,
        world_size: int = 0,
        hosts: Mapping[int, str] | None = None,
        key_prefix: str = "",
        rank: int | None = None,
        timeout: float = 0.0,
        what: str | None = None,
    ) -> None:
        super().__init__(message)
        self.missing_ranks = tuple(missing_ranks)
        self.arrived = arrived
        self.world_size = world_size
        self.hosts = dict(hosts or {})
        self.key_prefix = key_prefix
        self.rank = rank
        self.timeout = timeout
        self.what = what


class CaptureUnavailable(RankcallError, RuntimeError):
    """Raised when the capture that was asked for by name cannot work here."""


class CorruptRun(RankcallError, ValueError):
    """Raised when a ring file or a run directory is not one, or is damaged beyond reading."""


class DuplicateBackend(RankcallError, RuntimeError):
    """Raised when a back end is registered under a name that is taken."""


class ExportFailed(RankcallError, OSError):
    """Raised when a report or an export cannot be written: the disk is full, the place is not."""


class ExtraMissing(RankcallError, ImportError):
    """Raised when a part needs an optional package; names the extra to install."""


class InvalidDeviceMap(RankcallError, ValueError):
    """Raised when a worker's devices, or its maps to other workers' devices, break a rule."""


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


class RpcTimeout(BarrierTimeout, TimeoutError):
    """Raised when the workers of an RPC group did not come together, or part, in time.

    A ``BarrierTimeout``, with its attributes; the message names the missing workers.
    """

    # Of its bases' the one that fits; without it pickle would take the first.
    def __new__(cls, *args: Any, **_: Any) -> RpcTimeout:
        return TimeoutError.__new__(cls, *args)


class RunNotFound(RankcallError, FileNotFoundError):
    """Raised when there is no run at the given path, or no run at all."""


class StoreLost(_Explained, RuntimeError):
    """Raised when the store's host has died, or does not answer (it may be stopped).

    ``host`` is where the store was.
    """

    def __init__(self, message: str, *, host: str = "") -> None:
        super().__init__(message)
        self.host = host


class TorchMissing(RankcallError, ImportError):
    """Raised when a part that needs torch finds none, or one older than 2.11."""


class UnevenInputs(RankcallError, RuntimeError):
    """Raised where ranks have different numbers of batches and cannot, or must not, go on so."""


class WorldMismatch(_Explained, ValueError):
    """Raised when ranks disagree: on the world size, or because two processes are one rank.

    ``claims`` is who said what: (rank, world size, host, pid) of each.
    """

    def __init__(self, message: str, *, claims: Sequence[tuple[int, int, str, int]] = ()) -> None:
        super().__init__(message)
        self.claims = tuple(claims)
