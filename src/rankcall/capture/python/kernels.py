"""The Python kernels in front of every c10d op: registered once, they stay and may pass ops on.

torch's dispatcher raises "fallthrough_kernel was executed" in the threads that issue an op while a
kernel is taken out. So a capture that stops only leaves the kernels without a recorder.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from rankcall.capture.installed import must_install
from rankcall.capture.python import waited
from rankcall.capture.python.ops import Op

# Records an op and issues it. Its arguments are the dispatcher's keys and those of the op.
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
        if waited.stand_ins:
            waited.release_dropped()
        return redispatch(keys & KEYS_AFTER, *args, **kwargs)

    return kernel
