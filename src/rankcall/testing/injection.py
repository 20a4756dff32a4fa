"""One fault, and how it strikes: between a c10d op and the capture that records it."""

from __future__ import annotations

import ctypes
import functools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from rankcall.errors import CaptureUnavailableError, warn_renamed
from rankcall.handles import Handle
from rankcall.record import OPS

if TYPE_CHECKING:
    from rankcall.capture.fallback.numbering import Numbered
    from rankcall.capture.fallback.schema import Op


_NAP_S = 3600.0  # a planted hang must outlast every test; its process is ended by its parent


class InjectedFault(RuntimeError):
    """Raised on a rank by ``FaultPlan.fail``."""


@dataclass(frozen=True)
class Fault:
    """One entry of a plan. ``at``, ``seq`` and ``group`` select the op; None means any."""

    kind: str
    rank: int
    at: str | None = None
    seq: int = 1
    group: str | None = None
    times: int = 1
    number: int = 0  # depends on the kind: a signal, an exit code, a number of batches, a peer
    seconds: float = 0.0
    text: str = ""

    def __post_init__(self) -> None:
        """Check the fields, as far as possible without a job."""
        if self.rank < 0:
            raise ValueError(f"a fault needs a rank from 0 on; got {self.rank}")
        if self.at is not None and self.at not in OPS[1:]:
            raise ValueError(f"unknown op {self.at!r}; the known ones are {', '.join(OPS[1:])}")
        if self.seq < 1:
            raise ValueError(f"sequence numbers count from 1; got {self.seq}")
        if self.times < 1:
            raise ValueError(f"times must be 1 or more; got {self.times}")
        if not self.seconds >= 0:
            raise ValueError(f"seconds must not be negative; got {self.seconds}")


class _Call(NamedTuple):
    """An op that is about to be issued."""

    op: Op
    issue: Callable[..., Any]
    args: tuple[Any, ...]

    def run(self) -> Any:
        return self.issue(*self.args)


@dataclass
class _Pending:
    """A fault, and how often it is still to strike."""

    fault: Fault
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.fault.times

    def strikes_at(self, op: str, numbered: Numbered) -> bool:
        """Return whether the fault strikes at this op, and if so, count that."""
        fault = self.fault
        strikes = (
            self.left > 0
            and fault.at in (None, op)
            and numbered.seq >= fault.seq
            and fault.group in (None, numbered.name, numbered.description)
            and (fault.kind != "slow_link" or numbered.peer == fault.number)
        )
        self.left -= strikes
        return strikes


class PlantedFaults:
    """The faults of one rank, and what they do to the ops that it issues."""

    def __init__(self, faults: Iterable[Fault], rank: int) -> None:
        self._pending = [
            _Pending(fault) for fault in faults if fault.rank == rank and fault.kind != "exhaust"
        ]
        self._boxing: list[Any] | None = None
        self._held: list[_Call] = []
        self._kept: list[Any] = []  # Works of ops that the program does not wait for

    def issue(self, op: Op, numbered: Numbered, issue: Callable[..., Any], args: Any) -> Any:
        """Issue the op with the faults that strike at it."""
        if self._boxing is not None:
            self._boxing.append(args[op.positions["reduce_op"]])
            return _as_if_done(_Call(op, issue, tuple(args)))
        call, after = _Call(op, issue, tuple(args)), []  # type: tuple[_Call, list[Fault]]
        for pending in self._pending:
            if not pending.strikes_at(OPS[op.code], numbered):
                continue
            fault = pending.fault
            if fault.kind in ("skip", "swap"):
                if fault.kind == "swap":
                    self._held.append(call)
                return _as_if_done(call)
            if fault.kind == "change":
                call = call._replace(args=self._changed(op, call.args, fault.text, numbered.size))
            elif fault.kind == "slow_link":
                after.append(fault)
            else:
                _carry_out(fault)
        result = self._delayed(call.run(), after)
        while self._held:
            self._issue_held(call, result)
        return result

    def _changed(self, op: Op, args: tuple[Any, ...], what: str, size: int) -> tuple[Any, ...]:
        """Return an op's arguments with one of them changed; ``what`` names it."""
        if what == "reduce_op" and what in op.positions:
            return _put(op, args, what, lambda _: self._other_reduce_op(op, args))
        if what in ("root", "tag", "reduce_op"):
            name, every = ("root_rank", size) if what == "root" else (what, 1 << 30)
            return _put(op, args, name, lambda number: (number + 1) % every)
        for at in {op.reads, op.writes} - {None}:
            assert at is not None
            changed = _each_tensor(args[at], _twice if what == "shape" else _other_dtype)
            args = (*args[:at], changed, *args[at + 1 :])
        if what == "shape" and "input_split_sizes" in op.positions:
            for name in ("output_split_sizes", "input_split_sizes"):
                args = _put(op, args, name, lambda sizes: [2 * part for part in sizes])
        return args

    def _other_reduce_op(self, op: Op, args: tuple[Any, ...]) -> Any:
        """Return another reduce op, boxed: begin an op and take its argument.

        torch offers no other way to box one.
        """
        import torch
        import torch.distributed as dist

        is_max = args[op.positions["reduce_op"]].op() == int(dist.ReduceOp(dist.ReduceOp.MAX).op)  # type: ignore[attr-defined]
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN if is_max else dist.ReduceOp.MAX)
        caught: list[Any] = []
        self._boxing = caught
        try:
            dist.ProcessGroup.unbox(args[op.process_group]).allreduce([torch.zeros(1)], options)
        finally:
            self._boxing = None
        return caught[0]

    def _issue_held(self, call: _Call, result: Any) -> None:
        """Issue an op that was held back, after the op that it should have preceded."""
        at = call.op.positions.get("async_op")
        waits = at is None or (at < len(call.args) and call.args[at] is False)
        if waits and (work := _work_of(call.op, result)) is not None:
            work.wait()
        self._kept.append(self._held.pop(0).run())

    def _delayed(self, result: Any, faults: list[Fault]) -> Any:
        if not faults:
            return result
        late = _late_work()(result, sum(fault.seconds for fault in faults))
        self._kept.append(late)
        return late.boxed()


class Injection(Handle):
    """Faults armed in this process, until ``stop()`` or the end of the ``with`` block.

    ``rank`` is the rank whose faults strike here; None means the rank of the recording.
    """

    def __init__(self, faults: Iterable[Fault], rank: int | None) -> None:
        from rankcall.capture import session
        from rankcall.capture.fallback.capture import FallbackCapture
        from rankcall.capture.settings import read_settings

        recording = session.claim("faults", read_settings(capture="python").without_run())
        capture = recording.capture
        if not isinstance(capture, FallbackCapture) or capture.interposer is not None:
            session.drop("faults")
            reason = "the native capture is recording: set RANKCALL_CAPTURE=python"
            if isinstance(capture, FallbackCapture):
                reason = "another plan is armed"
            raise CaptureUnavailableError(f"faults cannot be planted: {reason}")
        own_rank = recording.rank() if rank is None else rank
        self._planted = PlantedFaults(faults, own_rank)
        self._capture = capture
        capture.interposer = self._planted.issue

    def stop(self) -> None:
        """Remove the faults. A second call does nothing."""
        from rankcall.capture import session

        if self._capture.interposer == self._planted.issue:
            self._capture.interposer = None
            session.drop("faults")

    def remove(self) -> None:
        """Call ``stop()``, by its name of version 0.1."""
        warn_renamed("FaultPlan.arm().remove()", "stop()")
        self.stop()


@functools.cache
def _late_work() -> Any:
    """Return the class of a Work that completes later than the op's own. Its base needs torch."""
    import torch.distributed as dist

    class LateWork(dist.Work):
        def __init__(self, boxed: Any, seconds: float) -> None:
            super().__init__()
            self._inner = dist.Work.unbox(boxed)
            self._seconds = seconds
            self._began = time.monotonic()

        def wait(self, *timeout: Any) -> bool:
            time.sleep(self._seconds)
            return bool(self._inner.wait(*timeout))

        def is_completed(self) -> bool:
            due = time.monotonic() >= self._began + self._seconds
            return due and bool(self._inner.is_completed())

    return LateWork


def _carry_out(fault: Fault) -> None:
    """Do what the fault says to this process."""
    if fault.kind == "signal":
        # Send it to this thread. If it went to the process, another thread might take it, and this
        # one would go on for a moment.
        signal.pthread_kill(threading.get_ident(), fault.number)
        if fault.number != signal.SIGSTOP:
            time.sleep(10)  # until it arrives
    elif fault.kind == "exit":
        raise SystemExit(fault.number)
    elif fault.kind == "fail":
        raise InjectedFault(fault.text)
    elif fault.kind == "hold_gil":
        # pause() and sleep() are no use: any signal with a handler ends them.
        mutex = ctypes.create_string_buffer(128)
        for _ in range(2):
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    elif fault.kind == "delay":
        while math.isinf(fault.seconds):
            time.sleep(_NAP_S)
        time.sleep(fault.seconds)


def _work_of(op: Op, result: Any) -> Any:
    import torch.distributed as dist

    if not op.returns_work:
        return None
    return dist.Work.unbox(result[-1] if isinstance(result, (tuple, list)) else result)


def _as_if_done(call: _Call) -> Any:
    """Return the value that the op would have returned, with a completed Work."""
    import torch
    from torch._C import _distributed_c10d as c10d

    op, args = call.op, call.args
    if not op.returns_work:
        return None
    future: torch.futures.Future[Any] = torch.futures.Future()
    out = args[op.writes] if op.writes is not None else []
    future.set_result([out] if isinstance(out, torch.Tensor) else out)
    work = c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]
    alone = len(op.overload._schema.returns) == 1
    return work if alone else (out, work)


def _put(op: Op, args: tuple[Any, ...], name: str, change: Callable[[Any], Any]) -> tuple[Any, ...]:
    at = op.positions.get(name)
    if at is None:
        raise ValueError(f"{op.name} has no {name} that a fault could change")
    return (*args[:at], change(args[at]), *args[at + 1 :])


def _twice(tensor: Any) -> Any:
    import torch

    return torch.cat([tensor.flatten(), tensor.flatten()])


def _other_dtype(tensor: Any) -> Any:
    import torch

    return tensor.to(torch.float32 if tensor.dtype == torch.float64 else torch.float64)


def _each_tensor(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_each_tensor(item, change) for item in value]
    return change(value)
