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
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from rankcall.background import BackgroundCall
from rankcall.errors import PeerError, UnevenInputs
from rankcall.join.shared_log import Entry, SharedLog
from rankcall.join.sockets import abort_devices, break_connections, endpoints
from rankcall.process import DEAD, Process, host_name
from rankcall.ranks import format_ranks

logger = logging.getLogger("rankcall.join")
T = TypeVar("T")
# The time in which the training thread may fail or leave before its connections are broken. It is
# counted in turns of the listening thread: on a busy machine both threads run less often.
_TURNS, _TURN_S = 20, 0.01
_ANSWER_S = 5.0  # for the answers of the other ranks; a rank whose process has ended needs none
_STORE_S = 10.0  # for the answer of the store, which may be on a stopped host
_REPORT_S = 0.5  # for a report to arrive, after connections broke although all ranks are alive

_spent_names: list[str] = []  # of the last block; its keys may be removed
_joins: dict[tuple[int, ...], int] = {}  # ranks -> number of Joins so far, equal on each of them


class ErrorChannel:
    """Connects the ranks of one ``Join`` from ``start`` to ``close``.

    ``steps`` returns how many batches this rank has begun. All methods run on the training thread,
    except those in the section of the listening thread.
    """

    def __init__(self, ranks: Sequence[int], steps: Callable[[], int]) -> None:
        self.rank = dist.get_rank()
        self._ranks = list(ranks)
        self._steps = steps
        self._out = threading.Event()  # the training thread has left the block
        self._failure: Entry | None = None
        self._failed = threading.Event()  # a rank has failed
        self._settled = threading.Event()  # a rank has failed, or all ranks have left
        self._left: tuple[int, int] | None = None  # rank and step of the first to leave
        self._leaves = 0
        self._read = 0  # how many entries of the log the thread has read
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
        store = dist.distributed_c10d._get_default_store()
        self._store_ports = _ports(store)

        def connect() -> None:
            own_client = store.clone()  # type: ignore[attr-defined]
            self._log = SharedLog(self._name, store)
            self._own_log = SharedLog(self._name, own_client)  # for the thread alone
            self._log.set_process(self.rank, Process.current(host_name()))

        try:
            _with_deadline(connect)
        except (RuntimeError, AttributeError) as error:
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

        def wake() -> None:
            # Keep an answer that names connections: another rank may still wait on one of them.
            log.answer_if_missing(self.rank)
            log.wake(self.rank)

        def remove_keys_of_last_block() -> None:
            # Every rank left that block before it entered this one, so no rank reads its keys.
            store = dist.distributed_c10d._get_default_store()
            for name in _spent_names:
                SharedLog(name, store).remove_keys_of(self.rank)

        try:
            _with_deadline(wake)
        except Exception:  # the store is gone or does not answer; either ends the thread
            thread.join(_REPORT_S)
        else:
            thread.join(2 * _ANSWER_S)
            with contextlib.suppress(Exception):
                _with_deadline(remove_keys_of_last_block)
        _spent_names[:] = [self._name]
        del self._log, self._own_log

    # Reports of this rank.

    def publish(self, error: BaseException) -> None:
        """Report why this rank fails; wait until all ranks have answered, or for some seconds."""
        self._out.set()
        other_raised = self._failure is not None and self._failure["kind"] == "raised"
        if self._thread is None or other_raised:
            return
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        cause = traceback.format_exception_only(type(error), error)[-1].strip()

        def report() -> None:
            self._append("raised", cause=cause, traceback=text[-20_000:])
            self._wait_for_answers(_ANSWER_S)

        try:
            _with_deadline(report, _ANSWER_S)
        except RuntimeError as problem:  # the store is gone: the error itself must not be lost
            logger.warning("could not report to the other ranks: %s: %s", cause, problem)

    def explain(self, error: BaseException) -> RuntimeError | None:
        """Return the cause of a collective that failed; None if no other rank caused it."""
        if self._thread is None:
            return None
        try:
            return _with_deadline(lambda: self._cause_of(error), 3 * _ANSWER_S + _REPORT_S)
        except dist.DistError as problem:
            if self._failure is not None and self._failure["kind"] != "lost":
                return self._explained(self._failure)
            return PeerError(f"{error}; and the store, on which ranks agree, is gone: {problem}")

    def _cause_of(self, error: BaseException) -> RuntimeError | None:
        """Find the cause of a failed collective in the log, or in a rank that does not answer."""
        self._catch_up()
        if self._failure is None:
            self._append("lost", cause=str(error))
            silent = self._wait_for_answers(_ANSWER_S)
            if not self._failed.wait(0 if silent else _REPORT_S):
                return self._gone(silent, str(error)) if silent else None
        assert self._failure is not None
        return self._explained(self._failure)

    def leave(self) -> None:
        """Leave the loop early; return once all ranks have left it at the same step.

        Raises ``UnevenInputs`` or ``PeerError`` if another rank goes on or fails.
        """
        if self._thread is None:
            return
        own_step = self._steps()
        self._leaves += 1
        try:
            step, rank = _with_deadline(lambda: self._announce_leaving(own_step))
        except dist.DistError as problem:
            raise PeerError(
                f"rank {self.rank} left the loop after {own_step} batches and cannot agree with "
                f"the other ranks: {problem}"
            ) from problem
        if step != own_step:
            raise UnevenInputs(
                f"rank {self.rank} left the loop after {own_step} batches, rank {rank} after "
                f"{step}: all ranks must leave it at the same step, or run it to its end"
            )
        if not self._settled.wait(default_pg_timeout.total_seconds()):
            raise UnevenInputs(
                f"rank {self.rank} left the loop after {own_step} batches; other ranks neither "
                f"left it nor failed within {default_pg_timeout}"
            )
        self._settled.clear()
        self.check()
        self._left = None

    def _announce_leaving(self, own_step: int) -> tuple[int, int]:
        """Announce that this rank leaves; return the step and the rank of the first to leave."""
        step, rank = self._log.leave(self.rank, own_step, self._leaves)
        if rank == self.rank:
            self._append("left", at=own_step)
        if step == own_step and self._log.count_leaver(self._leaves) == len(self._ranks):
            self._append("all-left")
        return step, rank

    def check(self) -> None:
        """Raise if another rank failed, or left before the step that this rank begins."""
        left = self._left
        if left is not None and left[1] < self._steps():
            raise self._left_behind(*left)
        if self._failure is not None:
            raise self._explained(self._failure)

    # On the listening thread.

    def _listen(self) -> None:
        log = self._own_log
        while not self._closing:
            try:
                log.wait_to_be_woken(self.rank)
                self._read_log(log)
                if self._failure is not None:
                    self._break_out(log)
            except dist.DistStoreError:
                continue  # a day without an entry
            except Exception:  # the store is gone: no entry can come any more
                if self._failure is not None:
                    self._break_out(log)
                return

    def _read_log(self, log: SharedLog) -> None:
        while not self._closing:
            entry = log.entry(self._read)
            if entry is None:
                return
            self._take_in(entry, log)
            self._read += 1

    def _take_in(self, entry: Entry, log: SharedLog) -> None:
        kind = entry["kind"]
        if kind == "all-left":
            self._settled.set()
        elif entry["rank"] == self.rank:
            pass
        elif kind == "left":
            self._left = (entry["rank"], entry["at"])
            if self._steps() > entry["at"] and self._failure is None:
                self._note({**entry, "kind": "behind"}, log)
        elif self._failure is None or (kind == "raised" and self._failure["kind"] == "lost"):
            self._note(entry, log)

    def _note(self, entry: Entry, log: SharedLog) -> None:
        """Note another rank's failure, then answer it. An answer promises that it was noted."""
        self._failure = entry
        self._failed.set()
        self._settled.set()
        log.answer(self.rank, endpoints())

    def _break_out(self, log: SharedLog) -> None:
        """Interrupt the collective in which the training thread may be waiting."""
        if any(self._out.wait(_TURN_S) for _ in range(_TURNS)):
            return
        assert self._failure is not None
        far_ends, unanswered, pause = set(self._failure["ends"]), set(self._ranks), _TURN_S
        abort_devices()
        while not self._closing:
            with contextlib.suppress(RuntimeError):  # the store may end with the rank that failed
                self._read_log(log)
                for rank in sorted(unanswered):
                    ends = log.answer_of(rank)
                    if ends is not None:
                        far_ends |= set(ends)
                        unanswered.discard(rank)
            break_connections(far_ends, self._store_ports)
            if self._out.wait(pause):
                return
            pause = min(2 * pause, 1.0)

    # On a helper thread, for which the training thread waits.

    def _catch_up(self) -> None:
        """Wait until the thread has read all entries that are in the log now."""
        end, deadline = self._log.length(), time.monotonic() + _ANSWER_S
        self._log.wake(self.rank)
        while self._failure is None and self._read < end and time.monotonic() < deadline:
            time.sleep(0.005)

    def _append(self, kind: str, **more: Any) -> None:
        ends = endpoints()
        entry = {"rank": self.rank, "host": host_name(), "kind": kind, "ends": ends, **more}
        if kind in ("raised", "lost"):
            self._log.answer(self.rank, ends)
        self._log.append(entry, self._ranks)

    def _wait_for_answers(self, seconds: float) -> list[int]:
        """Return the ranks that did not answer in time; do not wait for ended processes."""
        deadline = time.monotonic() + seconds
        silent = [rank for rank in self._ranks if rank != self.rank]
        while True:
            silent = self._unanswered(silent)
            if all(self._is_gone(rank) for rank in silent):
                return self._unanswered(silent)  # a rank may have answered and then ended
            if time.monotonic() > deadline:
                return silent
            time.sleep(0.005)

    def _unanswered(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if not self._log.has_answered(rank)]

    def _is_gone(self, rank: int) -> bool:
        process = self._process(rank)
        return process is not None and process.liveness() == DEAD

    def _process(self, rank: int) -> Process | None:
        """Return the process of a rank; None if the rank never entered the block."""
        if rank not in self._processes:
            process = self._log.process_of(rank)
            if process is None:
                return None
            self._processes[rank] = process
        return self._processes[rank]

    # The errors that this rank raises.

    def _explained(self, entry: Entry) -> RuntimeError:
        """Return the error to raise here because of another rank's entry."""
        if entry["kind"] == "lost":
            silent = self._wait_for_answers(_ANSWER_S)
            if silent:
                return self._gone(silent, entry["cause"])
            entry = self._failure or entry  # the cause may have arrived by now
        rank, host, cause = entry["rank"], entry["host"], entry.get("cause", "")
        if entry["kind"] == "behind":
            return self._left_behind(rank, entry["at"])
        if entry["kind"] == "lost":
            text = f"rank {rank} ({host}) lost its connection to another rank: {cause}"
            return PeerError(text, rank=rank, host=host, cause=cause)
        text = f"rank {rank} ({host}) failed inside Join: {cause}\n{entry['traceback']}"
        return PeerError(text, rank=rank, host=host, cause=cause, traceback=entry["traceback"])

    def _gone(self, silent: Sequence[int], error: str) -> PeerError:
        """Return an error that names the ranks that are gone, or else those that do not answer."""
        gone_ranks = [rank for rank in silent if self._is_gone(rank)]
        ranks = gone_ranks or list(silent)
        processes = [self._process(rank) for rank in ranks]
        hosts = [process.host for process in processes if process is not None]
        where = f" ({', '.join(sorted(set(hosts)))})" if hosts else ""
        state = (
            "ended without an error report (killed, or out of memory?)"
            if gone_ranks
            else f"has not answered for {_ANSWER_S:g} s (stopped, or its host is gone?)"
        )
        return PeerError(
            f"rank {format_ranks(ranks)}{where} {state}; the collective that needed it failed "
            f"with: {error}",
            rank=ranks[0],
            host=hosts[0] if hosts else "",
            cause="ended without an error report" if gone_ranks else "does not answer",
        )

    def _left_behind(self, rank: int, step: int) -> UnevenInputs:
        return UnevenInputs(
            f"rank {rank} left the loop after {step} batches, rank {self.rank} went on to its "
            f"batch {self._steps()}: all ranks must leave it at the same step, or run it to its end"
        )


def _ports(store: Any) -> list[int]:
    """Return the port of the TCP store behind a store, or an empty list."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return [store.port] if isinstance(store, dist.TCPStore) else []


def _with_deadline(call: Callable[[], T], waits_s: float = 0.0) -> T:
    """Return ``call()``, which makes requests to the store, from a helper thread.

    ``waits_s`` is how long ``call`` itself may wait for other ranks. Raises ``DistNetworkError`` at
    the deadline, and abandons the thread.
    """
    seconds = _STORE_S + waits_s
    helper = BackgroundCall(call, "rankcall-join-store")
    if not helper.ended(seconds):
        helper.give_up()
        raise dist.DistNetworkError(
            f"the job's store gave no answer within {seconds:g} s: its host is stopped or cut off"
        )
    return helper.outcome()
