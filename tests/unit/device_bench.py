"""A back end, a capture and a clock that a test sets, for ``capture/device_status.py``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from rankcall.capture.device_ops import NO_NUMBER, DeviceOp, GroupStatus
from rankcall.capture.device_status import DeviceStatus
from rankcall.record import END_UNKNOWN, START_UNKNOWN

SECOND = 1_000_000_000


class Backend:
    """A back end for a device; ``uid`` is its number in the status."""

    def __init__(self, uid: int | None) -> None:
        if uid is not None:
            self.uid = uid


class Device:
    type = "cuda"


class ProcessGroup:
    """A group whose ops run on one kind of device."""

    _device_types = (Device(),)

    def __init__(self, uid: int | None) -> None:
        self._backend = Backend(uid)

    def _get_backend(self, device: Device) -> Backend:
        return self._backend


class Bench:
    """A capture, a clock and a status that tests set."""

    def __init__(self) -> None:
        self.now_ns = 10 * SECOND
        self.enqueued = 0  # in every group
        self.completed: dict[int, int] = {}
        self.started = NO_NUMBER  # in every group
        self.starts: dict[
            int, int
        ] = {}  # by record: 1 begun, 0 not begun, -1 not known, -2 nor whether it is over
        self.may_read = True
        self.reads = 0
        self.ends: list[tuple[int, bool]] = []  # record, and whether it completed
        self._issued: list[DeviceOp] = []
        self._ended: list[int] = []
        self.status = DeviceStatus(self, self._read, lambda: self.now_ns)

    def issue(
        self,
        record: int,
        number: int = NO_NUMBER,
        p2p: bool = False,
        group: int = 1,
        block: int | None = None,
        **more: Any,
    ) -> None:
        block = record if block is None else block
        self._issued.append(DeviceOp(record, group, number, p2p, block, **more))

    def end(self, *records: int) -> None:
        """Have the futures of these ops end their records."""
        self._ended += records

    def look(self, completed: int | None = None) -> list[tuple[int, bool]]:
        """Poll with this number completed last by group 1's back end; return the ends."""
        if completed is not None:
            self.completed[7] = completed
        self.ends = []
        self.now_ns += SECOND
        self.status.poll()
        return self.ends

    def _read(self) -> dict[int, GroupStatus]:
        self.reads += 1
        return {
            uid: GroupStatus(self.enqueued, last, self.started)
            for uid, last in self.completed.items()
        }

    def take_device_ops(self) -> list[DeviceOp]:
        taken, self._issued = self._issued, []
        return taken

    def take_ended_device_ops(self) -> list[int]:
        taken, self._ended = self._ended, []
        return taken

    def end_device_ops(self, records: list[int], time_ns: int) -> None:
        assert time_ns in (0, self.now_ns)
        assert END_UNKNOWN not in [self.starts.get(record) for record in records if time_ns]
        self.ends += [(record, time_ns != 0) for record in records]

    def start_device_ops(self, records: list[int], time_ns: int) -> None:
        assert time_ns in (0, START_UNKNOWN, END_UNKNOWN, self.now_ns)
        self.starts.update(dict.fromkeys(records, min(time_ns, 1)))

    @contextlib.contextmanager
    def reading_status(self) -> Iterator[bool]:
        yield self.may_read
