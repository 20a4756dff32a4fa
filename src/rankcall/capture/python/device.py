"""When ops began and ended on a device, for the Python capture: the twin of native/device.h."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rankcall.record import STATUSES
from rankcall.ring.writer import PythonRing

_COMPLETED = STATUSES.index("completed")
_POLL_SECONDS = 0.001
_RENEW_NS = 10_000_000_000


@dataclass
class Span:
    """The events around one op."""

    device: torch.device
    begin: torch.Event
    end: torch.Event
    index: int = -1
    status: int = _COMPLETED
    started_ns: int = 0


class DeviceTimes:
    """Turns pairs of device events into host times, polling from a thread, never synchronising.

    Any failure switches device times off for the process; recording goes on without them.
    """

    def __init__(self, ring: PythonRing, notify: Callable[[int], None]) -> None:
        self._ring = ring
        self._notify = notify
        self._broken = False
        self._watched: list[Span] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._references: dict[torch.device, tuple[torch.Event, int]] = {}

    def begin(self, device: torch.device) -> Span | None:
        """Record the first event on the caller's stream; None where that cannot be."""
        if self._broken:
            return None
        try:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return None
            begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
            begin.record(torch.accelerator.current_stream(device))
            return Span(device, begin, end)
        except Exception:
            self._broken = True
            return None

    def end(self, span: Span, status: int) -> bool:
        """Record the second event on the caller's stream and watch both; False on failure."""
        span.status = status
        try:
            span.end.record(torch.accelerator.current_stream(span.device))
        except Exception:
            self._broken = True
            return False
        with self._changed:
            self._watched.append(span)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=self._poll, name="rankcall-device", daemon=True
                )
                self._thread.start()
            self._changed.notify()
        return True

    def close(self) -> None:
        """Stop polling."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout=2)

    def _poll(self) -> None:
        while True:
            with self._changed:
                while not self._watched and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                spans, self._watched = self._watched, []
            waiting = [span for span in spans if not self._settled(span)]
            with self._changed:
                self._watched += waiting
                self._changed.wait(_POLL_SECONDS)

    def _settled(self, span: Span) -> bool:
        try:
            if not span.started_ns and span.begin.query():
                span.started_ns = self._host_ns(span.begin, span.device)
                self._ring.start(span.index, span.started_ns)
                self._notify(2)
            if not span.started_ns or not span.end.query():
                return False
            device_ms = span.begin.elapsed_time(span.end)
        except Exception:
            self._broken = True
            self._ring.finish(span.index, status=span.status, completed_ns=time.monotonic_ns())
        else:
            ended = span.started_ns + int(device_ms * 1e6)
            self._ring.finish(
                span.index, status=span.status, completed_ns=ended, device_ms=device_ms
            )
        self._notify(1)
        return True

    def _host_ns(self, event: torch.Event, device: torch.device) -> int:
        reference = self._references.get(device)
        if reference is None or time.monotonic_ns() - reference[1] > _RENEW_NS:
            anchor = torch.Event(device, enable_timing=True)
            anchor.record(torch.Stream(device))
            anchor.synchronize()  # only this thread waits, for a stream of its own
            reference = self._references[device] = (anchor, time.monotonic_ns())
        return reference[1] + int(reference[0].elapsed_time(event) * 1e6)
