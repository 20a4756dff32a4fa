"""The pure-Python capture: the same records as the native recorder's, where it cannot be built.

A Python kernel at the same dispatch key, writing the same ring. Slower (some 10 us a call), but
complete: it stands wherever torch runs.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import get_native_id
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensor

from rankcall.capture.callsites import CallSites
from rankcall.capture.device import DeviceTimes, Span
from rankcall.capture.marks import Marks, PythonMarks
from rankcall.capture.ops import (
    Op,
    c10d_ops,
    in_and_out,
    message_bytes,
    shape_hash,
    shape_of,
    sizes_at,
)
from rankcall.capture.public import public_name
from rankcall.capture.waited import WaitedWork
from rankcall.record import (
    DEVICE_TYPES,
    DTYPES,
    FLAG_ANY_SOURCE,
    FLAG_DEVICE,
    NO_RANK,
    REDUCE_OPS,
    STATUSES,
)
from rankcall.ring.tables import Group
from rankcall.ring.writer import PythonRing, put

_ENQUEUED, _STARTED, _COMPLETED, _FAILED = range(len(STATUSES))
_AFTER = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
_MAX_WAITED, _MAX_OVER = 65536, 4096  # Works kept: not waited for yet, and waited for
_MAX_ERRORS = 256
_MAX_SHAPES, _MAX_NUMELS = 1024, 1024  # of coalesced ops


@dataclass
class _GroupState:
    """A process group, its side-table id and sequence counters."""

    group: Group
    id: int
    rank: int
    size: int
    collectives: int = 0
    p2p: dict[tuple[int, int, bool], int] = field(default_factory=dict)

    def next_p2p(self, peer: int, tag: int, outgoing: bool) -> int:
        key = (peer, tag, outgoing)
        self.p2p[key] = self.p2p.get(key, 0) + 1
        return self.p2p[key]


class _PerThread(threading.local):
    """What the capture keeps per thread."""

    correlation = 0


class Numbered(NamedTuple):
    """What an op that is about to be issued will be: for who stands between it and the record."""

    name: str  # of its group
    description: str
    size: int
    seq: int
    peer: int  # global rank, -1 without one


Interposer = Callable[["Op", Numbered, Callable[..., Any], tuple[Any, ...]], Any]


class _Issued(NamedTuple):
    number: int  # the record's index in the ring
    group: _GroupState
    tag: int
    any_source: bool
    span: Span | None


class PythonCapture:
    """Records through Python kernels; see ``NativeCapture`` for the interface."""

    name = "python"
    make_statuses = None  # they are made column by column

    def __init__(self, ring: PythonRing, call_sites: bool = True) -> None:
        self._ring = ring
        self._sites_found = CallSites(ring.site) if call_sites else None
        self._site = self._sites_found.find if self._sites_found is not None else _no_site
        self._local = _PerThread()
        self._announced: dict[str, tuple[Group, int]] = {}
        self._groups: dict[str, _GroupState] = {}
        # In Python all of Gloo's Works are of one type: the op tells them apart.
        self._futureless: set[tuple[type, str]] = set()
        self._waited: dict[int, WaitedWork] = {}
        self._over: dict[int, WaitedWork] = {}
        self._errors: dict[str, int] = {}
        self._shapes: set[int] = set()  # of coalesced ops, whose tensors' sizes were written down
        self._devices = DeviceTimes(ring, self._notify)
        self._steps = 0
        self._wake_fd = -1
        self._wake_for = 0
        self._marks: PythonMarks | None = None  # kept when it is off: open ranges still end
        self._marks_wanted: Marks | None = None
        self._marking = False
        self.recording = False
        # Planted faults: called in place of an op, with what issues and records it.
        self.interposer: Interposer | None = None
        self._library: torch.library.Library | None = None

    # --- the capture's interface ---

    def start(self) -> None:
        """Install a kernel in front of every c10d op."""
        library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        for op in c10d_ops():
            kernel = self._kernel(op, self._ring.string(op.name))
            library.impl(  # type: ignore[no-untyped-call]
                op.name, kernel, "BackendSelect", with_keyset=True
            )
        self._library = library
        self.recording = True

    def stop(self) -> None:
        """Take the kernels out again. Ops in flight still write their ends."""
        self.recording = False
        if self._library is not None:
            self._library._destroy()  # type: ignore[no-untyped-call]
            self._library = None
        self._devices.close()

    def forget(self) -> None:
        """Record nothing more: this is a forked child, and the ring is its parent's."""
        self.recording = False
        self._wake_for = 0

    def drained(self) -> bool:
        """Whether every record has its end."""
        return self._ring.done == self._ring.head

    def counts(self) -> tuple[int, int]:
        """Return how many records were issued, and how many have ended."""
        return self._ring.head, self._ring.done

    def add_group(self, group: Group, me: int) -> None:
        """Announce a group; ``me`` is this rank's place in it. Its counters start anew."""
        self._announced[group.name] = group, self._ring.group(group)
        self._groups.pop(group.name, None)
        if self._marks is not None and self._marks_wanted is not None:
            self._marks.learn(self._marks_wanted, group)

    def add_line(self, site: int, text: str) -> None:
        """Add what the source says at a call site."""
        self._ring.line(site, text)

    def mark(self, marks: Marks | None) -> None:
        """Have a tool told of each op as it is issued, from now on; None ends that."""
        self._marks_wanted = marks
        if marks is not None:
            self._marks = PythonMarks(marks)
            self.learn_spans(marks)
        self._marking = marks is not None

    def learn_spans(self, marks: Marks) -> None:
        """Ask again which members of which groups are on other hosts."""
        for group, _ in list(self._announced.values()):
            if self._marks is not None:
                self._marks.learn(marks, group)

    def step(self) -> None:
        """Count an optimizer step."""
        self._steps += 1
        put(self._ring.map, "step", self._steps)

    def sleep(self, fd: int, wanted: int) -> None:
        """Have the eventfd written at the next end (1), or the next start or end (2)."""
        self._wake_fd, self._wake_for = fd, wanted

    def _notify(self, kind: int) -> None:
        if self._wake_for >= kind:
            self._wake_for = 0
            with contextlib.suppress(OSError):
                os.eventfd_write(self._wake_fd, 1)

    # --- the kernel ---

    def _kernel(self, op: Op, variant: int) -> Callable[..., Any]:
        redispatch = op.overload.redispatch
        issue, follow = self._issuer(op, variant), self._follow

        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            if self.interposer is not None:
                through = functools.partial(recorded, keys, **kwargs)
                return self.interposer(op, self._numbered(op, args), through, args)
            return recorded(keys, *args, **kwargs)

        def recorded(keys: Any, *args: Any, **kwargs: Any) -> Any:
            issued = None
            if self.recording:
                try:
                    issued = issue(args)
                except Exception:  # an argument nobody foresaw: the user's op goes on, unrecorded
                    issued = None
            if issued is None:
                return redispatch(keys & _AFTER, *args, **kwargs)
            try:
                result = redispatch(keys & _AFTER, *args, **kwargs)
            except BaseException as error:
                self._finish(issued, _FAILED, error=str(error))
                raise
            return follow(op, issued, result)

        return kernel

    def _numbered(self, op: Op, args: tuple[Any, ...]) -> Numbered:
        """Return the number that an op will get, without giving it away."""
        process_group = dist.ProcessGroup.unbox(args[op.process_group])
        group = self._group_of(process_group)
        name, text = str(process_group.group_name), str(process_group.group_desc)
        if not op.p2p:
            return Numbered(name, text, group.size, group.collectives + 1, NO_RANK)
        at = op.positions.get("dst", op.positions.get("src"))
        key = (
            NO_RANK if at is None else args[at],
            args[op.positions["tag"]],
            "dst" in op.positions,
        )
        peer = NO_RANK if at is None else dist.get_global_rank(process_group, args[at])
        return Numbered(name, text, group.size, group.p2p.get(key, 0) + 1, peer)

    def _issuer(self, op: Op, variant: int) -> Callable[[tuple[Any, ...]], _Issued | None]:
        """Return the function that records one op: what the schema settles is settled here."""
        ring, local = self._ring, self._local
        code, p2p, group_at = op.code, op.p2p, op.process_group
        root_at = op.positions.get("root_rank")
        coalesced = "coalesced" in op.name
        unbox = dist.ProcessGroup.unbox

        def issue(args: tuple[Any, ...]) -> _Issued | None:
            ins, outs = in_and_out(op, args)
            shaped = ins.tensors or outs.tensors
            main = shaped or sizes_at(args, op.other_tensor).tensors
            device, dtype = "cpu", 0
            index = -1
            if main:
                first = main[0]
                place = first.device
                device, index = place.type, -1 if place.index is None else place.index
                if device == "meta" or isinstance(first, FakeTensor):
                    return None
                dtype = _DTYPE_CODES.get(first.dtype, 0)
            group = self._group_of(unbox(args[group_at]))
            if p2p:
                seq, peer, tag, any_source = _number(op, args, group)
            else:
                group.collectives = seq = group.collectives + 1
                peer, tag, any_source = NO_RANK, 0, False
            span = self._devices.begin(first.device) if device != "cpu" else None
            site, continues = self._site(sys._getframe(2))
            if not continues:
                local.correlation = ring.head + 1
            ndim, shape = shape_of(shaped)
            shapes = shape_hash(op, args, shaped)
            if coalesced and shapes and shapes not in self._shapes:
                self._note_shapes(shapes, shaped)
            now = time.monotonic_ns()
            record = ring.issue((
                seq, now, 0 if span else now, 0,
                message_bytes(op, args, ins, outs, group.rank, group.size), ins.bytes, outs.bytes,
                local.correlation, self._steps, _NAN, tag, *shape,
                group.id, site, get_native_id(), NO_RANK if root_at is None else args[root_at],
                peer, 0, variant, shapes, min(len(shaped), 65535), index,
                p2p, code, dtype, _reduce_code(op, args), _DEVICE_CODES.get(device, 0),
                _async_code(op, args), _ENQUEUED if span else _STARTED,
                (FLAG_ANY_SOURCE if any_source else 0) | (FLAG_DEVICE if span else 0), ndim,
            ))  # fmt: skip
            if span is not None:
                span.index = record
            if self._marking:
                self._mark(op, record, args, group, site, seq, peer, dtype, index, shaped)
            if self._wake_for == 2:
                self._notify(2)
            return _Issued(record, group, tag, any_source, span)

        return issue

    def _mark(
        self, op: Op, record: int, args: tuple[Any, ...], state: _GroupState, site: int, seq: int,
        peer: int, dtype: int, device: int, tensors: list[torch.Tensor],
    ) -> None:  # fmt: skip
        """Tell the tool of an op that is being issued."""
        assert self._marks is not None
        ins, outs = in_and_out(op, args)
        size = message_bytes(op, args, ins, outs, state.rank, state.size)
        sizes = [size]
        if "coalesced" in op.name and len(tensors) > 1:
            total = sum(each.numel() for each in tensors) or 1
            sizes = [size * each.numel() // total for each in tensors]
        root_at = op.positions.get("root_rank")
        fields = {
            "op": op.code, "seq": seq, "peer": peer, "dtype": dtype, "device": device,
            "root": NO_RANK if root_at is None else args[root_at], "sizes": sizes,
            "correlation": self._local.correlation, "step": self._steps,
        }  # fmt: skip
        where = self._sites_found.known(site) if self._sites_found is not None else None
        self._marks.issued(record, fields, public_name(op.name), where, state.group, state.rank)

    def _note_shapes(self, shapes: int, tensors: list[torch.Tensor]) -> None:
        """Write down how many elements each tensor of a coalesced op has, once per shape hash."""
        if len(self._shapes) < _MAX_SHAPES:
            self._shapes.add(shapes)
            self._ring.numels(shapes, [each.numel() for each in tensors[:_MAX_NUMELS]])

    def _group_of(self, group: dist.ProcessGroup) -> _GroupState:
        try:
            name = str(group.group_name)
        except RuntimeError:
            name = "unnamed"  # made by hand, not through torch.distributed
        state = self._groups.get(name)
        if state is None:
            announced = self._announced.get(name)
            if announced is None:
                unknown = Group(name, 0, _backend_of(group), "", ())
                announced = unknown, self._ring.group(unknown)
            state = self._groups[name] = _GroupState(*announced, group.rank(), group.size())
        return state

    # --- the end ---

    def _follow(self, op: Op, issued: _Issued, result: Any) -> Any:
        boxed = result[-1] if isinstance(result, (tuple, list)) else result
        work: dist.Work | None = None
        if op.returns_work and boxed is not None:
            work = dist.Work.unbox(boxed)
        if work is None:  # monitored_barrier_, and what a back end merges into a later launch
            self._ended(issued, _COMPLETED)
            return result
        if (type(work), op.name) not in self._futureless:
            try:
                future = work.get_future()
            except RuntimeError:
                self._futureless.add((type(work), op.name))
            else:
                if future.done():
                    self._future_done(issued, future)
                else:
                    future.add_done_callback(lambda done: self._future_done(issued, done))
                return result
        boxed = self._wait_for(work, issued).boxed()
        return (*result[:-1], boxed) if isinstance(result, (tuple, list)) else boxed

    def _wait_for(self, work: dist.Work, issued: _Issued) -> WaitedWork:
        """Put a Work of ours in place of one that has no future.

        Its Python half must live as long as its C++ half, which would go on without our methods
        and wait for ever; nobody says how long that is, so a bounded number is kept.
        """

        def over(error: BaseException | None, peer: int) -> None:
            if self._waited.pop(issued.number, None) is not None:
                self._over[issued.number] = waited
                _trim(self._over, _MAX_OVER)
            status = _COMPLETED if error is None else _FAILED
            self._ended(issued, status, error=str(error or ""), peer=peer)

        waited = self._waited[issued.number] = WaitedWork(work, over, issued.any_source)
        _trim(self._waited, _MAX_WAITED)
        return waited

    def _future_done(self, issued: _Issued, future: Any) -> None:
        try:
            future.value()
        except Exception as error:
            self._ended(issued, _FAILED, error=str(error))
        else:
            self._ended(issued, _COMPLETED)

    def _ended(self, issued: _Issued, status: int, **outcome: Any) -> None:
        """Record the end of an op; on a device that is still to come, and its event is watched."""
        if issued.span is None or not self._devices.end(issued.span, status):
            self._finish(issued, status, **outcome)

    def _finish(self, issued: _Issued, status: int, error: str = "", peer: int = NO_RANK) -> None:
        completed_ns = time.monotonic_ns()
        if self._marks is not None:
            self._marks.ended(issued.number)
        if error or peer != NO_RANK:
            fields: dict[str, float] = {"error": self._error(error)} if error else {}
            if peer != NO_RANK:
                fields["peer"] = peer
                fields["seq"] = issued.group.next_p2p(peer, issued.tag, False)
            self._ring.finish(issued.number, status, completed_ns, **fields)
        else:
            self._ring.finish(issued.number, status, completed_ns)
        if self._wake_for:
            self._notify(1)

    def _error(self, message: str) -> int:
        if message not in self._errors:
            if len(self._errors) >= _MAX_ERRORS:
                return 0
            self._errors[message] = self._ring.string(message[:4096])
        return self._errors[message]


def _trim(works: dict[int, WaitedWork], most: int) -> None:
    while len(works) > most:
        works.pop(next(iter(works)), None)


_DTYPE_CODES = {
    getattr(torch, name): code for code, name in enumerate(DTYPES) if hasattr(torch, name)
}
_DEVICE_CODES = {name: code for code, name in enumerate(DEVICE_TYPES)}


_NAN = math.nan


def _no_site(frame: FrameType) -> tuple[int, bool]:
    return 0, False


def _number(op: Op, args: tuple[Any, ...], group: _GroupState) -> tuple[int, int, int, bool]:
    """Return seq, peer and tag of a send or receive, and whether its source is yet to be known."""
    tag = args[op.positions["tag"]]
    at = op.positions.get("dst", op.positions.get("src"))
    if at is None:
        return 0, NO_RANK, tag, True
    peer = args[at]
    return group.next_p2p(peer, tag, "dst" in op.positions), peer, tag, False


def dtype_codes() -> list[tuple[torch.dtype, int]]:
    """Return the dtypes of the running torch with the codes that records use."""
    return list(_DTYPE_CODES.items())


def _reduce_code(op: Op, args: tuple[Any, ...]) -> int:
    at = op.positions.get("reduce_op")
    if at is None:
        return 0
    code = int(args[at].op()) + 1  # RedOpType, shifted as in REDUCE_OPS
    return code if code < len(REDUCE_OPS) else 0


def _async_code(op: Op, args: tuple[Any, ...]) -> int:
    at = op.positions.get("async_op")
    if at is None:
        return 2
    return int(args[at]) if at < len(args) else 1  # the schema's default


def _backend_of(group: dist.ProcessGroup) -> str:
    try:
        return group.name()
    except RuntimeError:
        return "custom"
