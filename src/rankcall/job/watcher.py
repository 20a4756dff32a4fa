"""The watcher's thread: read the rank's ring, act for the node if it leads, react to verdicts.

``Node`` is a node as one of its ranks sees it: the rings in one folder, and which rank leads.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from rankcall import background
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.no_progress import STILL_SHARE
from rankcall.analysis.verdicts.verdict import Verdict
from rankcall.capture import session
from rankcall.capture.recording import Recording
from rankcall.job.ending import end_worker, workers_to_end
from rankcall.job.endless import CallNumbers, EndlessCalls
from rankcall.job.judge import Judge, store_port
from rankcall.job.news import leaves_open
from rankcall.job.node import Node
from rankcall.job.resumption import Resumption
from rankcall.job.sealing import ADVICE
from rankcall.job.standstill import Standstill
from rankcall.record import FLAG_ABANDONED
from rankcall.ring.follower import LiveTables, RingView
from rankcall.ring.layout import Header
from rankcall.ring.writer import put
from rankcall.run.own_stacks import register_stack_dump, unregister_stack_dump

logger = logging.getLogger("rankcall.watch")

ABORT_STATUS = 124  # the same as that of timeout(1)
ENDS = ("abort", "recover")  # what ``on_hang`` says if a verdict ends ranks
# With ``recover``, torchrun ends the other ranks as soon as it sees that one has ended. A rank that
# still runs so many seconds later ends itself: its handler of SIGTERM may wait for the call that
# hangs, and torchrun then waits for 30 s. One that has left that call may be saving its state, and
# gets these 30 s.
GRACE_S = 5.0
# As soon as a worker ends, torchrun also ends those of other nodes, whose leaders poll the verdict
# and keep it with their stacks at this moment. They get so long.
_OTHERS_KEEP_S = 2.0
_TICK_S = 0.25  # a hang is noticed so much later than its threshold, at most
# A watcher that fails may do so because of one moment, for example a file that was moved just then.
# One that fails again and again must not fill the log of the job.
_OWN_FAILURES = 10
_OWN_FAILURE_S = 1.0

OnHang = str | Callable[[list[Finding]], object]


class Watcher:
    """Watches one rank on a daemon thread, and its whole node if no lower rank can."""

    def __init__(self, recording: Recording, hang_after: float, on_hang: OnHang) -> None:
        self._recording = recording
        self._hang_after = hang_after
        self._on_hang = on_hang
        self._records = RingView(recording.ring, recording.geometry)
        self._calls = CallNumbers(LiveTables(recording.ring, recording.geometry))
        self._endless = EndlessCalls()
        self._standstill = Standstill(recording.ring, store_port)
        self._resumption = Resumption(self._records)
        self._last_head = 0  # of this rank's records, at the last turn
        self._is_early = False  # the newest verdict of this rank needed no patience
        self._node = Node(recording)
        self._judge: Judge | None = None  # until the recording has its run
        self._stopping = threading.Event()
        self._tick_s = min(_TICK_S, hang_after / 8)
        # Of each rank: its calls, steps and RPCs, and when they last changed.
        self._issued: dict[int, tuple[tuple[int, str], float]] = {}
        self._next_asked = 0.0
        self._verdicts = 0  # that this rank gave
        self._react_until = float("-inf")  # a new verdict waits for so long to be confirmed
        self._end_at = float("inf")  # when this rank ends itself, if nothing ended it before
        self._overdue_at = float("-inf")  # when a call of this rank was overdue last
        self._was_overdue = False  # at the newest verdict
        # How many verdicts of the node's ranks this rank has reacted to, or were older than it.
        self._seen = 0
        put(recording.ring, "hang_after_ms", max(1, round(hang_after * 1e3)))
        self.thread = threading.Thread(target=self._run, name="rankcall-watch", daemon=True)

    def start(self) -> None:
        """Start the thread, and end the watcher before it, if there is one."""
        global _current
        before, _current = _current, self
        if before is not None:
            before.end()
        _register_once()
        register_stack_dump(self._recording.ring)
        self.thread.start()

    def stop(self) -> None:
        """End the thread and give up the recording, unless another watcher has taken over."""
        global _current
        self.end()
        if _current is self:
            _current = None
            unregister_stack_dump(self._recording.ring)
            session.drop("watch")

    def end(self) -> None:
        """End the thread; leave it behind if it waits for a store that does not answer."""
        self._stopping.set()
        if self.thread is not threading.current_thread():
            background.join(self.thread, 2.0)

    # The rest runs on the watcher's thread.

    def _run(self) -> None:
        failures = 0
        while failures < _OWN_FAILURES and not self._stopping.wait(self._pause_s()):
            try:
                self._turn()
            except Exception as error:
                failures += 1
                over = "it goes on" if failures < _OWN_FAILURES else "it stops"
                logger.warning("the hang watcher failed; %s", over, exc_info=error)
                self._stopping.wait(_OWN_FAILURE_S)

    def _pause_s(self) -> float:
        return self._endless.pause_s(time.monotonic(), self._tick_s)

    def _turn(self) -> None:
        self._note_calls()
        judge = self._judge or self._make_judge()
        if judge is None:
            return
        headers, rank = self._node.headers(), self._recording.rank()
        if rank in headers:
            self._note_standstill(headers[rank])
        self._notice(headers, judge)
        if time.monotonic() >= self._end_at and not self._has_left_call(headers.get(rank)):
            self._end_itself()
        if rank not in headers or not self._node.leads(headers, rank):
            return
        self._resumption.look(headers[rank])
        now = time.monotonic()
        self._note_issued(headers, now)
        overdue_ns = min((h.overdue_ns for h in headers.values() if h.overdue_ns), default=0)
        first_ns = overdue_ns or self._silent_since_ns(headers, now)
        if not first_ns:
            judge.rest()
        judge.look_back(headers)
        asked = self._is_asked(headers, now, judge)
        due = first_ns != 0 and now >= judge.next_look
        # A verdict that needed no patience ends no rank: a call is given the usual time for that.
        again = self._is_early and self._on_hang in ENDS
        if (asked or due) and judge.look(headers, first_ns or time.monotonic_ns(), asked, again):
            judge.keep_evidence(self._recording.identity.attempt)
            # The ranks of this node may have come to the call later than those of other nodes.
            self._react_until, self._is_early = time.monotonic() + self._hang_after, False
        elif self._endless.is_due(headers, now) and self._endless.look(judge, headers):
            judge.keep_evidence(self._recording.identity.attempt)
            self._is_early = True
            if self._on_hang not in ENDS:
                self._call_for_reaction(judge)
        if self._react_until > 0:
            self._react(judge, headers, overdue_ns, first_ns)
        judge.views.turn(headers, time.monotonic())

    def _make_judge(self) -> Judge | None:
        """Return the judge of this run; None until the recording belongs to one."""
        run_dir = self._recording.run_dir
        if run_dir is None:
            return None
        self._judge = Judge(run_dir, self._hang_after)
        self._seen = self._verdict_count(self._node.headers())
        return self._judge

    def _react(
        self, judge: Judge, headers: dict[int, Header], overdue_ns: int, first_ns: int
    ) -> None:
        """Call for a reaction to a new verdict, once this node's own rings confirm it.

        A verdict that other nodes take part in comes from the store, and any process that reaches
        the store may have written it. So it ends no rank as long as this node's own calls all end.
        If the ranks of this node are only silent, a verdict that is not verified ends none either,
        unless one of them waits for the job's store.

        Args:
            judge: The judge that has given the verdict.
            headers: The ring headers of this node's ranks.
            overdue_ns: When the oldest overdue call of this node was issued; 0: none is overdue.
            first_ns: The same, or since when no rank of this node has issued a call; 0: some have.
        """
        is_confirmed = overdue_ns != 0 or (
            first_ns != 0 and (judge.is_verified or self._waits_in_store(headers))
        )
        if is_confirmed or self._on_hang not in ENDS:
            self._react_until = float("-inf")
            if self._call_for_reaction(judge) and self._on_hang == "recover":
                self._recover(judge, headers)
        elif time.monotonic() >= self._react_until:
            self._react_until = float("-inf")
            if _may_abort(judge.verdicts()):
                print(self._why_not(judge), file=sys.stderr, flush=True)

    def _call_for_reaction(self, judge: Judge) -> bool:
        """Count a verdict, so that the node's ranks react to it; return whether it was counted.

        A verdict that no rank may be ended for is not counted: a rank that cannot read the verdicts
        ends if it is called.
        """
        if self._on_hang in ENDS and not _may_abort(judge.verdicts()):
            return False
        self._verdicts += 1
        put(self._recording.ring, "verdicts", self._verdicts)
        return True

    def _recover(self, judge: Judge, headers: dict[int, Header]) -> None:
        """End the workers of this node that the verdict says are to end, this one last.

        The evidence of the verdict has been kept. torchrun's agents restart all workers of the job
        as soon as one has ended.
        """
        verdicts = judge.verdicts()
        chosen = workers_to_end(verdicts[-1] if verdicts else None, headers)
        run_dir, rank = self._recording.run_dir, self._recording.rank()
        if chosen and len(headers) < chosen[0].world_size:
            self._stopping.wait(_OTHERS_KEEP_S)
        for header in (header for header in chosen if header.rank != rank):
            end_worker(header, run_dir)
        if any(header.rank == rank for header in chosen):
            self._end_itself()

    def _note_calls(self) -> None:
        """Write into the ring which call has been in flight for longest, and whether for too long.

        The time is written last: the leader of the node takes the call for that of the time.
        """
        rows = self._records.unfinished()
        rows = rows[rows["flags"] & FLAG_ABANDONED == 0]
        ring, oldest_ns = self._recording.ring, 0
        if len(rows):
            oldest = rows[np.argmin(rows["enqueued_ns"])]
            oldest_ns = int(oldest["enqueued_ns"])
            put(ring, "in_call", self._calls.number_of(oldest))
        put(ring, "in_call_ns", oldest_ns)
        is_overdue = time.monotonic_ns() - oldest_ns >= self._hang_after * 1e9
        if oldest_ns and is_overdue:
            self._overdue_at = time.monotonic()
        put(ring, "overdue_ns", oldest_ns if is_overdue else 0)

    def _note_standstill(self, mine: Header) -> None:
        is_silent, self._last_head = mine.head == self._last_head, mine.head
        self._standstill.note(mine.train_thread, is_silent)

    def _note_issued(self, headers: dict[int, Header], now: float) -> None:
        """Note which ranks of the node have done anything since the last turn."""
        for rank, header in headers.items():
            done = header.head + header.step, header.rpc
            if rank not in self._issued or self._issued[rank][0] != done:
                self._issued[rank] = done, now

    def _silent_since_ns(self, headers: dict[int, Header], now: float) -> int:
        """Return since when no rank of the node has issued a call, or 0 if that is not long.

        No call is overdue then, but the ranks may wait in functions that leave no record.
        """
        since = max(self._issued[rank][1] for rank in headers)
        ended = any(header.closed_ns or header.left_ns for header in headers.values())
        return 0 if ended or now - since < self._hang_after else int(since * 1e9)

    def _has_left_call(self, mine: Header | None) -> bool:
        """Return whether this rank was in a call that hung at the verdict, and is in none now."""
        return self._was_overdue and mine is not None and mine.overdue_ns == 0

    def _waits_in_store(self, headers: dict[int, Header]) -> bool:
        """Return whether a rank of this node has waited for the job's store for long."""
        since_ns = time.monotonic_ns() - int(self._hang_after * STILL_SHARE * 1e9)
        return any(0 < header.in_store_ns <= since_ns for header in headers.values())

    def _is_asked(self, headers: dict[int, Header], now: float, judge: Judge) -> bool:
        """Return whether another node wants a verdict, by a poll of the store if one is due.

        While the node's ranks issue calls, the store gets one request in half of ``hang_after``, or
        in 30 seconds. It is polled every second if a rank has issued no call for half of
        ``hang_after``, or until there is a store.
        """
        world = max(header.world_size for header in headers.values())
        if len(headers) >= world:
            return False
        quiet = any(now - self._issued[rank][1] > self._hang_after / 2 for rank in headers)
        if now < self._next_asked and not (quiet and self._next_asked - now > 1.0):
            return False
        asked, soon = judge.asked(headers), min(1.0, self._hang_after / 4)
        seldom = judge.signed_on and not quiet
        self._next_asked = now + (judge.polls_every_s if seldom else soon)
        return asked

    @staticmethod
    def _verdict_count(headers: dict[int, Header]) -> int:
        return sum(header.verdicts for header in headers.values())

    def _notice(self, headers: dict[int, Header], judge: Judge) -> None:
        """Do what ``on_hang`` says if the node has a new verdict since the last turn."""
        count = self._verdict_count(headers)
        if count <= self._seen:
            return
        self._seen = count
        if self._on_hang in ENDS and _may_abort(judge.verdicts()):
            if self._on_hang == "abort":
                self._end_itself()
            self._end_at = time.monotonic() + GRACE_S
            # Its call may have ended since the verdict, because the culprit was ended at once.
            self._was_overdue = time.monotonic() - self._overdue_at < GRACE_S
        verdicts = judge.verdicts()
        if verdicts and callable(self._on_hang):
            try:
                self._on_hang(verdicts[-1].findings)
            except Exception:
                logger.exception("on_hang failed; the watcher goes on")

    def _why_not(self, judge: Judge) -> str:
        """Return why the newest verdict ends no rank of this node."""
        text = (
            "rankcall: the ranks of this node are not ended "
            f"(on_hang={self._on_hang}): none is overdue in a call"
        )
        if judge.is_verified:
            return text
        return f"{text}, and the verdict of the nodes is not verified ({ADVICE})"

    def _end_itself(self) -> None:
        """End this process from this thread, because its main thread may never run again."""
        put(self._recording.ring, "aborted_ns", time.monotonic_ns())
        print(
            f"rankcall: rank {self._recording.rank()} ends because the job hangs "
            f"(on_hang={self._on_hang})",
            file=sys.stderr,
            flush=True,
        )
        os._exit(ABORT_STATUS)


def _may_abort(verdicts: list[Verdict]) -> bool:
    """Return whether the newest verdict is certain that the job hangs.

    Ranks that record nothing may compute for a long time, and must not be ended for that.
    """
    if not verdicts:
        return True
    return not leaves_open(verdicts[-1].findings)


_current: Watcher | None = None
_registered = False


def _register_once() -> None:
    global _registered
    if not _registered:
        _registered = True
        background.at_exit(_at_exit)
        os.register_at_fork(after_in_child=_in_forked_child)


def is_watching() -> bool:
    """Return whether a watcher runs in this process."""
    return _current is not None


def _at_exit() -> None:
    if _current is not None:
        _current.stop()


def _in_forked_child() -> None:
    global _current
    _current = None
