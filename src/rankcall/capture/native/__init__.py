"""The native recorder: C++ kernels in front of every c10d op (see recorder.cpp)."""

from __future__ import annotations

import mmap
from types import ModuleType
from typing import Any

from rankcall.capture.native.build import load_recorder
from rankcall.record import OPS, op_of_variant
from rankcall.ring.layout import Geometry

_module: ModuleType | None = None


def recorder_module() -> ModuleType:
    """Return the loaded recorder, building it first if need be. Raises ``CaptureUnavailable``."""
    global _module
    if _module is None:
        _module = load_recorder()
    return _module


class NativeCapture:
    """Records through the native kernels.

    ``start`` installs them and ``stop`` takes them out; the ring stays in use until ``drained``,
    because ops in flight still write their ends.
    """

    name = "native"

    def __init__(self, ring: mmap.mmap, geometry: Geometry, call_sites: bool = True) -> None:
        from rankcall.capture.callsites import skipped_folders
        from rankcall.capture.python import dtype_codes

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
            ring, sizes, dtype_codes(), skipped_folders(), call_sites
        )

    @property
    def has_call_sites(self) -> bool:
        """Whether this Python's frames can be read."""
        return bool(self._native.CALL_SITES)

    def start(self) -> None:
        """Install a kernel in front of every c10d op."""
        codes = {name: OPS.index(op_of_variant(name)) for name in self._native.ops()}
        self._native.start(self._recorder, codes)

    def stop(self) -> None:
        """Take the kernels out again. Ops in flight still write their ends."""
        self._native.stop(self._recorder)

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

    def add_group(self, name: str, payload: bytes) -> None:
        """Announce a group under torch's name for it."""
        self._native.add_group(self._recorder, name, payload)

    def step(self) -> None:
        """Count an optimizer step."""
        self._native.step(self._recorder)
