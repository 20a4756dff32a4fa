"""``failover``: a store that outlives its host.

A list of hosts, each with a store of torch's own; all ranks use the first until it is gone, then
the next. A store that is new knows nothing, so each rank counts what it has been through, prefix
by prefix. A rank that finds the old store gone in the middle of a barrier makes up for it in the
new one, where those who were through with it already say so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.distributed import Store

from rankcall.store import _exchange
from rankcall.store._barrier import barrier
from rankcall.store._bounded import within
from rankcall.store._checks import check_rank, check_seconds
from rankcall.store._errors import BarrierTimeout, StoreLost
from rankcall.store._link import Link
from rankcall.store._member import Call
from rankcall.store._places import Places, place_of

__all__ = ["Failover", "failover"]

_SLICE_S = 0.5  # how long a rank that makes up for a barrier waits before it asks who is through
_PIECE_S = 20.0  # how long a stopped host may go unnoticed
_LOOK_S = 2.0  # what looking for others on later hosts may take
_FOREVER_S = 1e9
_MOVED = "rankcall.failover/moved"
T = TypeVar("T")


def failover(
    hosts: Sequence[str], serve: int | None = None, *, connect_timeout: float = 10.0
) -> Failover:
    """Use the stores at ``hosts`` (``"address:port"``), one after the other.

    All ranks give the same list. The process that hosts one of them gives its index as ``serve``,
    and its store is ready from then on. ``connect_timeout``, in seconds, is what connecting to one
    host may take before the next is tried. Raises ``ValueError`` for a list that is none, and
    ``StoreLost`` where no host answers.
    """
    places = [place_of(one) for one in hosts]
    if not places:
        raise ValueError("failover needs at least one host")
    if serve is not None:
        check_rank(serve, len(places), "serve")
    return Failover(Places(places, check_seconds(connect_timeout, "connect_timeout")), serve)


class Failover:
    """``store`` is the one in use. One thread at a time.

    A host that dies is left at once; one that is stopped when a call's time is over, or after
    twenty seconds, whichever is sooner. Who waits longer than that, or in vain, looks whether
    others have gone on with a later host, and follows them.
    """

    def __init__(self, places: Places, serve: int | None) -> None:
        self._places = places
        self._rounds: dict[tuple[str, str], int] = {}  # what this rank is through with
        self._results: dict[str, list[bytes]] = {}  # of the last exchange under each prefix
        self._settled: set[tuple[str, str]] = set()  # nobody was further than this rank
        self._lost: str | None = None  # why the store in use is none
        self._doubt = False  # the last call waited in vain
        self._served = None if serve is None else places.serve(serve)
        self.store: Store = places.connect("no host has answered yet", _FOREVER_S)

    @property
    def moves(self) -> int:
        """How many hosts have been left behind."""
        return self._places.at

    def _leave(self, reason: str) -> None:
        """Give the store in use up."""
        self._places.at += 1
        self._lost = reason
        self._settled.clear()

    def _move(self, seconds: float) -> None:
        """Go on to the next host, and say there what this rank is through with."""
        until = time.monotonic() + seconds
        store = self._places.connect(self._lost or "", seconds)

        def step(link: Link, call: Call, until: float) -> bool:
            link.set(_MOVED, b"1")
            for (kind, prefix), count in self._rounds.items():
                result = self._results.get(prefix, []) if kind == "s" else []
                link.set(_through(kind, prefix, count - 1), _joined(result))
            return link.check([_MOVED])  # an answer: all of it has come there

        try:
            within(store, max(0.001, until - time.monotonic()), step, step)
        except StoreLost as error:
            self._leave(str(error))
            raise
        self.store, self._lost = store, None

    def _again(
        self, kind: str, prefix: str, timeout: float, call: Callable[[Store, str, float], T],
        through: Callable[[bytes], T],
    ) -> T:  # fmt: skip
        """Make a call; after a move make up for it on the new host, in the time that is left."""
        turn, deadline = self._rounds.get((kind, prefix), 0), time.monotonic() + timeout
        while True:
            left = max(0.001, deadline - time.monotonic())
            try:
                found = self._piece(kind, prefix, turn, left, call, through)
                break
            except StoreLost as error:
                if self._lost is None:
                    self._leave(str(error))
                if time.monotonic() >= deadline or self._places.over:
                    raise
            except BarrierTimeout:
                self._doubt = True
                if time.monotonic() >= deadline:
                    raise
        self._doubt = False
        self._settled.add((kind, prefix))
        self._rounds[kind, prefix] = turn + 1
        return found

    def _piece(
        self, kind: str, prefix: str, turn: int, left: float,
        call: Callable[[Store, str, float], T], through: Callable[[bytes], T],
    ) -> T:  # fmt: skip
        """Go on with a call for as long as a stopped host may go unnoticed."""
        deadline = time.monotonic() + left
        look = min(left / 2, _LOOK_S)
        if self._doubt and self._lost is None and self._places.later_has(_MOVED, look):
            self._leave("others have gone on with a later host")
        if self._lost is not None:
            self._move(left)
        certain = not self.moves or (kind, prefix) in self._settled
        if not certain:
            told = self._told(_through(kind, prefix, turn), deadline)
            if told is not None:
                return through(told)
        # On a new host the rounds count from where they are, not from the first.
        name = prefix if not self.moves else f"{prefix}/{turn}"
        left = max(0.001, deadline - time.monotonic())
        return call(self.store, name, min(left, _PIECE_S if certain else _SLICE_S))

    def _told(self, key: str, deadline: float) -> bytes | None:
        """Return what one who was through with a round before the move has said of it."""

        def step(link: Link, call: Call, until: float) -> tuple[bytes | None]:
            return (link.read(key),)

        left = max(0.001, deadline - time.monotonic())
        return within(self.store, min(left, self._places.timeout), step, step)[0]

    def barrier(
        self, world_size: int, key_prefix: str, barrier_timeout: float = 300,
        rank: int | None = None, **named: Any,
    ) -> None:  # fmt: skip
        """Do as ``rankcall.store.barrier``, on whichever host is there."""
        self._again(
            "b", key_prefix, check_seconds(barrier_timeout, "barrier_timeout"),
            lambda store, name, left: barrier(store, world_size, name, left, rank, **named),
            lambda told: None,
        )  # fmt: skip

    def synchronize(
        self, data: bytes, rank: int, world_size: int, key_prefix: str, timeout: float = 300,
        **named: Any,
    ) -> list[bytes]:  # fmt: skip
        """Do as ``rankcall.store.synchronize``, on whichever host is there."""
        found = self._again(
            "s", key_prefix, check_seconds(timeout, "timeout"),
            lambda store, name, left: _exchange.synchronize(
                store, data, rank, world_size, name, left, **named
            ),
            lambda told: _exchange.unframed(told, world_size),
        )  # fmt: skip
        self._results[key_prefix] = found
        return found


def _through(kind: str, prefix: str, turn: int) -> str:
    return f"{prefix}/rankcall.{kind}0/through{turn}"


def _joined(result: Sequence[bytes]) -> bytes:
    return b"".join(_exchange.framed(data, rank) for rank, data in enumerate(result))
