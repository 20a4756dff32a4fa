"""Agree with the other nodes on one verdict, through the job's store.

Nothing is sent while nothing hangs, but a look now and then whether another node has asked. Who
finds something overdue opens a round; each node's leader posts its summary; the first to have
posted reads them all and judges, and the next where that takes too long. The others only wait for
the verdict, so the store's work grows with the nodes, not with their square. ``compare_set`` makes
the verdict one.

Keys, below ``rankcall/watch/<attempt>/``: ``latest``, the last round that is over;
``<round>/open``; ``<round>/posts``, a count; ``<round>/post/<number>``; ``<round>/verdict``.
``nodes``, a count, and ``node/<number>``: who is where, written once, so that a node that is lost
can be named.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from rankcall.analysis.state.node_snapshot import (
    NodeSnapshot,
    decode,
    encode,
    merge,
    node_snapshot_of,
)
from rankcall.analysis.state.snapshot import RankState, Snapshot, no_calls
from rankcall.background import BackgroundCall

T = TypeVar("T")
Member = tuple[int, str, int]  # rank, host, pid
# What the other nodes get to post: they look every second whether they are asked, and wait for
# stacks. It is waited for in full only where a node is gone.
SETTLE_S = 6.0
_JUDGE_S = 2.0  # what one node gets to judge, before the next does
_JUDGE_RANK_S = 0.001  # and for each rank of the world: several times what it takes
_JUDGES = 5  # who get to judge, in turn, before a node gives the others up
_PROBE_S = 2.0  # for an answer: a store whose host stands still never gives one
_RETRY_S = 60.0
_MOST_BYTES = 1 << 28  # of a verdict
_POLL_S = 0.05
_POLL_RANK_S = 0.00005  # and for each rank of the world: all nodes together ask so often


class Agreed(NamedTuple):
    """What a round came to. ``by_me``: this rank judged, so it is the one to print."""

    verdict: bytes
    by_me: bool


class Unreachable(Exception):
    """The store does not answer."""


class _NoStore(Exception):
    """There is no store yet."""


class Exchange:
    """One node's side of the rounds. ``open_store`` makes a connection, or None for no store yet.

    Each use runs on a helper thread that is left behind where the store does not answer: no
    timeout applies to a store whose host was stopped.
    """

    def __init__(self, open_store: Callable[[], Any], settle_s: float = SETTLE_S) -> None:
        self._open_store = open_store
        self._settle_s = settle_s
        self._store: Any = None
        self._lost_until = 0.0
        self._signed: list[Member] = []
        self.keys: list[str] = []  # of the round before this, which we judged

    def asked(self, members: Sequence[Member] = ()) -> bool:
        """Tell whether another node has opened a round; sign on our ranks where that is to be done.

        Raises ``Unreachable`` as ``agree``.
        """

        def ask(store: Any) -> bool:
            self._sign(store, list(members))
            return bool(store.check([f"{_round(store)}/open"]))

        return self._guarded(ask, _PROBE_S)

    def _sign(self, store: Any, members: list[Member]) -> None:
        if members and members != self._signed:
            store.set(f"node/{int(store.add('nodes', 1))}", json.dumps(members))
            self._signed = members

    @property
    def signed_on(self) -> bool:
        """Whether the store has been told who we are."""
        return bool(self._signed)

    def agree(
        self, mine: Snapshot, world_size: int, judge: Callable[[Snapshot, bytes], bytes]
    ) -> Agreed:
        """Post where our ranks stand, and return the verdict of all nodes together.

        ``judge`` gets where all ranks stand, and the verdict of the round before (or nothing).
        Raises ``Unreachable`` where the store is gone or silent.
        """
        self._guarded(_round, _PROBE_S)
        return self._guarded(
            lambda store: self._agree(store, mine, world_size, judge),
            self._settle_s + _JUDGES * _turn_s(world_size),
        )

    def _agree(
        self, store: Any, mine: Snapshot, world_size: int, judge: Callable[[Snapshot, bytes], bytes]
    ) -> Agreed:
        number = _round(store)
        store.add(f"{number}/open", 1)
        post, own = int(store.add(f"{number}/posts", 1)), node_snapshot_of(mine)
        store.set(f"{number}/post/{post}", encode(own))
        verdict, settled = f"{number}/verdict", time.monotonic() + self._settle_s
        heard = {post: own}
        if post == 1:
            while not _covered(heard, world_size) and time.monotonic() < settled:
                time.sleep(_POLL_S)
                self._hear(store, number, heard)
        turn = settled + (post - 1) * _turn_s(world_size) if post > 1 else 0.0
        while not store.check([verdict]):
            if time.monotonic() >= turn:
                return self._decide(store, number, heard, judge)
            time.sleep(max(_POLL_S, _POLL_RANK_S * world_size))
        return Agreed(_verdict_of(store, number), False)

    def _decide(
        self,
        store: Any,
        number: int,
        heard: dict[int, NodeSnapshot],
        judge: Callable[[Snapshot, bytes], bytes],
    ) -> Agreed:
        """Judge by what has been posted; whoever is first to is the one who has."""
        self._hear(store, number, heard)
        known = _with_unheard(store, merge(list(heard.values())))
        proposed = judge(known, _verdict_of(store, number - 1))
        packed = zlib.compress(proposed)
        agreed = _unpacked(store.compare_set(f"{number}/verdict", "", packed))
        store.set("latest", str(number))
        self._forget(store, number, len(heard))
        return Agreed(agreed, agreed == proposed)

    def _hear(self, store: Any, number: int, heard: dict[int, NodeSnapshot]) -> None:
        """Read the summaries that have come since."""
        for post in range(1, int(store.add(f"{number}/posts", 0)) + 1):
            key = f"{number}/post/{post}"
            if post not in heard and store.check([key]):
                try:
                    heard[post] = decode(bytes(store.get(key)))
                except ValueError:
                    heard[post] = NodeSnapshot(0, [], no_calls())

    def _forget(self, store: Any, number: int, posts: int) -> None:
        """Delete the round before the last one: a long job must not fill the store."""
        old, self.keys = self.keys, [f"{number}/post/{post}" for post in range(1, posts + 1)]
        self.keys += [f"{number}/{name}" for name in ("open", "posts", "verdict")]
        for key in old:
            store.delete_key(key)

    def _guarded(self, use: Callable[[Any], T], limit_s: float) -> T:
        """Use the store on a thread of its own, for so long at most."""
        if time.monotonic() < self._lost_until:
            raise Unreachable("the store did not answer a moment ago")

        def work() -> T:
            self._store = self._store or self._open_store()
            if self._store is None:
                raise _NoStore("the default process group has not been made")
            return use(self._store)

        call = BackgroundCall(work, "rankcall-agree")
        why = f"no answer within {limit_s:g} s"
        if call.ended(limit_s):
            try:
                return call.outcome()
            except _NoStore as error:
                raise Unreachable(str(error)) from error
            except BaseException as error:
                why = repr(error)
        self._store = None
        self._lost_until = time.monotonic() + _RETRY_S
        raise Unreachable(why)


def _round(store: Any) -> int:
    return int(store.get("latest")) + 1 if store.check(["latest"]) else 1


def _turn_s(world_size: int) -> float:
    """Return how long one node gets to judge."""
    return _JUDGE_S + _JUDGE_RANK_S * world_size


def _verdict_of(store: Any, number: int) -> bytes:
    key = f"{number}/verdict"
    return _unpacked(store.get(key)) if store.check([key]) else b""


def _unpacked(verdict: bytes) -> bytes:
    return zlib.decompressobj().decompress(bytes(verdict), _MOST_BYTES)


def _with_unheard(store: Any, snapshot: Snapshot) -> Snapshot:
    """Note who has not answered, and where each of them is as far as it was signed on."""
    silent = {state.rank for state in snapshot.ranks if state.blind}
    places: dict[int, tuple[str, int]] = {}
    last = int(store.add("nodes", 0)) if silent else 0
    for number in range(last, 0, -1):
        if silent <= places.keys():
            break
        key = f"node/{number}"
        for rank, host, pid in json.loads(bytes(store.get(key))) if store.check([key]) else []:
            places.setdefault(rank, (host, pid))
    ranks = [
        RankState(state.rank, *places.get(state.rank, ("", 0)), blind=True, unheard=True)
        if state.blind
        else state
        for state in snapshot.ranks
    ]
    return replace(snapshot, ranks=ranks)


def _covered(heard: dict[int, NodeSnapshot], world_size: int) -> bool:
    return len({state.rank for part in heard.values() for state in part.ranks}) >= world_size > 0
