"""Tell the other ranks that this one failed or left, and be told, also inside a collective.

Through the job's store: a log that every rank may append to, and a bell for each rank. A thread
waits for this rank's bell through a store client of its own and reads the log. Where another rank
failed it lets the training thread a moment to come out by itself; then it breaks the connections
that its collective waits on. Whoever breaks connections has said why before: a rank whose
collective fails reads the log to its end, and what is not in it was said by nobody. Keys, below one
prefix for each ``Join``:

    n, log/<i>   the entries and their number
    bell/<rank>  rings for one rank; the rank takes it away again
    heard/<rank> that rank's answer to the first entry: where its connections end
    host/<rank>  where that rank runs, and as which process
    left/<k>, gone/<k>  at which step the first left its loop for the kth time, and how many did
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from rankcall.background import BackgroundCall
from rankcall.errors import PeerError, UnevenInputs
from rankcall.join.presence import Presence, is_gone, own_presence
from rankcall.join.sockets import abort_devices, break_connections, endpoints
from rankcall.run import format_ranks
from rankcall.rundir import host_name

_log = logging.getLogger("rankcall.join")
_DAY = timedelta(days=1)
T = TypeVar("T")
# What the training thread gets to fail or leave by itself: so many turns of the watching thread,
# because on a busy machine both get fewer of them.
_TURNS, _TURN_S = 20, 0.01
_ANSWER_S = 5.0  # what the other ranks get to answer; those whose process is gone get none
_STORE_S = 10.0  # what the store gets to answer: one whose host is stopped never does
_WORD_S = 0.5  # what the cause gets to arrive where connections broke and all ranks are there
Entry = dict[str, Any]

_spent: list[Any] = []  # the store of the block before, with its prefix
_joins: dict[tuple[int, ...], int] = {}  # how many there were, by their ranks: the same on each


class Watch:
    """Connects the ranks of one ``Join`` from ``start`` to ``close``.

    ``steps`` returns how many batches this rank has begun. All methods but the thread's own run on
    the training thread.
    """

    def __init__(self, ranks: Sequence[int], steps: Callable[[], int]) -> None:
        self.rank = dist.get_rank()
        self._ranks = list(ranks)
        self._steps = steps
        self._out = threading.Event()  # the training thread has left the block
        self._failure: Entry | None = None
        self._failed = threading.Event()  # there is a failure
        self._settled = threading.Event()  # there is, or all have left
        self._left: tuple[int, int] | None = None  # rank and step of the first to leave
        self._leaves = 0
        self._read = 0  # entries of the log
        self._present: dict[int, Presence] = {}  # where the other ranks run, as far as asked
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to listen; nothing to do where there is nobody else."""
        if len(self._ranks) < 2:
            return
        key = tuple(self._ranks)
        number = _joins[key] = _joins.get(key, 0) + 1
        name = f"rankcall/join/{key[0]}-{key[-1]}-{zlib.crc32(repr(key).encode()):08x}"
        store = dist.distributed_c10d._get_default_store()
        self._spared = _ports(store)

        def connect() -> None:
            own: Any = store.clone()  # type: ignore[attr-defined]
            self._store: Any = dist.PrefixStore(f"{name}/{number}", store)
            self._own: Any = dist.PrefixStore(f"{name}/{number}", own)  # the thread's
            self._store.set(f"host/{self.rank}", json.dumps(own_presence()))

        try:
            _bounded(connect)
        except (RuntimeError, AttributeError) as error:
            _log.warning("errors of other ranks cannot be told inside this Join: %s", error)
            return
        self._thread = threading.Thread(target=self._listen, name="rankcall-join", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._out.set()
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._closing = True
        try:
            _bounded(self._wake)
        except Exception:  # the store is gone or silent, and the thread ends by that
            thread.join(_WORD_S)
        else:
            thread.join(2 * _ANSWER_S)
            with contextlib.suppress(Exception):
                _bounded(self._forget)
        _spent[:] = [self._store]

    def _wake(self) -> None:
        """Let the thread see that the training thread has left the block."""
        # Not over an answer with ends: another rank may still be waiting on one of them.
        self._store.compare_set(f"heard/{self.rank}", "", "[]")
        self._store.set(f"bell/{self.rank}", "1")

    def _forget(self) -> None:
        """Remove this rank's keys of the block before.

        Every rank has left that block before this one, so no rank reads them any more.
        """
        for store in _spent:
            for what in ("host", "heard", "bell"):
                store.delete_key(f"{what}/{self.rank}")

    # What this rank has to say.

    def publish(self, error: BaseException) -> None:
        """Tell all others why this rank fails, and wait until they have heard, or some seconds."""
        self._out.set()
        told = self._failure is not None and self._failure["kind"] == "raised"
        if self._thread is None or told:
            return
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        cause = traceback.format_exception_only(type(error), error)[-1].strip()

        def tell() -> None:
            self._append("raised", cause=cause, traceback=text[-20_000:])
            self._silent(_ANSWER_S)

        try:
            _bounded(tell, _ANSWER_S)
        except RuntimeError as problem:  # the store is gone: the error itself must not be lost
            _log.warning("the other ranks could not be told of %s: %s", cause, problem)

    def explain(self, error: BaseException) -> RuntimeError | None:
        """Return what is behind a collective that failed; None where it failed by itself."""
        if self._thread is None:
            return None
        try:
            return _bounded(lambda: self._cause_of(error), 3 * _ANSWER_S + _WORD_S)
        except dist.DistError as problem:
            if self._failure is not None and self._failure["kind"] != "lost":
                return self._explained(self._failure)
            return PeerError(f"{error}; and the store, on which ranks agree, is gone: {problem}")

    def _cause_of(self, error: BaseException) -> RuntimeError | None:
        """Ask the other ranks and the log what made a collective fail."""
        self._catch_up()
        if self._failure is None:
            self._append("lost", cause=str(error))
            silent = self._silent(_ANSWER_S)
            if not self._failed.wait(0 if silent else _WORD_S):
                return self._gone(silent, str(error)) if silent else None
        assert self._failure is not None
        return self._explained(self._failure)

    def leave(self) -> None:
        """Leave the loop early; return when all ranks did so at the same step.

        Raises ``UnevenInputs`` or ``PeerError`` where another rank goes on.
        """
        if self._thread is None:
            return
        mine = self._steps()
        self._leaves += 1
        try:
            step, rank = _bounded(lambda: self._announce_leaving(mine))
        except dist.DistError as problem:
            raise PeerError(
                f"rank {self.rank} left the loop after {mine} batches and cannot agree with the "
                f"other ranks: {problem}"
            ) from problem
        if step != mine:
            raise UnevenInputs(
                f"rank {self.rank} left the loop after {mine} batches, rank {rank} after {step}: "
                "ranks must leave it together, or let it end by itself"
            )
        if not self._settled.wait(default_pg_timeout.total_seconds()):
            raise UnevenInputs(
                f"rank {self.rank} left the loop after {mine} batches; other ranks neither left it "
                f"nor failed within {default_pg_timeout}"
            )
        self._settled.clear()
        self.check()
        self._left = None

    def _announce_leaving(self, mine: int) -> tuple[int, int]:
        """Say when this rank leaves; return the step and the rank of the first to leave."""
        word = f"{mine} {self.rank}"
        first = self._store.compare_set(f"left/{self._leaves}", "", word).decode()
        step, rank = map(int, first.split())
        if first == word:
            self._append("left", at=mine)
        if step == mine and self._store.add(f"gone/{self._leaves}", 1) == len(self._ranks):
            self._append("all-left")
        return step, rank

    def check(self) -> None:
        """Raise where another rank left before the step that this one begins, or failed."""
        left = self._left
        if left is not None and left[1] < self._steps():
            raise self._left_behind(*left)
        if self._failure is not None:
            raise self._explained(self._failure)

    # The thread.

    def _listen(self) -> None:
        bell = f"bell/{self.rank}"
        while not self._closing:
            try:
                self._own.wait([bell], _DAY)
                self._own.delete_key(bell)
                self._read_log()
                if self._failure is not None:
                    self._break_out()
            except dist.DistStoreError:
                continue  # a day without news
            except Exception:  # the store is gone: there will be no more news
                if self._failure is not None:
                    self._break_out()
                return

    def _read_log(self) -> None:
        while not self._closing and self._own.check([f"log/{self._read}"]):
            self._hear(json.loads(self._own.get(f"log/{self._read}")))
            self._read += 1

    def _hear(self, entry: Entry) -> None:
        kind = entry["kind"]
        if kind == "all-left":
            self._settled.set()
        elif entry["rank"] == self.rank:
            pass
        elif kind == "left":
            self._left = (entry["rank"], entry["at"])
            if self._steps() > entry["at"] and self._failure is None:
                self._note({**entry, "kind": "behind"})
        elif self._failure is None or (kind == "raised" and self._failure["kind"] == "lost"):
            self._note(entry)

    def _note(self, entry: Entry) -> None:
        """Note another rank's failure, then answer it: what was heard is known here."""
        self._failure = entry
        self._failed.set()
        self._settled.set()
        self._own.set(f"heard/{self.rank}", json.dumps(endpoints()))

    def _break_out(self) -> None:
        """Get the training thread out of the collective that it may be waiting in."""
        if any(self._out.wait(_TURN_S) for _ in range(_TURNS)):
            return
        assert self._failure is not None
        far, unheard, pause = set(self._failure["ends"]), set(self._ranks), _TURN_S
        abort_devices()
        while not self._closing:
            with contextlib.suppress(RuntimeError):  # the store may end with the rank that failed
                self._read_log()
                for rank in [each for each in unheard if self._own.check([f"heard/{each}"])]:
                    far |= set(json.loads(self._own.get(f"heard/{rank}")))
                    unheard.discard(rank)
            break_connections(far, self._spared)
            if self._out.wait(pause):
                return
            pause = min(2 * pause, 1.0)

    # Helpers of both.

    def _catch_up(self) -> None:
        """Wait until the thread has read what the log has now."""
        end, deadline = self._store.add("n", 0), time.monotonic() + _ANSWER_S
        self._store.set(f"bell/{self.rank}", "1")
        while self._failure is None and self._read < end and time.monotonic() < deadline:
            time.sleep(0.005)

    def _append(self, kind: str, **more: Any) -> None:
        ends = endpoints()
        entry = {"rank": self.rank, "host": host_name(), "kind": kind, "ends": ends, **more}
        if kind in ("raised", "lost"):
            self._store.set(f"heard/{self.rank}", json.dumps(ends))
        at = self._store.add("n", 1) - 1
        self._store.set(f"log/{at}", json.dumps(entry))
        bells = [f"bell/{rank}" for rank in self._ranks]
        self._store.multi_set(bells, ["1"] * len(bells))

    def _silent(self, seconds: float) -> list[int]:
        """Return the ranks that did not answer in time; who is gone is not waited for."""
        deadline = time.monotonic() + seconds
        silent = [rank for rank in self._ranks if rank != self.rank]
        while True:
            silent = self._unheard(silent)
            if all(self._is_gone(rank) for rank in silent):
                return self._unheard(silent)  # a rank answers before it ends
            if time.monotonic() > deadline:
                return silent
            time.sleep(0.005)

    def _unheard(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if not self._store.check([f"heard/{rank}"])]

    def _is_gone(self, rank: int) -> bool:
        about = self._presence(rank)
        return about is not None and is_gone(about)

    def _presence(self, rank: int) -> Presence | None:
        """Return where a rank runs; None where it never entered the block."""
        if rank not in self._present and self._store.check([f"host/{rank}"]):
            self._present[rank] = json.loads(self._store.get(f"host/{rank}"))
        return self._present.get(rank)

    # What is said on this rank.

    def _explained(self, entry: Entry) -> RuntimeError:
        """Return the error that another rank's entry means on this one."""
        if entry["kind"] == "lost":
            silent = self._silent(_ANSWER_S)
            if silent:
                return self._gone(silent, entry["cause"])
            entry = self._failure or entry  # by now it may be known why
        rank, host, cause = entry["rank"], entry["host"], entry.get("cause", "")
        if entry["kind"] == "behind":
            return self._left_behind(rank, entry["at"])
        if entry["kind"] == "lost":
            text = f"rank {rank} ({host}) lost its connection to another rank: {cause}"
            return PeerError(text, rank=rank, host=host, cause=cause)
        text = f"rank {rank} ({host}) failed inside Join: {cause}\n{entry['traceback']}"
        return PeerError(text, rank=rank, host=host, cause=cause, traceback=entry["traceback"])

    def _gone(self, silent: Sequence[int], error: str) -> PeerError:
        """Name who is gone; where nobody surely is, who does not answer."""
        surely = [rank for rank in silent if self._is_gone(rank)]
        ranks = surely or list(silent)
        about = [self._presence(rank) for rank in ranks]
        hosts = [each["host"] for each in about if each is not None]
        where = f" ({', '.join(sorted(set(hosts)))})" if hosts else ""
        what = (
            "is gone without a word (killed, or out of memory?)"
            if surely
            else f"has not answered for {_ANSWER_S:g} s (stopped, or its host is gone?)"
        )
        return PeerError(
            f"rank {format_ranks(ranks)}{where} {what}; the collective that needed it failed with: "
            f"{error}",
            rank=ranks[0],
            host=hosts[0] if hosts else "",
            cause="gone without a word" if surely else "does not answer",
        )

    def _left_behind(self, rank: int, step: int) -> UnevenInputs:
        return UnevenInputs(
            f"rank {rank} left the loop after {step} batches, rank {self.rank} went on to its "
            f"batch {self._steps()}: ranks must leave it together, or let it end by itself"
        )


def _ports(store: Any) -> list[int]:
    """Return the port of the TCP store behind a store, if there is one."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return [store.port] if isinstance(store, dist.TCPStore) else []


def _bounded(call: Callable[[], T], waits_s: float = 0.0) -> T:
    """Return ``call()``, which asks the store, from a helper thread.

    ``waits_s`` is what it may wait besides. Raises ``DistNetworkError`` if it has not ended by
    then; the thread is left behind.
    """
    seconds = _STORE_S + waits_s
    helper = BackgroundCall(call, "rankcall-join-store")
    if not helper.ended(seconds):
        raise dist.DistNetworkError(
            f"the job's store gave no answer within {seconds:g} s: its host is stopped or cut off"
        )
    return helper.outcome()
