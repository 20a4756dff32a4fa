"""A Work whose end is the return of its ``wait()``: the twin of native/waited.h's."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from rankcall.record import NO_RANK

# Called once at the end, with what the op failed with, and whom an any-source receive got it from.
Over = Callable[[BaseException | None, int], None]


class WaitedWork(dist.Work):
    """Stands in for a Work that has no future: the return of ``wait()`` is the end of the op.

    Once that has come it lets go of the op's own Work, which holds tensors, and answers for it.
    """

    def __init__(self, inner: dist.Work, over: Over, any_source: bool) -> None:
        super().__init__()
        self._inner: dist.Work | None = inner
        self._over = over
        self._any_source = any_source
        self._error: BaseException | None = None
        self._source = NO_RANK
        self._results: list[weakref.ref[torch.Tensor]] = []

    def wait(self, *timeout: Any) -> bool:
        """Wait for the op, and record its end."""
        inner = self._inner
        if inner is None:
            if self._error is not None:
                raise self._error
            return True
        try:
            result = inner.wait(*timeout)
        except BaseException as error:
            self._end(inner, error)
            raise
        self._end(inner, None)
        return result

    def is_completed(self) -> bool:
        """Tell whether the op has completed."""
        inner = self._inner
        if inner is None:
            return True
        completed = inner.is_completed()
        if completed:
            self._end(inner, None)
        return completed

    def _end(self, inner: dist.Work, error: BaseException | None) -> None:
        if self._inner is None:
            return
        self._inner = None
        self._error = error
        with contextlib.suppress(Exception):
            self._results = [weakref.ref(tensor) for tensor in inner.result()]
        if error is None and self._any_source:
            with contextlib.suppress(RuntimeError):
                self._source = inner._source_rank()
        self._over(error, self._source)

    def is_success(self) -> bool:
        """Tell whether the op has succeeded."""
        return self._error is None if self._inner is None else self._inner.is_success()

    def exception(self) -> Any:
        """Return what the op failed with."""
        return self._error if self._inner is None else self._inner.exception()

    def source_rank(self) -> int:
        """Return whom an any-source receive got its message from."""
        return self._source if self._inner is None else self._inner.source_rank()

    def _source_rank(self) -> int:
        return self._source if self._inner is None else self._inner._source_rank()

    def result(self) -> list[torch.Tensor]:
        """Return the op's output tensors, as far as somebody else still has them."""
        if self._inner is not None:
            return self._inner.result()
        return [tensor for each in self._results if (tensor := each()) is not None]

    def synchronize(self) -> None:
        """Order the caller's stream behind the op."""
        if self._inner is not None:
            self._inner.synchronize()

    def block_current_stream(self) -> None:
        """Order the caller's stream behind the op."""
        if self._inner is not None:
            self._inner.block_current_stream()
