"""Record that an op is issued: the twin of native/issue.h."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable
from threading import get_native_id
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensor

from rankcall.capture.installed import DTYPE_CODES
from rankcall.capture.public import public_name
from rankcall.capture.python.callsites import CallSites
from rankcall.capture.python.ends import Issued
from rankcall.capture.python.groups import Groups, GroupState, number_p2p
from rankcall.capture.python.marks import PythonMarks
from rankcall.capture.python.ops import (
    Op,
    async_code,
    in_and_out,
    message_bytes,
    reduce_code,
    shape_hash,
    shape_of,
    sizes_at,
)
from rankcall.capture.python.wake import Waker
from rankcall.record import DEVICE_TYPES, FLAG_ANY_SOURCE, FLAG_DEVICE, NO_RANK, STATUSES
from rankcall.ring.writer import PythonRing

_ENQUEUED, _STARTED = STATUSES.index("enqueued"), STATUSES.index("started")
_MAX_SHAPES, _MAX_NUMELS = 1024, 1024  # of coalesced ops
_DEVICE_CODES = {name: code for code, name in enumerate(DEVICE_TYPES)}
_NAN = math.nan


class _PerThread(threading.local):
    """What is kept per thread."""

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
        self.marks: PythonMarks | None = None  # of the tool that is told

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
                if device == "meta" or isinstance(first, FakeTensor):
                    return None
                dtype = DTYPE_CODES.get(first.dtype, 0)
            group = state_of(unbox(args[group_at]))
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
            size = message_bytes(op, args, ins, outs, group.rank, group.size)
            now = time.monotonic_ns()
            record = ring.issue((
                seq, now, now if status == _STARTED else 0, 0,
                size, ins.bytes, outs.bytes,
                local.correlation, self.steps, _NAN, tag, *shape,
                group.id, site, get_native_id(), NO_RANK if root_at is None else args[root_at],
                peer, 0, variant, shapes, min(len(shaped), 65535), index,
                p2p, code, dtype, reduce_code(op, args), _DEVICE_CODES.get(device, 0),
                async_code(op, args), status, flags, ndim,
            ))  # fmt: skip
            if self.marks is not None:
                root = NO_RANK if root_at is None else args[root_at]
                fields = {"op": code, "seq": seq, "peer": peer, "dtype": dtype, "device": index,
                          "root": root, "sizes": _sizes(op, size, shaped)}  # fmt: skip
                self._mark(op, record, group, site, fields)
            if waker.wanted == 2:
                waker.wake(2)
            is_first, group.is_met = not group.is_met, True
            return Issued(record, group, tag, flags, p2p, is_first, local.correlation)

        return issue

    def _note_shapes(self, shapes: int, tensors: list[torch.Tensor]) -> None:
        """Write down how many elements each tensor of a coalesced op has, once per shape hash."""
        if len(self._shapes) < _MAX_SHAPES:
            self._shapes.add(shapes)
            self._ring.numels(shapes, [each.numel() for each in tensors[:_MAX_NUMELS]])

    def _mark(
        self, op: Op, record: int, state: GroupState, site: int, fields: dict[str, Any]
    ) -> None:
        """Tell the tool of an op that is being issued."""
        marks = self.marks
        if marks is None:  # switched off meanwhile
            return
        fields |= {"correlation": self._local.correlation, "step": self.steps}
        where = self._call_sites.known(site) if self._call_sites is not None else None
        try:
            marks.issued(record, fields, public_name(op.name), where, state.group, state.rank)
        except Exception:  # the tool failed; the op is recorded already, and its end must be, too
            pass


def _no_site(frame: FrameType, moment: int) -> tuple[int, bool]:
    return 0, False


def _sizes(op: Op, size: int, tensors: list[torch.Tensor]) -> list[int]:
    """Return a message's bytes, tensor by tensor where the op is a coalesced one."""
    if "coalesced" not in op.name or len(tensors) < 2:
        return [size]
    total = sum(each.numel() for each in tensors) or 1
    return [size * each.numel() // total for each in tensors]
