"""Fake recordings, each of which breaks one rule: the comparison must report every one of them.

They wrap functions of torch.distributed, which a recording must never do.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

MUTANTS: dict[str, Callable[[], Mutant]] = {}
_KEPT: list[Any] = []  # for ever, like the state of a recording


class Mutant:
    """A fake recording that does ``harm`` at each all_reduce."""

    def __init__(self, harm: Callable[[torch.Tensor, Any], Any]) -> None:
        self._harm = harm

    def start(self) -> None:
        """Put a function of ours in place of ``dist.all_reduce`` and ``dist.broadcast``."""
        real = dist.all_reduce

        def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            work = real(tensor, *args, **kwargs)
            return self._harm(tensor, work) or work

        dist.all_reduce = all_reduce

    def toggle(self, times: int) -> None:
        """Do nothing: it is on from the start to the end."""

    def recorded(self) -> int | None:
        """Return None: it counts nothing."""
        return None

    def ring_kib(self) -> int:
        """Return 0: it has no rings."""
        return 0


def _mutant(harm: Callable[[torch.Tensor, Any], Any]) -> Callable[[torch.Tensor, Any], Any]:
    MUTANTS[harm.__name__] = lambda: Mutant(harm)
    return harm


@_mutant
def nothing(tensor: torch.Tensor, work: Any) -> None:
    """Do no harm: no difference may be reported."""


@_mutant
def keeps_group(tensor: torch.Tensor, work: Any) -> None:
    """Keep the default group."""
    _KEPT.append(dist.group.WORLD)


@_mutant
def keeps_store(tensor: torch.Tensor, work: Any) -> None:
    """Keep the default store."""
    _KEPT.append(c10d._get_default_store())


@_mutant
def keeps_tensor(tensor: torch.Tensor, work: Any) -> None:
    """Keep the tensor."""
    _KEPT.append(tensor)


@_mutant
def keeps_memory_of_tensor(tensor: torch.Tensor, work: Any) -> None:
    """Keep the tensor's memory by a view, while the tensor itself goes."""
    _KEPT.append(tensor[:1].detach())


@_mutant
def keeps_work(tensor: torch.Tensor, work: Any) -> None:
    """Keep the Work."""
    _KEPT.append(work)


@_mutant
def changes_bit(tensor: torch.Tensor, work: Any) -> None:
    """Flip the lowest bit of one element of the result."""
    if work is None:
        tensor.view(torch.int32)[0] ^= 1


@_mutant
def changes_work(tensor: torch.Tensor, work: Any) -> Any:
    """Return a Work of its own."""
    return _Proxy(work) if work is not None else None


class _Proxy(dist.Work):
    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the Work it stands in for."""
        return self._work.wait()


@_mutant
def changes_error(tensor: torch.Tensor, work: Any) -> None:
    """Raise another error than torch's for a wrong argument."""
    real = dist.broadcast

    def broadcast(*args: Any, **kwargs: Any) -> Any:
        try:
            return real(*args, **kwargs)
        except Exception as error:
            raise type(error)(f"while recording: {error}") from error

    dist.broadcast = broadcast


@_mutant
def prints(tensor: torch.Tensor, work: Any) -> None:
    """Write a line to standard output."""
    print("recording")


@_mutant
def warns(tensor: torch.Tensor, work: Any) -> None:
    """Write a line to standard error that does not begin as rankcall's do."""
    print("warning: rankcall: recording", file=sys.stderr)


@_mutant
def leaves_thread(tensor: torch.Tensor, work: Any) -> None:
    """Leave a thread."""
    threading.Thread(target=threading.Event().wait, name="left", daemon=True).start()


@_mutant
def leaves_descriptor(tensor: torch.Tensor, work: Any) -> None:
    """Leave a file open."""
    os.open(os.devnull, os.O_RDONLY)


@_mutant
def leaves_socket(tensor: torch.Tensor, work: Any) -> None:
    """Leave a socket that listens."""
    listening = socket.socket()
    listening.listen()
    _KEPT.append(listening)


@_mutant
def leaves_process(tensor: torch.Tensor, work: Any) -> None:
    """Leave a process that sleeps, one a rank."""
    if not _KEPT:
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
            os._exit(0)
        _KEPT.append(pid)


@_mutant
def takes_memory(tensor: torch.Tensor, work: Any) -> None:
    """Take 32 MiB for a moment."""
    bytearray(os.urandom(1) * (32 << 20))


@_mutant
def changes_status(tensor: torch.Tensor, work: Any) -> None:
    """End the process with a status of its own."""
    atexit.register(os._exit, 9)


@_mutant
def hangs(tensor: torch.Tensor, work: Any) -> None:
    """Wait for what never happens."""
    threading.Event().wait()
