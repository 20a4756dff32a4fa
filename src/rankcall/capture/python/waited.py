"""Works that stand in for those without a future: the twin of native/waited.h.

The return of such a Work's ``wait()`` is the end of its op. A stand-in made in Python has two
halves. If the Python half is freed first, ``wait()`` of the C++ half blocks for ever, because it is
the base class's. So a Python half is kept until there is no reference to either half.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import sys
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rankcall.record import NO_RANK

_MOST_AT_ONCE = 4  # stand-ins that one op looks at


class End(Protocol):
    """Writes down the end of an op. Any thread may call its methods, and they do not raise."""

    def waited(self, error: BaseException | None, peer: int) -> None: ...
    def abandoned(self) -> None: ...


class WaitedWork(dist.Work):
    """Answers as the Work that it stands in for does."""

    def __init__(self, inner: dist.Work, end: End, any_source: bool) -> None:
        super().__init__()
        self._inner: Any = inner  # some of its methods are not in torch's type stubs
        self._end: End | None = end
        self._any_source = any_source

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        """Wait for the op, and record its end."""
        try:
            result: bool = self._inner.wait(*args, **kwargs)
        except BaseException as error:
            self._ended(error)
            raise
        self._ended(None)
        return result

    def is_completed(self) -> bool:
        """Tell whether the op has completed."""
        completed: bool = self._inner.is_completed()
        if completed:
            self._ended(None if self._inner.is_success() else RuntimeError("failed"))
        return completed

    def abandon(self) -> None:
        """Note that the Work is dropped: there will be no wait for the op."""
        end, self._end = self._end, None
        if end is not None:
            end.abandoned()

    def _ended(self, error: BaseException | None) -> None:
        end, self._end = self._end, None
        if end is None:
            return
        source = NO_RANK
        if error is None and self._any_source:
            with contextlib.suppress(Exception):
                source = self._inner._source_rank()
        end.waited(error, source)

    def is_success(self) -> bool:
        """Tell whether the op has succeeded."""
        return bool(self._inner.is_success())

    def exception(self) -> Any:
        """Return the error with which the op failed."""
        return self._inner.exception()

    def source_rank(self) -> int:
        """Return the rank that an any-source receive got its message from."""
        return int(self._inner.source_rank())

    def _source_rank(self) -> int:
        return int(self._inner._source_rank())

    def result(self) -> list[torch.Tensor]:
        """Return the op's output tensors."""
        return list(self._inner.result())

    def synchronize(self) -> None:
        """Order the caller's stream behind the op."""
        self._inner.synchronize()

    def block_current_stream(self) -> None:
        """Order the caller's stream behind the op."""
        self._inner.block_current_stream()

    def get_future(self) -> Any:
        """Raise the error of the Work that has no future."""
        return self._inner.get_future()

    def get_future_result(self) -> Any:
        """Return the future of the op's result, if the Work has one; else raise its error."""
        return self._inner.get_future_result()

    def _get_op_type(self) -> Any:
        return self._inner._get_op_type()

    def _get_duration(self) -> float:
        return float(self._inner._get_duration())


# All stand-ins of this process, whichever recording made them: a recording may end first.
stand_ins: dict[int, WaitedWork] = {}
_numbers = itertools.count()


def stand_in(work: dist.Work, end: End, any_source: bool) -> Any:
    """Return a boxed stand-in for a Work; None if its halves could not be kept together."""
    if not _can_tell_dropped():
        return None
    waited = WaitedWork(work, end, any_source)
    boxed = waited.boxed()
    stand_ins[next(_numbers)] = waited
    return boxed


def release_dropped(most: int = _MOST_AT_ONCE) -> None:
    """Let go of the stand-ins without other references, and of the Works and tensors they hold.

    Looks at ``most`` of them, first at those that were looked at longest ago.
    """
    for number in list(itertools.islice(stand_ins, most)):
        waited, references = _take(stand_ins, number)
        if waited is None:
            continue
        if references > _python_references() or _cpp_references(waited) > 1:
            stand_ins[number] = waited  # at the end: others are looked at next
        else:
            waited.abandon()


def _take(works: dict[int, Any], number: int) -> tuple[Any, int]:
    """Take out a Work; return it, and how many Python references there are to it here."""
    work = works.pop(number, None)
    return work, sys.getrefcount(work)


@functools.cache
def _python_references() -> int:
    """Return the number that ``_take`` counts for a Work without other references."""
    return _take({0: _Unused()}, 0)[1]


def _cpp_references(work: dist.Work) -> int:
    """Return how many C++ references there are to a Work made in Python; 1 is its Python half's.

    torch has no function for it. pybind11 keeps the address of the C++ half behind the head of the
    Python object; the half begins with the address of its virtual functions and, as every
    ``c10::intrusive_ptr_target``, with the count. ``_can_tell_dropped`` tries that first.
    """
    pointer = ctypes.sizeof(ctypes.c_void_p)
    address = ctypes.c_void_p.from_address(id(work) + object.__basicsize__).value
    return ctypes.c_uint32.from_address(address + pointer).value if address else 0


@functools.cache
def _can_tell_dropped() -> bool:
    """Tell whether C++ references are counted where ``_cpp_references`` looks for them."""
    work = _Unused()
    counts = [_cpp_references(work)]
    boxes = []
    for _ in range(3):
        boxes.append(work.boxed())
        counts.append(_cpp_references(work))
    boxes.clear()
    counts.append(_cpp_references(work))
    return counts == [1, 2, 3, 4, 1]


class _Unused(dist.Work):
    """A Work to count references of."""
