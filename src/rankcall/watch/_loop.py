"""The watcher's thread: look at the own ring, act for the node where it leads, tell the user."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable

from rankcall import _stacks, background
from rankcall.analysis.verdicts.finding import Finding
from rankcall.capture import session
from rankcall.capture.recording import Recording
from rankcall.capture.tail import RingTail
from rankcall.record import FLAG_ABANDONED
from rankcall.ring.header import Header
from rankcall.ring.writer import put
from rankcall.watch import _verdict
from rankcall.watch._judge import Judge
from rankcall.watch._node import Node

logger = logging.getLogger("rankcall.watch")

ABORT_STATUS = 124  # as timeout(1) has it
_TICK_S = 0.25
_OWN_FAILURES = 10
_OWN_FAILURE_S = 1.0

OnHang = str | Callable[[list[Finding]], object]


class Watcher:
    """Watches one rank on a daemon thread, and its node where it is the lowest that can."""

    def __init__(self, recording: Recording, hang_after: float, on_hang: OnHang) -> None:
        assert recording.run_dir is not None
        self._recording = recording
        self._hang_after = hang_after
        self._on_hang = on_hang
        self._tail = RingTail(recording.ring, recording.geometry)
        self._node = Node(recording)
        self._judge = Judge(recording.run_dir, hang_after)
        self._stopping = threading.Event()
        self._tick_s = min(_TICK_S, hang_after / 8)
        self._issued: dict[int, tuple[int, float]] = {}  # of each rank: how many calls, since when
        self._next_asked = 0.0
        self._verdicts = 0  # that this rank's own look led to
        # Verdicts of the node's ranks that were acted on, or came before this one watched.
        self._seen = self._told(self._node.headers())
        self.thread = threading.Thread(target=self._run, name="rankcall-watch", daemon=True)

    def start(self) -> None:
        """Start the thread in place of the watcher before, if there is one."""
        global _current
        before, _current = _current, self
        if before is not None:
            before.end()
        _register_once()
        _stacks.register(self._recording.ring)
        self.thread.start()

    def stop(self) -> None:
        """End the thread and give up the recording, unless another watcher has taken over."""
        global _current
        self.end()
        if _current is self:
            _current = None
            _stacks.unregister(self._recording.ring)
            session.drop("watch")

    def end(self) -> None:
        """End the thread; one that stands in a store that does not answer is left behind."""
        self._stopping.set()
        if self.thread is not threading.current_thread():
            background.join(self.thread, 2.0)

    # --- on its thread ---

    def _run(self) -> None:
        failures = 0
        while failures < _OWN_FAILURES and not self._stopping.wait(self._tick_s):
            try:
                self._turn()
            except Exception as error:
                failures += 1
                over = "it goes on" if failures < _OWN_FAILURES else "it stops"
                logger.warning("the hang watcher failed; %s", over, exc_info=error)
                self._stopping.wait(_OWN_FAILURE_S)

    def _turn(self) -> None:
        put(self._recording.ring, "overdue_ns", self._overdue_ns())
        headers, rank = self._node.headers(), self._recording.rank()
        self._notice(headers)
        if rank not in headers or not self._node.leads(headers, rank):
            return
        first_ns = min((h.overdue_ns for h in headers.values() if h.overdue_ns), default=0)
        now = time.monotonic()
        if not first_ns:
            self._judge.rest()
        asked = self._is_asked(headers, now)
        due = first_ns != 0 and now >= self._judge.next_look
        if (asked or due) and self._judge.look(headers, first_ns or time.monotonic_ns(), asked):
            self._verdicts += 1
            put(self._recording.ring, "verdicts", self._verdicts)

    def _overdue_ns(self) -> int:
        """Return when the oldest call was issued that is in flight for too long; 0 without one."""
        rows = self._tail.open()
        rows = rows[rows["flags"] & FLAG_ABANDONED == 0]
        if not len(rows):
            return 0
        oldest = int(rows["enqueued_ns"].min())
        return oldest if time.monotonic_ns() - oldest >= self._hang_after * 1e9 else 0

    def _is_asked(self, headers: dict[int, Header], now: float) -> bool:
        """Tell whether another node has asked for a verdict; only seldom is that looked for.

        Once in ``hang_after`` while the node's ranks issue calls, and every second when one has
        issued none for half of that, or until there is a store: so a healthy job's store hears
        next to nothing.
        """
        for rank, header in headers.items():
            if self._issued.get(rank, (-1, 0.0))[0] != header.head:
                self._issued[rank] = header.head, now
        world = max(header.world_size for header in headers.values())
        if len(headers) >= world:
            return False
        quiet = any(now - self._issued[rank][1] > self._hang_after / 2 for rank in headers)
        if now < self._next_asked and not (quiet and self._next_asked - now > 1.0):
            return False
        asked, soon = self._judge.asked(headers), min(1.0, self._hang_after / 4)
        seldom = self._judge.signed_on and not quiet
        self._next_asked = now + (self._hang_after if seldom else soon)
        return asked

    # --- telling ---

    @staticmethod
    def _told(headers: dict[int, Header]) -> int:
        return sum(header.verdicts for header in headers.values())

    def _notice(self, headers: dict[int, Header]) -> None:
        """Do what the user wants done where the node has come to a verdict since the last turn."""
        told = self._told(headers)
        if told <= self._seen:
            return
        self._seen = told
        if self._on_hang == "abort":
            put(self._recording.ring, "aborted_ns", time.monotonic_ns())
            _abort(self._recording.rank())
        verdicts = self._judge.told()
        if verdicts and callable(self._on_hang):
            try:
                self._on_hang(_verdict.findings_of(verdicts[-1]))
            except Exception:
                logger.exception("on_hang failed; the watcher goes on")


def _abort(rank: int) -> None:
    """End this process at once: its main thread may never run again."""
    print(
        f"rankcall: rank {rank} ends because the job hangs (on_hang=abort)",
        file=sys.stderr,
        flush=True,
    )
    os._exit(ABORT_STATUS)


_current: Watcher | None = None
_registered = False


def _register_once() -> None:
    global _registered
    if not _registered:
        _registered = True
        background.at_exit(_at_exit)
        os.register_at_fork(after_in_child=_in_forked_child)


def _at_exit() -> None:
    if _current is not None:
        _current.stop()


def _in_forked_child() -> None:
    global _current
    _current = None
