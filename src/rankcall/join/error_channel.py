"""Report to the other ranks that this one failed or left, and learn the same of them.

The ranks of a ``Join`` share a log in the job's store, and each rank has a wake-up key. A thread
waits for this rank's wake-up key through a store client of its own, and then reads the log. If
another rank failed, the thread gives the training thread a moment to fail or leave. Then it breaks
the connections of the collective in which the training thread waits.

A rank reports its error before it breaks connections. So a rank whose collective fails reads the
whole log; an error that is not in the log was never reported.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import traceback
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from rankcall.c10d.client import perform
from rankcall.c10d.requests import Now, Sleep, Steps
from rankcall.errors import PeerError, UnevenInputsError
from rankcall.join.connections import abort_devices, break_connections, endpoints
from rankcall.join.shared_log import SharedLog
from rankcall.process import DEAD, Process, host_name
from rankcall.ranks import format_ranks

Entry = dict[str, Any]

logger = logging.getLogger("rankcall.join")
T = TypeVar("T")
# The time in which the training thread may fail or leave before its connections are broken. It is
# counted in turns of the listening thread: on a busy machine both threads run less often.
_TURNS, _TURN_S = 20, 0.01
_ANSWER_S = 5.0  # for the answers of the other ranks; a rank whose process has ended needs none
_STORE_S = 10.0  # for the answer of the store, which may be on a stopped host
_POLL_S = 0.005
_DAY_S = 86_400.0  # a wait for a failure; then the thread waits again: no wait is without an end
_LOOK_S = 0.5  # how often a rank that waits for a stop looks for failed and ended ranks
_REPORT_S = 0.5  # for a report to arrive, after connections broke although all ranks are alive

_spent_names: list[str] = []  # of the last block; its keys may be removed
_joins: dict[tuple[int, ...], int] = {}  # ranks -> number of Joins so far, equal on each of them


class ErrorChannel:
    """Connects the ranks of one ``Join`` from ``start`` to ``close``.

    ``steps`` returns how many steps this rank has begun; ``freeze`` is ``Stopping.freeze``. All
    methods run on the training thread, except those in the section of the listening thread.
    """

    def __init__(
        self, ranks: Sequence[int], steps: Callable[[], int], freeze: Callable[[], int]
    ) -> None:
        self.rank = dist.get_rank()
        self._ranks = list(ranks)
        self._steps = steps
        self._freeze = freeze
        self._is_frozen = False
        self._out = threading.Event()  # the training thread has left the block
        self._failure: Entry | None = None
        self._failed = threading.Event()  # a rank has failed
        self._settled = threading.Event()  # a rank has failed, or all ranks have left
        self._left: tuple[int, int] | None = None  # rank and step of the first to leave
        self._leaves = 0
        self._unread: list[Entry] = []  # the thread has them, and has not looked at them
        self._read = 0  # how many entries of the log the thread has looked at
        self._processes: dict[int, Process] = {}  # those read from the log so far
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to listen, unless this is the only rank."""
        if len(self._ranks) < 2:
            return
        key = tuple(self._ranks)
        number = _joins[key] = _joins.get(key, 0) + 1
        checksum = zlib.crc32(repr(key).encode())
        self._name = f"rankcall/join/{key[0]}-{key[-1]}-{checksum:08x}/{number}"
        store: Any = dist.distributed_c10d._get_default_store()
        self._store_ports = _ports(store)

        self._log = SharedLog(self._name)
        self._store = store
        try:
            self._perform(self._log.set_process(self.rank, Process.current(host_name())))
        except RuntimeError as error:
            self._store = None
            logger.warning("this Join cannot report the errors of other ranks: %s", error)
            return
        self._thread = threading.Thread(target=self._listen, name="rankcall-join", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and drop the store."""
        self._out.set()
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._closing = True
        log = self._log

        def wake() -> Steps[None]:
            # Keep an answer that names connections: another rank may still wait on one of them.
            yield from log.answer_if_missing(self.rank)
            yield from log.wake(self.rank)

        def remove_keys_of_last_block() -> Steps[None]:
            # Every rank left that block before it entered this one, so no rank reads its keys.
            for name in _spent_names:
                yield from SharedLog(name).remove_keys_of(self.rank)

        try:
            self._perform(wake())
        except Exception:  # the store is gone or does not answer; either ends the thread
            thread.join(_REPORT_S)
        else:
            thread.join(2 * _ANSWER_S)
            with contextlib.suppress(Exception):
                self._perform(remove_keys_of_last_block())
        _spent_names[:] = [self._name]
        self._store = None

    def _perform(self, steps: Steps[T], waits_s: float = 0.0) -> T:
        """Make requests to the store; ``waits_s`` is how long they may wait for other ranks.

        Raises ``StoreLostError`` if the store is gone or does not answer.
        """
        return perform(self._store, _STORE_S + waits_s, steps)

    # Reports of this rank.

    def publish(self, error: BaseException) -> None:
        """Report why this rank fails; wait until all ranks have answered, or for some seconds."""
        self._out.set()
        other_raised = self._failure is not None and self._failure["kind"] == "raised"
        if self._thread is None or other_raised:
            return
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        cause = traceback.format_exception_only(type(error), error)[-1].strip()

        def report() -> Steps[None]:
            yield from self._append("raised", cause=cause, traceback=text[-20_000:])
            yield from self._wait_for_answers(_ANSWER_S)

        try:
            self._perform(report(), _ANSWER_S)
        except RuntimeError as problem:  # the store is gone: the error itself must not be lost
            logger.warning("could not report to the other ranks: %s: %s", cause, problem)

    def explain(self, error: BaseException) -> RuntimeError | None:
        """Return the cause of a collective that failed; None if no other rank caused it."""
        if self._thread is None:
            return None
        try:
            return self._perform(self._cause_of(str(error)), 3 * _ANSWER_S + _REPORT_S)
        except dist.DistError as problem:
            failure = self._failure
            if failure is not None and failure["kind"] != "lost":
                return self._error_of(failure)
            return PeerError(f"{error}; and the store, on which ranks agree, is gone: {problem}")

    def _cause_of(self, error: str) -> Steps[RuntimeError | None]:
        """Find the cause of a failed collective in the log, or in a rank that does not answer."""
        yield from self._catch_up()
        if self._failure is None:
            yield from self._append("lost", cause=error)
            silent = yield from self._wait_for_answers(_ANSWER_S)
            if not self._failed.wait(0 if silent else _REPORT_S):
                return (yield from self._gone(silent, _failed_with(error))) if silent else None
        assert self._failure is not None
        return (yield from self._explained(self._failure))

    def leave(self) -> None:
        """Leave the loop early; return once all ranks have left it at the same step.

        Raises ``UnevenInputsError`` or ``PeerError`` if another rank goes on or fails.
        """
        if self._thread is None:
            return
        own_step = self._steps()
        self._leaves += 1
        try:
            step, rank = self._perform(self._announce_leaving(own_step))
        except dist.DistError as problem:
            raise PeerError(
                f"rank {self.rank} left the loop after {own_step} batches and cannot agree with "
                f"the other ranks: {problem}"
            ) from problem
        if step != own_step:
            raise UnevenInputsError(
                f"rank {self.rank} left the loop after {own_step} batches, rank {rank} after "
                f"{step}: all ranks must leave it at the same step, or run it to its end"
            )
        if not self._settled.wait(default_pg_timeout.total_seconds()):
            raise UnevenInputsError(
                f"rank {self.rank} left the loop after {own_step} batches; other ranks neither "
                f"left it nor failed within {default_pg_timeout}"
            )
        self._settled.clear()
        self.check()
        self._left = None

    def _announce_leaving(self, own_step: int) -> Steps[tuple[int, int]]:
        """Announce that this rank leaves; return the step and the rank of the first to leave."""
        step, rank = yield from self._log.leave(self.rank, own_step, self._leaves)
        if rank == self.rank:
            yield from self._append("left", at=own_step)
        if step == own_step:
            count = yield from self._log.count_leaver(self._leaves)
            if count == len(self._ranks):
                yield from self._append("all-left")
        return step, rank

    def check(self) -> None:
        """Raise if another rank failed, or left before the step that this rank begins."""
        left = self._left
        if left is not None and left[1] < self._steps():
            raise self._left_behind(*left)
        if self._failure is not None:
            raise self._perform(self._explained(self._failure), 2 * _ANSWER_S)

    def request_stop(self) -> None:
        """Request that all ranks stop at the same point; ``agree_on_stop`` returns it."""
        if self._thread is not None:
            self._perform_for_stop(self._append("stop"))

    def agree_on_stop(self) -> int:
        """Return the last point that ranks pass; wait until all ranks have reported theirs.

        Raises ``PeerError`` or ``UnevenInputsError`` if another rank fails, and ``PeerError`` if
        one has ended or does not report within torch's default timeout.
        """
        if len(self._ranks) < 2:
            return self._freeze()
        timeout_s = default_pg_timeout.total_seconds()
        last = self._perform_for_stop(self._agreed_stop(timeout_s), timeout_s)
        if last is None:
            self.check()
            raise PeerError(f"rank {self.rank} was to stop, but its Join block has ended")
        return last

    def _perform_for_stop(self, steps: Steps[T], waits_s: float = 0.0) -> T:
        problem: Exception | None = None
        if self._thread is not None:
            try:
                return self._perform(steps, waits_s)
            except dist.DistError as error:
                problem = error
        raise PeerError(
            f"rank {self.rank} cannot agree with the other ranks on where to stop: "
            f"{problem or 'this Join has no connection to the store'}"
        ) from problem

    def _agreed_stop(self, timeout_s: float) -> Steps[int | None]:
        """Wait until the ranks agree on where to stop; None if a rank fails meanwhile."""
        deadline = (yield Now()) + timeout_s
        while self._failure is None:
            last = yield from self._log.wait_for_stop(_LOOK_S)
            if last is not None:
                return last
            # Also decides in place of a rank that has ended after all had reported.
            silent = yield from self._log.decide_stop(self._ranks)
            is_late = (yield Now()) > deadline
            if silent and (is_late or (yield from self._ended(silent))):
                consequence = "the other ranks cannot stop at the same step without it"
                raise (yield from self._gone(silent, consequence, timeout_s))
        return None

    # On the listening thread.

    def _listen(self) -> None:
        store = self._store
        while not self._closing:
            try:
                perform(store, _DAY_S, self._log.wait_to_be_woken(self.rank))
                perform(store, _STORE_S, self._read_log())
                if self._failure is not None:
                    self._break_out(store)
            except Exception:  # the store is gone: no entry can come any more
                if self._failure is not None:
                    self._break_out(store)
                return

    def _read_log(self) -> Steps[None]:
        self._unread += yield from self._log.read()
        while self._unread and not self._closing:
            yield from self._take_in(self._unread[0])
            self._unread.pop(0)
            self._read += 1

    def _take_in(self, entry: Entry) -> Steps[None]:
        kind = entry["kind"]
        if kind == "all-left":
            self._settled.set()
        elif kind == "stop":
            if not self._is_frozen:
                yield from self._log.report_passed(self.rank, self._freeze(), self._ranks)
                self._is_frozen = True
        elif entry["rank"] == self.rank:
            pass
        elif kind == "left":
            self._left = (entry["rank"], entry["at"])
            if self._steps() > entry["at"] and self._failure is None:
                yield from self._note({**entry, "kind": "behind"})
        elif self._failure is None or (kind == "raised" and self._failure["kind"] == "lost"):
            yield from self._note(entry)

    def _note(self, entry: Entry) -> Steps[None]:
        """Note another rank's failure, then answer it. An answer promises that it was noted."""
        self._failure = entry
        self._failed.set()
        self._settled.set()
        yield from self._log.answer(self.rank, endpoints())

    def _break_out(self, store: Any) -> None:
        """Interrupt the collective in which the training thread may be waiting."""
        if any(self._out.wait(_TURN_S) for _ in range(_TURNS)):
            return
        assert self._failure is not None
        far_ends, unanswered, pause = set(self._failure["ends"]), set(self._ranks), _TURN_S
        abort_devices()
        while not self._closing:
            with contextlib.suppress(RuntimeError):  # the store may end with the rank that failed
                perform(store, _STORE_S, self._read_log())
                answers = perform(store, _STORE_S, self._log.answers(sorted(unanswered)))
                far_ends.update(*answers.values())
                unanswered -= answers.keys()
            break_connections(far_ends, self._store_ports)
            if self._out.wait(pause):
                return
            pause = min(2 * pause, 1.0)

    # Requests for which the training thread waits.

    def _catch_up(self) -> Steps[None]:
        """Wait until the thread has read all entries that are in the log now."""
        end, deadline = (yield from self._log.length()), (yield Now()) + _ANSWER_S
        yield from self._log.wake(self.rank)
        while self._failure is None and self._read < end and (yield Now()) < deadline:
            yield Sleep(_POLL_S)

    def _append(self, kind: str, **more: Any) -> Steps[None]:
        ends = endpoints()
        entry = {"rank": self.rank, "host": host_name(), "kind": kind, "ends": ends, **more}
        if kind in ("raised", "lost"):
            yield from self._log.answer(self.rank, ends)
        yield from self._log.append(entry, self._ranks)

    def _wait_for_answers(self, seconds: float) -> Steps[list[int]]:
        """Return the ranks that did not answer in time; do not wait for ended processes."""
        deadline = (yield Now()) + seconds
        silent = [rank for rank in self._ranks if rank != self.rank]
        while True:
            silent = yield from self._unanswered(silent)
            if len((yield from self._ended(silent))) == len(silent):
                return (yield from self._unanswered(silent))  # one may have answered and then ended
            if (yield Now()) > deadline:
                return silent
            yield Sleep(_POLL_S)

    def _unanswered(self, ranks: Sequence[int]) -> Steps[list[int]]:
        answers = yield from self._log.answers(ranks)
        return [rank for rank in ranks if rank not in answers]

    def _ended(self, ranks: Sequence[int]) -> Steps[list[int]]:
        """Return those ranks whose processes have ended."""
        ended = []
        for rank in ranks:
            process = yield from self._process(rank)
            if process is not None and process.liveness() == DEAD:
                ended.append(rank)
        return ended

    def _process(self, rank: int) -> Steps[Process | None]:
        """Return the process of a rank; None if the rank never entered the block."""
        if rank not in self._processes:
            process = yield from self._log.process_of(rank)
            if process is None:
                return None
            self._processes[rank] = process
        return self._processes[rank]

    # The errors that this rank raises.

    def _explained(self, entry: Entry) -> Steps[RuntimeError]:
        """Return the error to raise here because of another rank's entry."""
        if entry["kind"] == "lost":
            silent = yield from self._wait_for_answers(_ANSWER_S)
            if silent:
                return (yield from self._gone(silent, _failed_with(entry["cause"])))
            entry = self._failure or entry  # the cause may have arrived by now
        return self._error_of(entry)

    def _error_of(self, entry: Entry) -> RuntimeError:
        rank, host, cause = entry["rank"], entry["host"], entry.get("cause", "")
        if entry["kind"] == "behind":
            return self._left_behind(rank, entry["at"])
        if entry["kind"] == "lost":
            text = f"rank {rank} ({host}) lost its connection to another rank: {cause}"
            return PeerError(text, rank=rank, host=host, cause=cause)
        text = f"rank {rank} ({host}) failed inside Join: {cause}\n{entry['traceback']}"
        return PeerError(text, rank=rank, host=host, cause=cause, traceback=entry["traceback"])

    def _gone(
        self, silent: Sequence[int], consequence: str, waited_s: float | None = None
    ) -> Steps[PeerError]:
        """Return an error that names the ranks that are gone, or else those that do not answer."""
        waited_s = _ANSWER_S if waited_s is None else waited_s
        gone_ranks = yield from self._ended(silent)
        ranks = gone_ranks or list(silent)
        processes = []
        for rank in ranks:
            processes.append((yield from self._process(rank)))
        hosts = [process.host for process in processes if process is not None]
        where = f" ({', '.join(sorted(set(hosts)))})" if hosts else ""
        state = (
            "ended without an error report (killed, or out of memory?)"
            if gone_ranks
            else f"has not answered for {waited_s:g} s (stopped, or its host is gone?)"
        )
        return PeerError(
            f"rank {format_ranks(ranks)}{where} {state}; {consequence}",
            rank=ranks[0],
            host=hosts[0] if hosts else "",
            cause="ended without an error report" if gone_ranks else "does not answer",
        )

    def _left_behind(self, rank: int, step: int) -> UnevenInputsError:
        return UnevenInputsError(
            f"rank {rank} left the loop after {step} batches, rank {self.rank} went on to its "
            f"batch {self._steps()}: all ranks must leave it at the same step, or run it to its end"
        )


def _failed_with(error: str) -> str:
    return f"the collective that needed it failed with: {error}"


def _ports(store: Any) -> list[int]:
    """Return the port of the TCP store behind a store, or an empty list."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return [store.port] if isinstance(store, dist.TCPStore) else []
