"""The Python kernels in front of the c10d ops: registered once, and kept."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from rankcall.capture.fallback.completion import (
    release_dropped,
    work_proxies,
)
from rankcall.capture.fallback.schema import (
    Op,
)
from rankcall.capture.interface import must_install

# Records an op and issues it. Its arguments are the dispatch keys and the op's arguments.
Recorder = Callable[..., Any]

KEYS_AFTER = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


class _Active:
    recorders: Mapping[str, Recorder] | None = None  # by the ops' names; None: nothing is recorded


def record_with(recorders: Mapping[str, Recorder], ops: Iterable[Op]) -> None:
    """Have the kernels of ``ops`` call their recorder from now on; register them if need be."""
    if must_install("python"):
        _register(ops)
    _Active.recorders = recorders


def pass_on(recorders: Mapping[str, Recorder] | None = None) -> None:
    """Have the kernels pass ops on, if these recorders (None: any) are behind them."""
    if recorders is None or _Active.recorders is recorders:
        _Active.recorders = None


def _register(ops: Iterable[Op]) -> None:
    # Not torch.library.Library, which takes its kernels out at exit, while daemon threads may still
    # issue ops. The extra reference keeps the end of the interpreter from doing the same.
    library: Any = torch._C._dispatch_library("IMPL", "c10d", "", __file__, 0)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(library))
    with warnings.catch_warnings():
        # torch warns if the native recorder's kernels are there already.
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for op in ops:
            library.impl(op.name, "BackendSelect", _kernel(op), True)


def _kernel(op: Op) -> Recorder:
    name, redispatch = op.name, op.overload.redispatch

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        recorders = _Active.recorders
        if recorders is not None:
            return recorders[name](keys, *args, **kwargs)
        if work_proxies:
            release_dropped()
        return redispatch(keys & KEYS_AFTER, *args, **kwargs)

    return kernel
