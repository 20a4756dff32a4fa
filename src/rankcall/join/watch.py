"""Tell the other ranks that this one failed or left, and be told, also inside a collective.

Through the job's store: a log that every rank may append to, and a bell for each rank. A thread
waits for this rank's bell through a store client of its own and reads the log. Where another rank
failed it lets the training thread a moment to come out by itself; then it breaks the connections
that its collective waits on. Keys, below one prefix for each ``Join``:

    n, log/<i>   the entries and their number
    bell/<rank>  rings for one rank; the rank takes it away again
    heard/<rank> that rank's answer to the first entry: where its connections end
    host/<rank>  where that rank runs
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
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from rankcall.errors import PeerError, UnevenInputs
from rankcall.join.sockets import abort_devices, break_connections, endpoints
from rankcall.run import format_ranks
from rankcall.rundir import host_name

_log = logging.getLogger("rankcall.join")
_DAY = timedelta(days=1)
_MOMENT_S = 0.2  # what the training thread gets to fail or leave by itself
_ANSWER_S = 1.0  # what the other ranks get to answer; the processes that do not are gone
_WORD_S = 0.5  # what the cause gets to arrive after the connections broke
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
        try:
            own: Any = store.clone()  # type: ignore[attr-defined]
            self._store: Any = dist.PrefixStore(f"{name}/{number}", store)
            self._own: Any = dist.PrefixStore(f"{name}/{number}", own)  # the thread's
            self._store.set(f"host/{self.rank}", host_name())
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
        with contextlib.suppress(Exception):
            self._store.set(f"heard/{self.rank}", "[]")
            self._store.set(f"bell/{self.rank}", "1")
        thread.join(2 * _ANSWER_S)
        with contextlib.suppress(Exception):
            # Every rank has left the block before this one, so nobody reads its keys any more.
            for store in _spent:
                for what in ("host", "heard", "bell"):
                    store.delete_key(f"{what}/{self.rank}")
        _spent[:] = [self._store]

    # What this rank has to say.

    def publish(self, error: BaseException) -> None:
        """Tell all others why this rank fails, and wait until they have heard, or a second."""
        self._out.set()
        told = self._failure is not None and self._failure["kind"] != "behind"
        if self._thread is None or told:
            return
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        cause = traceback.format_exception_only(type(error), error)[-1].strip()
        try:
            self._append("raised", cause=cause, traceback=text[-20_000:])
            self._silent(_ANSWER_S)
        except RuntimeError as problem:  # the store is gone: the error itself must not be lost
            _log.warning("the other ranks could not be told of %s: %s", cause, problem)

    def explain(self, error: BaseException) -> RuntimeError | None:
        """Return what is behind a collective that failed; None where it failed by itself."""
        if self._thread is None:
            return None
        try:
            if not self._failed.wait(_WORD_S):
                self._append("lost", cause=str(error))
                silent = self._silent(_ANSWER_S)
                return self._gone(silent, str(error)) if silent else None
            assert self._failure is not None
            return self._explained(self._failure)
        except dist.DistError as problem:
            return PeerError(f"{error}; and the store, on which ranks agree, is gone: {problem}")

    def leave(self) -> None:
        """Leave the loop early; return when all ranks did so at the same step.

        Raises ``UnevenInputs`` or ``PeerError`` where another rank goes on.
        """
        if self._thread is None:
            return
        mine = self._steps()
        self._leaves += 1
        word = f"{mine} {self.rank}"
        first = self._store.compare_set(f"left/{self._leaves}", "", word).decode()
        step, rank = map(int, first.split())
        if first == word:
            self._append("left", at=mine)
        if step != mine:
            raise UnevenInputs(
                f"rank {self.rank} left the loop after {mine} batches, rank {rank} after {step}: "
                "ranks must leave it together, or let it end by itself"
            )
        if self._store.add(f"gone/{self._leaves}", 1) == len(self._ranks):
            self._append("all-left")
        if not self._settled.wait(default_pg_timeout.total_seconds()):
            raise UnevenInputs(
                f"rank {self.rank} left the loop after {mine} batches; other ranks neither left it "
                f"nor failed within {default_pg_timeout}"
            )
        self._settled.clear()
        self.check()
        self._left = None

    def check(self) -> None:
        """Raise where another rank failed, or left before the step that this one begins."""
        if self._failure is not None:
            raise self._explained(self._failure)
        left = self._left
        if left is not None and left[1] < self._steps():
            raise self._left_behind(*left)

    # The thread.

    def _listen(self) -> None:
        bell, read = f"bell/{self.rank}", 0
        while not self._closing:
            try:
                self._own.wait([bell], _DAY)
                self._own.delete_key(bell)
                while not self._closing and self._own.check([f"log/{read}"]):
                    self._hear(json.loads(self._own.get(f"log/{read}")))
                    read += 1
            except dist.DistStoreError:
                continue  # a day without news
            except Exception:
                return  # the store is gone: there will be no more news

    def _hear(self, entry: Entry) -> None:
        kind = entry["kind"]
        if kind == "all-left":
            self._settled.set()
        elif entry["rank"] == self.rank or self._failure is not None:
            pass
        elif kind == "left":
            self._left = (entry["rank"], entry["at"])
            if self._steps() > entry["at"]:
                self._fail({**entry, "kind": "behind"})
        else:
            self._fail(entry)

    def _fail(self, entry: Entry) -> None:
        """Note another rank's failure and get the training thread out of its collective."""
        self._own.set(f"heard/{self.rank}", json.dumps(endpoints()))
        self._failure = entry
        self._failed.set()
        self._settled.set()
        if self._out.wait(_MOMENT_S):
            return
        far = set(entry["ends"])
        with contextlib.suppress(RuntimeError):  # the store may end with the rank that failed
            for rank in self._ranks:
                soon = time.monotonic() + _WORD_S
                if rank != entry["rank"] and _comes(self._own, f"heard/{rank}", soon):
                    far |= set(json.loads(self._own.get(f"heard/{rank}")))
        abort_devices()
        break_connections(far, self._spared)

    # Helpers of both.

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
        """Return the ranks that did not answer in time."""
        deadline = time.monotonic() + seconds
        others = [rank for rank in self._ranks if rank != self.rank]
        return [rank for rank in others if not _comes(self._store, f"heard/{rank}", deadline)]

    # What is said on this rank.

    def _explained(self, entry: Entry) -> RuntimeError:
        """Return the error that another rank's entry means on this one."""
        if entry["kind"] == "behind":
            return self._left_behind(entry["rank"], entry["at"])
        rank, host, cause = entry["rank"], entry["host"], entry["cause"]
        if entry["kind"] == "lost":
            silent = self._silent(_ANSWER_S)
            if silent:
                return self._gone(silent, cause)
            text = f"rank {rank} ({host}) lost its connection to another rank: {cause}"
            return PeerError(text, rank=rank, host=host, cause=cause)
        text = f"rank {rank} ({host}) failed inside Join: {cause}\n{entry['traceback']}"
        return PeerError(text, rank=rank, host=host, cause=cause, traceback=entry["traceback"])

    def _gone(self, ranks: Sequence[int], error: str) -> PeerError:
        hosts = []
        for rank in ranks:
            with contextlib.suppress(RuntimeError):
                hosts.append(self._store.multi_get([f"host/{rank}"])[0].decode())
        where = f" ({', '.join(sorted(set(hosts)))})" if hosts else ""
        return PeerError(
            f"rank {format_ranks(ranks)}{where} is gone without a word (killed, or out of "
            f"memory?); the collective that needed it failed with: {error}",
            rank=ranks[0],
            host=hosts[0] if hosts else "",
            cause="gone without a word",
        )

    def _left_behind(self, rank: int, step: int) -> UnevenInputs:
        return UnevenInputs(
            f"rank {rank} left the loop after {step} batches, rank {self.rank} went on to its "
            f"batch {self._steps()}: ranks must leave it together, or let it end by itself"
        )


def _comes(store: Any, key: str, deadline: float) -> bool:
    """Wait for a key; asks now and then, because torch logs a warning for a wait that ends late."""
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _ports(store: Any) -> list[int]:
    """Return the port of the TCP store behind a store, if there is one."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return [store.port] if isinstance(store, dist.TCPStore) else []
