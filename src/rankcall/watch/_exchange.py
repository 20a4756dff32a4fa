"""Agree with the other nodes on one verdict, through the job's store.

While nothing hangs, a node only polls whether another node has opened a round. A node with an
overdue call opens one. Each node's leader posts its summary. The first that posted reads all
summaries and judges; if that takes too long, the next one does. The others only wait for the
verdict, so the store's work grows with the number of nodes, not with its square. ``compare_set``
makes sure that there is one verdict.

Keys, below ``rankcall/watch/<attempt>/``: ``latest``, the last round that is over;
``<round>/open``; ``<round>/posts``, a count; ``<round>/post/<number>``; ``<round>/verdict``.
``nodes``, a count, and ``node/<number>``: the ranks of a node, written once, so that a verdict can
name a lost node.
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
# The time for the other nodes to post: they poll every second, and wait for stacks. A round takes
# all of it only if a node is gone.
SETTLE_S = 6.0
_JUDGE_S = 2.0  # for one node to judge, before the next one does
_JUDGE_RANK_S = 0.001  # and for each rank of the world: several times as long as it takes
_JUDGES = 5  # nodes that judge in turn before a node stops waiting for a verdict
_PROBE_S = 2.0  # for an answer: a store whose host was stopped never gives one
_RETRY_S = 60.0
_MOST_BYTES = 1 << 28  # of a verdict
_POLL_S = 0.05
_POLL_RANK_S = 0.00005  # and for each rank of the world, to limit the polls of all nodes together


class Agreed(NamedTuple):
    """The result of a round. If ``by_me``, this rank judged, and so it prints the verdict."""

    verdict: bytes
    by_me: bool


class Unreachable(Exception):
    """The store does not answer."""


class _NoStore(Exception):
    """There is no store yet."""


class Exchange:
    """One node's side of the rounds. ``open_store`` connects; it returns None without a store.

    Each use runs on a helper thread, which is left behind if the store does not answer: no timeout
    applies to a store whose host was stopped.
    """

    def __init__(self, open_store: Callable[[], Any], settle_s: float = SETTLE_S) -> None:
        self._open_store = open_store
        self._settle_s = settle_s
        self._store: Any = None
        self._lost_until = 0.0
        self._signed: list[Member] = []
        self.keys: list[str] = []  # of the last round that this node judged

    def asked(self, members: Sequence[Member] = ()) -> bool:
        """Return whether another node has opened a round; register our ranks if they are not yet.

        Raises ``Unreachable`` like ``agree``.
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
        """Whether this node's ranks are in the store."""
        return bool(self._signed)

    def agree(
        self, mine: Snapshot, world_size: int, judge: Callable[[Snapshot, bytes], bytes]
    ) -> Agreed:
        """Post the state of our ranks, and return the verdict of all nodes together.

        ``judge`` gets the snapshot of all ranks, and the verdict of the round before or ``b""``.
        Raises ``Unreachable`` if the store is gone or silent.
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
        """Judge by the summaries posted so far; the first verdict in the store counts."""
        self._hear(store, number, heard)
        known = _with_unheard(store, merge(list(heard.values())))
        proposed = judge(known, _verdict_of(store, number - 1))
        packed = zlib.compress(proposed)
        agreed = _unpacked(store.compare_set(f"{number}/verdict", "", packed))
        store.set("latest", str(number))
        self._forget(store, number, len(heard))
        return Agreed(agreed, agreed == proposed)

    def _hear(self, store: Any, number: int, heard: dict[int, NodeSnapshot]) -> None:
        """Read the summaries that were posted since the last call."""
        for post in range(1, int(store.add(f"{number}/posts", 0)) + 1):
            key = f"{number}/post/{post}"
            if post not in heard and store.check([key]):
                try:
                    heard[post] = decode(bytes(store.get(key)))
                except ValueError:
                    heard[post] = NodeSnapshot(0, [], no_calls())

    def _forget(self, store: Any, number: int, posts: int) -> None:
        """Delete the round before the last one, so that a long job does not fill the store."""
        old, self.keys = self.keys, [f"{number}/post/{post}" for post in range(1, posts + 1)]
        self.keys += [f"{number}/{name}" for name in ("open", "posts", "verdict")]
        for key in old:
            store.delete_key(key)

    def _guarded(self, use: Callable[[Any], T], limit_s: float) -> T:
        """Use the store on a helper thread, for at most ``limit_s``."""
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
        else:
            call.give_up()
        self._store = None
        self._lost_until = time.monotonic() + _RETRY_S
        raise Unreachable(why)


def _round(store: Any) -> int:
    return int(store.get("latest")) + 1 if store.check(["latest"]) else 1


def _turn_s(world_size: int) -> float:
    """Return how many seconds one node has to judge."""
    return _JUDGE_S + _JUDGE_RANK_S * world_size


def _verdict_of(store: Any, number: int) -> bytes:
    key = f"{number}/verdict"
    return _unpacked(store.get(key)) if store.check([key]) else b""


def _unpacked(verdict: bytes) -> bytes:
    return zlib.decompressobj().decompress(bytes(verdict), _MOST_BYTES)


def _with_unheard(store: Any, snapshot: Snapshot) -> Snapshot:
    """Mark the ranks that did not answer, with the host and pid that they registered."""
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
