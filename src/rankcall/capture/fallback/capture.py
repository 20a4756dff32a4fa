"""The capture in pure Python: the same records as the native one's, if that cannot be built.

A Python kernel at the same dispatch key writes the same ring. It is slower, and it does not know
the back end's number of an op on a device. Its modules correspond to the headers in ``native/``:
this one to ``kernels.h`` and ``issue.h``, for example.

torch's dispatcher raises "fallthrough_kernel was executed" in the threads that issue an op while a
kernel is taken out. So kernels are registered once and stay; a capture that stops only leaves them
without a recorder.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import get_native_id
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensor

from rankcall.capture.device_ops import DeviceOp
from rankcall.capture.fallback.call_sites import CallSites
from rankcall.capture.fallback.completion import (
    Completion,
    Issued,
    Waker,
    release_dropped,
    work_proxies,
)
from rankcall.capture.fallback.kernels import KEYS_AFTER, pass_on, record_with
from rankcall.capture.fallback.numbering import (
    Groups,
    Numbered,
    number_ahead,
    number_p2p,
)
from rankcall.capture.fallback.schema import (
    Op,
    async_code,
    c10d_ops,
    in_and_out,
    message_bytes,
    reduce_code,
    shape_hash,
    shape_of,
    sizes_at,
)
from rankcall.capture.interface import DTYPE_CODES
from rankcall.capture.marks import Marks
from rankcall.capture.moments import Look
from rankcall.errors import warn_once
from rankcall.record import (
    DEVICE_TYPES,
    FLAG_ANY_SOURCE,
    FLAG_DEVICE,
    NO_RANK,
    STATUSES,
)
from rankcall.ring.tables import Group
from rankcall.ring.writer import PythonRing, put

_ENQUEUED, _STARTED = STATUSES.index("enqueued"), STATUSES.index("started")
# Of coalesced ops. A model has as many shapes as buckets. The bounds are for a program whose sizes
# change at each step: they would fill the side tables.
_MAX_SHAPES, _MAX_NUMELS = 1024, 1024
_DEVICE_CODES = {name: code for code, name in enumerate(DEVICE_TYPES)}
_NAN = math.nan


class _PerThread(threading.local):
    """The correlation number of a thread's last call."""

    correlation = 0


class Issuer:
    """Writes the records of ops as they are issued, on the threads that issue them."""

    def __init__(
        self,
        ring: PythonRing,
        groups: Groups,
        call_sites: CallSites | None,
        waker: Waker,
    ) -> None:
        self._ring = ring
        self._groups = groups
        self._call_sites = call_sites
        self._waker = waker
        self._local = _PerThread()
        self._shapes: set[int] = set()  # of coalesced ops, whose tensors' sizes were written down
        self.steps = 0

    def of(self, op: Op, variant: int) -> Callable[[tuple[Any, ...]], Issued | None]:
        """Return the function that records one op. It reads the op's schema once, here."""
        ring, local, waker = self._ring, self._local, self._waker
        code, p2p, group_at = op.code, op.p2p, op.process_group
        root_at = op.positions.get("root_rank")
        coalesced = "coalesced" in op.name
        unbox, state_of = dist.ProcessGroup.unbox, self._groups.state_of
        site_of = self._call_sites.find if self._call_sites is not None else _no_site

        def issue(args: tuple[Any, ...]) -> Issued | None:
            ins, outs = in_and_out(op, args)
            shaped = ins.tensors or outs.tensors
            main = shaped or sizes_at(args, op.other_tensor).tensors
            device, dtype = "cpu", 0
            index = -1
            if main:
                first = main[0]
                place = first.device
                device, index = place.type, -1 if place.index is None else place.index
                # A compiler traces with such tensors: the op does not run.
                if device == "meta" or isinstance(first, FakeTensor):
                    return None
                dtype = DTYPE_CODES.get(first.dtype, 0)
            group = state_of(unbox(args[group_at]), device)
            if p2p:
                seq, peer, tag, any_source = number_p2p(op, args, group)
            else:
                group.collectives = seq = group.collectives + 1
                peer, tag, any_source = NO_RANK, 0, False
            flags = FLAG_ANY_SOURCE if any_source else 0
            status = _STARTED
            if device != "cpu" and not group.ends_on_host(device):
                flags, status = flags | FLAG_DEVICE, _ENQUEUED
            site, continues = site_of(sys._getframe(1), self.steps)
            if not continues:
                local.correlation = ring.head + 1
            ndim, shape = shape_of(shaped)
            shapes = shape_hash(op, args, shaped)
            if coalesced and shapes and shapes not in self._shapes:
                self._note_shapes(shapes, shaped)
            asynchronous = async_code(op, args)
            size = message_bytes(op, args, ins, outs, group.rank, group.size)
            now = time.monotonic_ns()
            record = ring.issue(
                (
                    seq,
                    now,
                    now if status == _STARTED else 0,
                    0,
                    size,
                    ins.bytes,
                    outs.bytes,
                    local.correlation,
                    self.steps,
                    _NAN,
                    tag,
                    *shape,
                    group.id,
                    site,
                    get_native_id(),
                    NO_RANK if root_at is None else args[root_at],
                    peer,
                    0,
                    variant,
                    shapes,
                    min(len(shaped), 65535),
                    index,
                    p2p,
                    code,
                    dtype,
                    reduce_code(op, args),
                    _DEVICE_CODES.get(device, 0),
                    asynchronous,
                    status,
                    flags,
                    ndim,
                )
            )
            if waker.wanted == 2:
                waker.wake(2)
            is_first, group.is_met = not group.is_met, True
            block = local.correlation
            return Issued(
                record, group, tag, flags, p2p, is_first, block, device, asynchronous == 0
            )

        return issue

    def _note_shapes(self, shapes: int, tensors: list[torch.Tensor]) -> None:
        """Write down how many elements each tensor of a coalesced op has, once per shape hash."""
        if len(self._shapes) < _MAX_SHAPES:
            self._shapes.add(shapes)
            self._ring.numels(shapes, [tensor.numel() for tensor in tensors[:_MAX_NUMELS]])


def _no_site(frame: FrameType, moment: int) -> tuple[int, bool]:
    return 0, False


Interposer = Callable[[Op, Numbered, Callable[..., Any], tuple[Any, ...]], Any]


class FallbackCapture:
    """Records through Python kernels; see ``Capture`` for the interface."""

    name = "python"
    make_statuses = None  # they are made column by column

    def __init__(self, ring: PythonRing, call_sites: bool = True) -> None:
        self._ring = ring
        self._groups = Groups(ring)
        self._waker = Waker()
        sites = CallSites(ring.site) if call_sites else None
        self._issuer = Issuer(ring, self._groups, sites, self._waker)
        self._completion = Completion(ring, self._waker)
        self.recording = False
        # For planted faults: called in place of an op, with what issues and records it.
        self.interposer: Interposer | None = None
        self._recorders: dict[str, Recorder] = {}

    def start(self) -> None:
        """Record every c10d op from now on."""
        ops = c10d_ops()
        for op in ops:
            self._recorders[op.name] = self._recorder(op, self._ring.string(op.name))
        self.recording = True
        record_with(self._recorders, ops)

    def stop(self) -> None:
        """Record no new ops. Ops in flight still write their ends."""
        self.recording = False
        pass_on(self._recorders)
        self._recorders = {}  # they refer to this capture, and it to the ring
        self._ring.close()
        release_dropped(len(work_proxies))

    def take_device_ops(self) -> list[DeviceOp]:
        """Return the ops on devices that were issued since the last call.

        This is called about once a second, so dropped Works are released here as well.
        """
        release_dropped(len(work_proxies))
        return self._completion.take_device_ops()

    def start_device_ops(self, records: list[int], time_ns: int) -> None:
        """Note that devices have started ops by ``time_ns``; see ``PythonRing.start``."""
        for record in records:
            self._ring.start(record, time_ns)

    def take_ended_device_ops(self) -> list[int]:
        """Return the records that futures of Works have ended since the last call."""
        return self._completion.take_ended_device_ops()

    def end_device_ops(self, records: list[int], time_ns: int) -> None:
        """End records that have not ended: completed at ``time_ns``, abandoned if that is 0."""
        self._completion.end_device_ops(records, time_ns)

    @contextlib.contextmanager
    def reading_status(self) -> Iterator[bool]:
        """Yield False while a group's first op is under way: see native/kernels.h.

        No other first op can begin meanwhile, because the reader holds the GIL.
        """
        yield self._completion.first_ops == 0

    def forget(self) -> None:
        """Record nothing more: this is a forked child, and the ring is its parent's."""
        self.recording = False
        pass_on()
        self._waker.wanted = 0

    def note_exit_status(self, path: Path, fields: str) -> None:
        """Do nothing: Python does not tell a process its own exit status."""

    def drained(self) -> bool:
        """Whether every record has its end."""
        return self._ring.done == self._ring.head

    def counts(self) -> tuple[int, int]:
        """Return how many records were issued, and how many have ended."""
        return self._ring.head, self._ring.done

    def add_group(self, group: Group, me: int) -> int:
        """Announce a group, and return its id; ``me`` is this rank's place in it."""
        return self._groups.announce(group)

    def add_line(self, site: int, text: str) -> None:
        """Add the source line of a call site."""
        self._ring.line(site, text)

    def mark(self, marks: Marks | None) -> None:
        """Say that there will be no marks: the native recorder alone calls a tool."""
        if marks is not None:
            warn_once(
                "no NVTX marks: they need the native recorder, and this job is recorded in Python; "
                "rankcall doctor says why, and what to do"
            )

    def learn_spans(self, marks: Marks) -> None:
        """Do nothing: see ``mark``."""

    def look(self, thread: int) -> Look:
        """Know nothing: see ``Capture.look``.

        A Python thread that walks the frames of another one keeps their objects alive meanwhile.
        """
        return Look()

    def step(self) -> None:
        """Count an optimizer step."""
        self._issuer.steps += 1
        put(self._ring.map, "step", self._issuer.steps)

    def sleep(self, fd: int, wanted: int) -> None:
        """Have the eventfd written at the next end (1), or the next start or end (2)."""
        self._waker.arm(fd, wanted)

    def _recorder(self, op: Op, variant: int) -> Recorder:
        redispatch = op.overload.redispatch
        issue, completion = self._issuer.of(op, variant), self._completion
        arrange = completion.arrange

        def intercepted(keys: Any, *args: Any, **kwargs: Any) -> Any:
            if self.interposer is not None:
                through = functools.partial(recorded, keys, **kwargs)
                return self.interposer(op, number_ahead(op, args, self._groups), through, args)
            return recorded(keys, *args, **kwargs)

        def recorded(keys: Any, *args: Any, **kwargs: Any) -> Any:
            issued = None
            if self.recording:
                try:
                    issued = issue(args)
                except Exception:  # an unforeseen argument: the user's op goes on, unrecorded
                    issued = None
            if issued is None:
                return redispatch(keys & KEYS_AFTER, *args, **kwargs)
            if issued.first:
                completion.first_ops += 1
            try:
                result = redispatch(keys & KEYS_AFTER, *args, **kwargs)
            except BaseException as error:
                completion.failed(issued, error)
                raise
            finally:
                if issued.first:
                    completion.first_ops -= 1
            return arrange(op, issued, result)

        return intercepted


# Records an op and issues it. Its arguments are the dispatch keys and the op's arguments.
Recorder = Callable[..., Any]
