"""Phases that a program declares to take long: kept in its ring, where every reader finds them."""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import time
from collections.abc import Iterator

from rankcall.ring.writer import put, put_text

_lock = threading.RLock()
_phases: list[tuple[int, str]] = []  # when each ends, CLOCK_MONOTONIC ns, and what it is


@contextlib.contextmanager
def expect(seconds: float, what: str) -> Iterator[None]:
    """Declare that this rank may be silent for ``seconds``: a checkpoint, a compile.

    Until they are over, or the block is left, neither the watcher nor ``rankcall diagnose`` calls
    this rank, or who waits for it, hung; ``what`` is said where it takes longer. Use it on the
    ranks that do the work; phases may nest and overlap; also a decorator. Costs microseconds,
    and does nothing where nothing is recorded. Raises ``ValueError`` for no time or no words.
    """
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ValueError(f"expect() takes a number of seconds above 0; got {seconds}")
    if not what.strip():
        raise ValueError("expect() takes words for what it is that takes long")
    phase = time.monotonic_ns() + int(seconds * 1e9), what
    with _lock:
        _phases.append(phase)
        publish()
    try:
        yield
    finally:
        with _lock:
            _phases.remove(phase)
            publish(time.monotonic_ns(), what)


def publish(ended_ns: int = 0, ended: str = "", ring: mmap.mmap | None = None) -> None:
    """Write what holds now into the ring, or when the last phase ended.

    A reader gives who waited through a phase its usual patience from the end of it on.
    """
    if ring is None:
        from rankcall.capture import session

        recording = session.current()
        if recording is None:
            return
        ring = recording.ring
    until, what = max(_phases, default=(ended_ns, ended))
    if until:
        put_text(ring, "expect_what", what)
        put(ring, "expect_until_ns", until)


def forget() -> None:
    """Declare nothing: this is a forked child."""
    global _lock
    _lock = threading.RLock()
    _phases.clear()
