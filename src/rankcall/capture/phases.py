"""Phases that a program declares to be long, written into its ring for every reader to see."""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import time
from collections.abc import Iterator

from rankcall import durations
from rankcall.durations import Duration
from rankcall.ring.layout import FOREVER_NS
from rankcall.ring.writer import put, put_text

_lock = threading.RLock()
_phases: list[tuple[int, str]] = []  # the deadline of each (CLOCK_MONOTONIC, ns), and its reason
_ring: mmap.mmap | None = None  # of the recording that is on


@contextlib.contextmanager
def expect(seconds: Duration, what: str) -> Iterator[None]:
    """Declare that this rank may be silent for a while: a checkpoint, a compilation.

    Until that time is over, or the block is left, neither the watcher nor ``rankcall diagnose``
    calls this rank hung, nor the ranks that wait for it. If it takes longer, they report ``what``.
    Use it on the ranks that do the work, as a context manager or a decorator. Phases may nest and
    overlap. It costs microseconds, and does nothing if recording is off.

    Args:
        seconds: For how long, in seconds or as a ``timedelta``. ``math.inf`` declares that this
            rank waits for work, such as the next request: while all ranks wait, they are idle.
        what: What takes long, for the verdict.

    Raises:
        TypeError: ``seconds`` is neither a number nor a ``timedelta``.
        ValueError: ``seconds`` is not positive, or ``what`` is empty.
    """
    silent_s = durations.seconds(seconds, "seconds")
    if not what.strip():
        raise ValueError("expect() takes a text that says what takes long")
    until = FOREVER_NS if silent_s == math.inf else time.monotonic_ns() + int(silent_s * 1e9)
    phase = until, what
    with _lock:
        _phases.append(phase)
        _publish()
    try:
        yield
    finally:
        with _lock:
            _phases.remove(phase)
            _publish(time.monotonic_ns(), what)


def publish_to(ring: mmap.mmap | None) -> None:
    """Write the phases into this ring from now on; None if recording is off."""
    global _ring
    with _lock:
        _ring = ring
        _publish()


def _publish(ended_ns: int = 0, ended: str = "") -> None:
    """Write the phase that ends last into the ring, or when the last phase ended.

    A reader gives a rank that waited through a phase its usual patience, from the end of the phase.
    """
    until, what = max(_phases, default=(ended_ns, ended))
    if until and _ring is not None:
        put_text(_ring, "expect_what", what)
        put(_ring, "expect_until_ns", until)


def forget() -> None:
    """Declare nothing: this is a forked child."""
    global _lock, _ring
    _lock = threading.RLock()
    _ring = None
    _phases.clear()
