"""Record how an op ends: by its Work's future, or by the return of ``wait()``.

Corresponds to ``native/completion.h``, ``native/completion_source.h`` and ``native/work_proxy.h``.
Also wakes the thread that calls hooks, which ``native/wake.h`` does for the native capture.

The return of ``wait()`` is the end of an op whose Work has no future. The caller gets a proxy of
that Work, and a proxy made in Python has two halves. If the Python half is freed first, ``wait()``
of the C++ half blocks for ever, because it is the base class's. So a Python half is kept until
there is no reference to either half.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import sys
import time
from collections import deque
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from rankcall.capture.device_ops import NO_NUMBER, DeviceOp
from rankcall.capture.fallback.numbering import GroupState
from rankcall.capture.fallback.schema import Op
from rankcall.record import FLAG_ABANDONED, FLAG_ANY_SOURCE, FLAG_DEVICE, NO_RANK, STATUSES
from rankcall.ring.writer import PythonRing

# Proxies that are examined at an op. An op adds one at most, so with more than one their number
# falls. All of them at once would be a pause of the training thread.
_MOST_AT_ONCE = 4


class End(Protocol):
    """Writes down the end of an op. Any thread may call its methods, and they do not raise."""

    def waited(self, error: BaseException | None, peer: int) -> None: ...
    def abandoned(self) -> None: ...


class WorkProxy(dist.Work):
    """Answers as the Work behind it does, and records the end of its op."""

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


# All proxies of this process, whichever recording made them: a recording may end first.
work_proxies: dict[int, WorkProxy] = {}
_numbers = itertools.count()


def proxy_for(work: dist.Work, end: End, any_source: bool) -> Any:
    """Return a boxed proxy of a Work; None if its two halves could not be kept together."""
    if not _can_tell_dropped():
        return None
    proxy = WorkProxy(work, end, any_source)
    boxed = proxy.boxed()
    work_proxies[next(_numbers)] = proxy
    return boxed


def release_dropped(most: int = _MOST_AT_ONCE) -> None:
    """Release the proxies without other references, and with them their Works and tensors.

    Examines ``most`` of them, in turn.
    """
    for number in list(itertools.islice(work_proxies, most)):
        proxy, references = _take(work_proxies, number)
        if proxy is None:
            continue
        if references > _python_references() or _cpp_references(proxy) > 1:
            work_proxies[number] = proxy  # at the end, so that others come first next time
        else:
            proxy.abandon()


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


_ENQUEUED, _STARTED = STATUSES.index("enqueued"), STATUSES.index("started")
_COMPLETED, _FAILED = STATUSES.index("completed"), STATUSES.index("failed")
# Noted and not taken, for example because the heartbeat's thread is stuck.
_MOST_DEVICE_OPS = 1 << 16
_TORCHS_OWN = dist.Work.__module__


class Issued(NamedTuple):
    """The facts of an op's issue that its end needs."""

    number: int  # the record's index in the ring
    group: GroupState
    tag: int
    flags: int  # of the record
    p2p: bool
    first: bool  # the first op of its group
    block: int  # the correlation number of its record
    device: str = "cpu"  # the kind of device that it runs on
    is_synchronous: bool = False  # the caller's argument async_op is false


class Waker:
    """Wakes the thread that calls hooks: for ends if ``wanted`` is 1, for both if it is 2."""

    def __init__(self) -> None:
        self.wanted = 0
        self._fd = -1

    def arm(self, fd: int, wanted: int) -> None:
        """Have the eventfd written at the next event that is wanted, once."""
        self._fd, self.wanted = fd, wanted

    def wake(self, least: int) -> None:
        """Wake the thread if it wants ``least`` or more."""
        if self.wanted >= least:
            self.wanted = 0
            with contextlib.suppress(OSError):
                os.eventfd_write(self._fd, 1)


class Completion:
    """Writes the ends of ops, on whichever thread they end. Nothing here raises into an op."""

    def __init__(self, ring: PythonRing, waker: Waker) -> None:
        self._ring = ring
        self._waker = waker
        self._pid = os.getpid()
        # In Python all of Gloo's Works are of one type: the op tells them apart.
        self._futureless: set[tuple[type, str]] = set()
        self.first_ops = 0  # of groups, that are being issued
        # Since they were taken last. A deque, to which the issuing thread appends while another
        # thread takes: an op that went into a list already taken would stay in flight for ever.
        self._device_ops: deque[DeviceOp] = deque()
        # By record, until they are done. They hold no tensor: each is only an op's result.
        self._results: dict[int, Any] = {}
        self._open_device_ops: set[int] = set()  # as many as the status keeps

    def arrange(self, op: Op, issued: Issued, result: Any) -> Any:
        """Have the end of an op recorded, and return the op's result for its caller."""
        try:
            if work_proxies:
                release_dropped()
            return self._arrange(op, issued, result)
        except Exception:
            self.abandon(issued)
            return result

    def _arrange(self, op: Op, issued: Issued, result: Any) -> Any:
        if issued.flags & FLAG_DEVICE:
            self._note_device_op(op, issued, result)
            return result
        boxed = result[-1] if isinstance(result, (tuple, list)) else result
        if not op.returns_work or boxed is None:  # monitored_barrier_ has returned, so it is over
            self._end(issued, _COMPLETED)
            return result
        work = dist.Work.unbox(boxed)
        kind, torchs_own = (type(work), op.name), type(work).__module__ == _TORCHS_OWN
        if kind not in self._futureless:
            try:
                future = work.get_future()
            except Exception:
                if torchs_own:
                    self._futureless.add(kind)
            else:
                self._await_future(issued, future)
                return result
        # A Work that was made in Python may have any attributes: its caller gets that very object.
        boxed = None
        if torchs_own:
            boxed = proxy_for(work, _WaitEnd(self, issued), bool(issued.flags & FLAG_ANY_SOURCE))
        if boxed is None:
            self.abandon(issued)
            return result
        return (*result[:-1], boxed) if isinstance(result, (tuple, list)) else boxed

    def _note_device_op(self, op: Op, issued: Issued, result: Any) -> None:
        stream, is_captured = _callers_stream()
        if is_captured or len(self._device_ops) >= _MOST_DEVICE_OPS:
            self.abandon(issued)
            return
        boxed = result[-1] if isinstance(result, (tuple, list)) else result
        work = dist.Work.unbox(boxed) if op.returns_work and boxed is not None else None
        future = _result_of(work)
        is_watched = future is not None and len(self._results) < _MOST_DEVICE_OPS
        self._open_device_ops.add(issued.number)
        self._device_ops.append(
            DeviceOp(
                issued.number,
                issued.group.id,
                _number_of(work, issued),
                issued.p2p,
                issued.block,
                is_watched,
                stream,
                in_stream=work is None and issued.is_synchronous,
            )
        )
        # The note comes first: whoever takes the ends, and then the notes, has a note of each end.
        if is_watched:
            self._results[issued.number] = future

    def take_ended_device_ops(self) -> list[int]:
        """End the records of the ops whose futures are done; return those records.

        An op that failed, or was aborted, stays in flight: it never completed.
        """
        ended = []
        for record, future in list(self._results.items()):
            if future.done():
                del self._results[record]
                with contextlib.suppress(Exception):
                    if future.value() == 0:  # c10d::WorkResult::SUCCESS
                        ended.append(record)
        self.end_device_ops(ended, time.monotonic_ns())
        return ended

    def take_device_ops(self) -> list[DeviceOp]:
        """Return the ops on devices that were issued since the last call."""
        return [self._device_ops.popleft() for _ in range(len(self._device_ops))]

    def end_device_ops(self, records: list[int], time_ns: int) -> None:
        """End records that have not ended: completed at ``time_ns``, abandoned if that is 0."""
        for record in records:
            if record not in self._open_device_ops:
                continue
            self._open_device_ops.discard(record)
            self._results.pop(record, None)
            if time_ns:
                self._write_end(record, _COMPLETED, time_ns)
            else:
                flags = FLAG_DEVICE | FLAG_ABANDONED
                self._write_end(record, _ENQUEUED, 0, flags=flags)

    def _await_future(self, issued: Issued, future: Any) -> None:
        if future.done():
            self._future_done(issued, future)
        else:
            future.add_done_callback(lambda done: self._future_done(issued, done))

    def _future_done(self, issued: Issued, future: Any) -> None:
        try:
            future.value()
        except Exception as error:
            self.failed(issued, error)
        else:
            self._end(issued, _COMPLETED)

    def failed(self, issued: Issued, error: BaseException) -> None:
        """Record that an op has failed."""
        try:
            fields: dict[str, float] = {"error": self._ring.error(str(error))}
        except Exception:
            fields = {}
        self._end(issued, _FAILED, **fields)

    def completed(self, issued: Issued, peer: int = NO_RANK) -> None:
        """Record that an op has completed; ``peer``: the source of an any-source receive."""
        if peer == NO_RANK:
            self._end(issued, _COMPLETED)
        else:
            seq = issued.group.next_p2p(peer, issued.tag, False)
            self._end(issued, _COMPLETED, peer=peer, seq=seq)

    def abandon(self, issued: Issued) -> None:
        """Close a record whose end cannot be known."""
        status = _ENQUEUED if issued.flags & FLAG_DEVICE else _STARTED
        self._end(issued, status, flags=issued.flags | FLAG_ABANDONED)

    def _end(self, issued: Issued, status: int, **fields: float) -> None:
        ended_ns = 0 if status in (_ENQUEUED, _STARTED) else time.monotonic_ns()
        self._write_end(issued.number, status, ended_ns, **fields)

    def _write_end(self, record: int, status: int, ended_ns: int, **fields: float) -> None:
        # A forked child has its parent's Works, and its parent's ring.
        if os.getpid() != self._pid:
            return
        try:
            self._ring.finish(record, status, ended_ns, **fields)
            if self._waker.wanted:
                self._waker.wake(1)
        except Exception:  # for example, a ring that is closed: the user's op goes on
            pass


def _result_of(work: Any) -> Any:
    """Return the future that tells that an op is over on its device, None if there is none.

    It is looked at, and has no callback: torch's watchdog would wait for the GIL to call one.
    """
    if work is None or type(work).__module__ != _TORCHS_OWN:
        return None
    try:
        return work.get_future_result()
    except RuntimeError:
        return None


def _number_of(work: Any, issued: Issued) -> int:
    """Return the number that the back end gave an op; see ``number_of`` of the native capture."""
    group = issued.group
    try:
        if work is not None and hasattr(work, "_get_sequence_number"):  # since torch 2.14
            return int(work._get_sequence_number())
        if issued.p2p or not group.is_numbered:
            return NO_NUMBER
        process_group = group.alive()
        if process_group is None:
            return NO_NUMBER
        back_end: Any = process_group._get_backend(torch.device(issued.device))
        return int(back_end._get_sequence_number_for_group())
    except (RuntimeError, AttributeError):
        if work is None:
            group.is_numbered = False  # to raise takes long
        return NO_NUMBER


def _callers_stream() -> tuple[int, bool]:
    """Return a number of the caller's stream, and whether it is being captured into a graph.

    The number is 0 if it is not known, and no other stream has it.
    """
    try:
        stream = torch.accelerator.current_stream()
        # Streams of a pool have small ids, and those that were made elsewhere an address.
        number = (stream.stream_id << 8 | (stream.device_index & 0x7F)) + 1
        if hasattr(stream, "is_capturing"):
            return number, bool(stream.is_capturing())
        return number, torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    except Exception:  # a torch, or a device, that cannot say
        return 0, torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class _WaitEnd:
    """Writes down how an op ended whose Work was waited for, or dropped."""

    def __init__(self, completion: Completion, issued: Issued) -> None:
        self._completion, self._issued = completion, issued

    def waited(self, error: BaseException | None, peer: int) -> None:
        if error is None:
            self._completion.completed(self._issued, peer)
        else:
            self._completion.failed(self._issued, error)

    def abandoned(self) -> None:
        self._completion.abandon(self._issued)
