"""Every error rankcall raises on purpose.

```text
RankcallError
├── AuthenticationError     (RuntimeError)  workers need a common secret, but have none or several
├── BackendNotFoundError    (ValueError, KeyError)  no back end has this name; lists the known names
├── BackendUnavailableError (RuntimeError)  this installation or machine cannot run the back end
├── BarrierTimeout          (RuntimeError)  a rank did not arrive in time; also a DistStoreError
│   └── RpcTimeout          (TimeoutError)  an RPC group did not form or end in time
├── CallTimeout             (RuntimeError)  a call did not end by its deadline (``within``)
├── CaptureUnavailableError (RuntimeError)  the capture that the user named cannot work here
├── CorruptRunError         (ValueError)    the file or directory is not a run, or it is damaged
├── DeviceMapError          (ValueError)    a worker's devices or device maps break a rule
├── DuplicateBackendError   (RuntimeError)  a back end with this name is registered already
├── ExportError             (OSError)       a report or an export cannot be written
├── ExtraMissingError       (ImportError)   a sink needs a package that is not installed
├── PeerError               (RuntimeError)  another rank failed, and this one cannot go on alone
├── RunNotFoundError        (FileNotFoundError)  there is no run at this path
├── StoreLostError          (RuntimeError)  the store's host is gone; also a DistNetworkError
├── TorchMissingError       (ImportError)   torch is absent, or older than rankcall needs
├── UnevenInputsError       (RuntimeError)  ranks have different numbers of batches, or left early
└── WorldMismatchError      (ValueError)    ranks differ in the world size, or claim the same rank
```
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from rankcall.whole_numbers import whole_number

__all__ = [
    "AuthenticationError",
    "BackendNotFoundError",
    "BackendUnavailableError",
    "BarrierTimeout",
    "CallTimeout",
    "CaptureUnavailableError",
    "CorruptRunError",
    "DeviceMapError",
    "DuplicateBackendError",
    "ExportError",
    "ExtraMissingError",
    "PeerError",
    "RankcallError",
    "RpcTimeout",
    "RunNotFoundError",
    "StoreLostError",
    "TorchMissingError",
    "UnevenInputsError",
    "WorldMismatchError",
]


class RankcallError(Exception):
    """The base of all errors that rankcall raises on purpose."""


class _Explained(RankcallError):
    """An error that keeps its attributes when it is pickled.

    Launchers pickle an error to hand it from a rank to its parent. An exception is unpickled by
    calling its class with ``args``, which are the message alone, so the rest would be lost.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[_Explained], args: tuple[Any, ...], state: dict[str, Any]) -> _Explained:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class AuthenticationError(RankcallError, RuntimeError):
    """Raised if workers on a network do not share one secret, or if a secret cannot be used."""


class BackendNotFoundError(RankcallError, ValueError, KeyError):
    """Raised if no back end has the given name; the message lists the known names."""

    # KeyError would show the message in quotes.
    __str__ = Exception.__str__


class BackendUnavailableError(RankcallError, RuntimeError):
    """Raised if a known back end lacks a package or a compiler; the message says which."""


class BarrierTimeout(_Explained, RuntimeError):
    """Raised if a rank did not arrive at a barrier or an exchange in time.

    Attributes:
        missing_ranks: All missing ranks, sorted; empty if the barrier was called without ranks.
        arrived: How many ranks arrived.
        world_size: How many ranks were expected.
        hosts: The host of each missing rank whose host is known.
        key_prefix: The prefix of the caller's keys in the store.
        rank: The caller's rank, or None if the barrier was called without ranks.
        timeout_s: The caller's timeout, in seconds.
        what: The caller's name for the barrier or exchange, or None.
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
        timeout_s: float = 0.0,
        what: str | None = None,
    ) -> None:
        super().__init__(message)
        self.missing_ranks = tuple(missing_ranks)
        self.arrived = arrived
        self.world_size = world_size
        self.hosts = dict(hosts or {})
        self.key_prefix = key_prefix
        self.rank = rank
        self.timeout_s = timeout_s
        self.what = what

    @property
    def timeout(self) -> float:
        """``timeout_s``, by its name of version 0.1."""
        warn_renamed("BarrierTimeout.timeout", "timeout_s")
        return self.timeout_s


class CallTimeout(_Explained, RuntimeError):
    """Raised if a collective in a block of ``rankcall.within`` did not end by the deadline.

    Attributes:
        missing_ranks: The ranks that are known not to have come to it, sorted.
        unknown_ranks: Its members that left no records on this node, sorted.
        timeout_s: The deadline, in seconds.
    """

    def __init__(
        self,
        message: str,
        *,
        missing_ranks: Sequence[int] = (),
        unknown_ranks: Sequence[int] = (),
        timeout_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.missing_ranks = tuple(missing_ranks)
        self.unknown_ranks = tuple(unknown_ranks)
        self.timeout_s = timeout_s


class CaptureUnavailableError(RankcallError, RuntimeError):
    """Raised if the capture that the user named cannot work on this machine."""


class CorruptRunError(RankcallError, ValueError):
    """Raised if a path is not a ring file or a run directory, or is too damaged to be read."""


class DuplicateBackendError(RankcallError, RuntimeError):
    """Raised if a back end is registered under a name that is taken."""


class ExportError(RankcallError, OSError):
    """Raised if a report or an export cannot be written.

    For example, the disk is full or the directory does not exist.
    """


class ExtraMissingError(RankcallError, ImportError):
    """Raised if an optional package is not installed; the message names the extra to install."""


class DeviceMapError(RankcallError, ValueError):
    """Raised if a worker's devices, or its maps to the devices of other workers, break a rule."""


class PeerError(RankcallError, RuntimeError):
    """Raised if another rank failed.

    Attributes:
        rank: The rank that failed.
        host: Its host.
        cause: Its error in one line.
        traceback: Its traceback as text; empty if the rank died without reporting an error.
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
    """Raised if an RPC group did not form, or did not end, in time.

    A ``BarrierTimeout``, with its attributes; the message names the missing workers.
    """

    # TimeoutError's __new__ is the one that fits. Without this, pickle would call the first base's.
    def __new__(cls, *args: Any, **_: Any) -> RpcTimeout:
        return TimeoutError.__new__(cls, *args)


class RunNotFoundError(RankcallError, FileNotFoundError):
    """Raised if there is no run at the given path, or no run at all."""


class StoreLostError(_Explained, RuntimeError):
    """Raised if the store's host has died, or does not answer because it is stopped.

    ``host`` is the host of the store. ``is_silent`` says that it gave no answer in time, but did
    not close the connection: it may be stopped, or the line to it may be busy.
    """

    def __init__(self, message: str, *, host: str = "", is_silent: bool = False) -> None:
        super().__init__(message)
        self.host, self.is_silent = host, is_silent


class TorchMissingError(RankcallError, ImportError):
    """Raised if torch is needed but not installed, or older than 2.11."""


class UnevenInputsError(RankcallError, RuntimeError):
    """Raised if ranks have different numbers of batches and cannot, or must not, go on."""


class WorldMismatchError(_Explained, ValueError):
    """Raised if ranks expect different world sizes, or two processes claim the same rank.

    ``claims`` holds the (rank, world size, host, pid) of each process.
    """

    def __init__(self, message: str, *, claims: Sequence[tuple[int, int, str, int]] = ()) -> None:
        super().__init__(message)
        self.claims = tuple(claims)


# The names of rankcall 0.1, by those that they have now. They go in 0.4.
_RENAMED = {
    "AuthenticationFailed": "AuthenticationError",
    "BackendNotFound": "BackendNotFoundError",
    "BackendUnavailable": "BackendUnavailableError",
    "CaptureUnavailable": "CaptureUnavailableError",
    "CorruptRun": "CorruptRunError",
    "DuplicateBackend": "DuplicateBackendError",
    "ExportFailed": "ExportError",
    "ExtraMissing": "ExtraMissingError",
    "InvalidDeviceMap": "DeviceMapError",
    "RunNotFound": "RunNotFoundError",
    "StoreLost": "StoreLostError",
    "TorchMissing": "TorchMissingError",
    "UnevenInputs": "UnevenInputsError",
    "WorldMismatch": "WorldMismatchError",
}


def __getattr__(name: str) -> Any:
    """Return an error by its name of version 0.1, with a ``DeprecationWarning``."""
    if name not in _RENAMED:
        raise AttributeError(f"module 'rankcall.errors' has no attribute {name!r}")
    warn_renamed(f"rankcall.errors.{name}", f"rankcall.errors.{_RENAMED[name]}", stacklevel=3)
    return globals()[_RENAMED[name]]


def warn_renamed(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn that a public name is deprecated, at the line that uses it.

    Args:
        old: The name that goes in the next version.
        new: What to use instead.
        stacklevel: As that of ``warnings.warn``; 3 is the caller of the caller.
    """
    message = f"{old} is deprecated and goes in rankcall 0.4: use {new}"
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)


# As torchrun, Slurm, Open MPI and Intel's MPI or MPICH set them. The first that is there counts:
# a torchrun that Slurm started once for each node sets its own for the ranks below it.
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",
    "SLURM_NTASKS_PER_NODE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
)
_warnings: set[str] = set()


def local_rank() -> int:
    """Return which rank of its node the launcher says this process is; -1 if it does not say."""
    numbers = (whole_number(os.environ.get(name)) for name in _LOCAL_RANKS)
    return next((number for number in numbers if number is not None), -1)


def local_world_size() -> int | None:
    """Return how many ranks the launcher says this node has; None if it does not say."""
    numbers = (whole_number(os.environ.get(name), least=1) for name in _LOCAL_SIZES)
    return next((number for number in numbers if number is not None), None)


def warn_once(message: str) -> None:
    """Print a line on the job's stderr, once for each process and on one rank of a node only.

    For what goes wrong in a job that goes on all the same, so that nothing can be raised.
    """
    if message in _warnings:
        return
    _warnings.add(message)
    if local_rank() <= 0:
        print(f"rankcall: {message}", file=sys.stderr, flush=True)
