"""The native recorder: C++ kernels in front of every c10d op (see kernels.h)."""

from __future__ import annotations

import contextlib
import json
import mmap
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from rankcall.capture import installed
from rankcall.capture.device_status import DeviceOp, device_times_wanted
from rankcall.capture.marks import Marks, span_of
from rankcall.capture.native.build import load_recorder
from rankcall.capture.notices import say
from rankcall.capture.public import BATCH, OBJECT_CALLS, PICKLES, public_name
from rankcall.record import DTYPES, OPS, op_of_variant
from rankcall.ring.layout import ENTRY_LINE, Geometry
from rankcall.ring.tables import Group
from rankcall.ring.writer import encode_group, encode_line

_MOST_GROUPS = 4096  # whose hosts marks know; a program may make groups without end
_module: ModuleType | None = None


def recorder_module() -> ModuleType:
    """Return the loaded recorder, building it first if need be. Raises ``CaptureUnavailable``."""
    global _module
    if _module is None:
        _module = load_recorder()
    return _module


class NativeCapture:
    """Records through the native kernels.

    The first ``start`` of the process installs them and they stay. After ``stop`` they pass ops on;
    the ring stays in use until ``drained``, because ops in flight still write their ends.
    """

    name = "native"

    def __init__(self, ring: mmap.mmap, geometry: Geometry, call_sites: bool = True) -> None:
        self._native = recorder_module()
        sizes = (
            geometry.capacity,
            geometry.inflight_capacity,
            geometry.tables_bytes,
            geometry.inflight_offset,
            geometry.tables_offset,
            geometry.records_offset,
        )
        self._recorder: Any = self._native.create(
            ring,
            sizes,
            list(installed.DTYPE_CODES.items()),
            installed.skipped_folders(),
            call_sites,
            device_times_wanted(),
        )
        self._groups: dict[int, Group] = {}
        self._marks: Marks | None = None

    @property
    def has_call_sites(self) -> bool:
        """Whether this Python's frames can be read."""
        return bool(self._native.CALL_SITES)

    def start(self) -> None:
        """Record every c10d op from now on."""
        if installed.must_install(self.name):
            codes = {name: OPS.index(op_of_variant(name)) for name in self._native.ops()}
            self._native.install(codes)
        self._native.start(self._recorder)

    def stop(self) -> None:
        """Record no new ops. Ops in flight still write their ends."""
        self._native.stop(self._recorder)

    def take_device_ops(self) -> list[DeviceOp]:
        """Return the ops on devices that were issued since the last call."""
        if self._native.device_time_failures(self._recorder):
            say("device times are incomplete: the device refused to record or read some events")
        return [DeviceOp(*each) for each in self._native.take_device_ops(self._recorder)]

    def end_device_ops(self, records: list[int], time_ns: int) -> None:
        """End records of ops on devices: completed at ``time_ns``, abandoned if that is 0."""
        self._native.end_device_ops(self._recorder, records, time_ns)

    @contextlib.contextmanager
    def reading_status(self) -> Iterator[bool]:
        """Keep first ops of groups waiting for a moment; yields False if one is under way."""
        try:
            yield bool(self._native.reading_status(True))
        finally:
            self._native.reading_status(False)

    def forget(self) -> None:
        """Do nothing: the recorder has switched itself off at the fork."""

    def drained(self) -> bool:
        """Whether every record of a stopped recorder has its end."""
        return bool(self._native.drained(self._recorder))

    def counts(self) -> tuple[int, int]:
        """Return how many records were issued, and how many have ended."""
        issued, ended = self._native.counts(self._recorder)
        return issued, ended

    def sleep(self, fd: int, wanted: int) -> None:
        """Have the eventfd written at the next end (1), or the next start or end (2)."""
        self._native.sleep(fd, wanted)

    @property
    def make_statuses(self) -> Callable[..., list[Any]]:
        """Make what hooks get of a batch of events: see statuses.h."""
        made: Callable[..., list[Any]] = self._native.statuses
        return made

    def add_group(self, group: Group, me: int) -> int:
        """Announce a group, and return its id; ``me`` is this rank's place in it."""
        number = self._native.add_group(self._recorder, group.name, encode_group(group))
        ranks = list(group.ranks)
        self._native.group_text(
            self._recorder, number, json.dumps(group.label), json.dumps(ranks), ranks, me
        )
        self._groups[number] = group
        if len(self._groups) > _MOST_GROUPS:
            del self._groups[next(iter(self._groups))]
        if self._marks is not None:
            self._native.group_span(self._recorder, number, *span_of(self._marks, group))
        return int(number)

    def add_line(self, site: int, text: str) -> None:
        """Add what the source says at a call site."""
        self._native.append(self._recorder, ENTRY_LINE, encode_line(site, text))

    def mark(self, marks: Marks | None) -> None:
        """Have a tool told of each op as it is issued, from now on; None ends that."""
        self._marks = marks
        if marks is None:
            self._native.marks_off(self._recorder)
            return
        self.learn_spans(marks)
        variants = self._native.ops()
        self._native.marks(
            self._recorder, tuple(marks.functions), marks.about(), list(DTYPES),
            variants, [public_name(variant) for variant in variants], list(OBJECT_CALLS), BATCH,
            PICKLES, marks.span is not None,
        )  # fmt: skip

    def learn_spans(self, marks: Marks) -> None:
        """Ask again which members of which groups are on other hosts."""
        for number, group in list(self._groups.items()):
            self._native.group_span(self._recorder, number, *span_of(marks, group))

    def step(self) -> None:
        """Count an optimizer step."""
        self._native.step(self._recorder)
