"""``failover``: a store that outlives its host.

All ranks have the same list of hosts, each with a store of torch's own. They use the first until it
is gone, then the next. A new store knows nothing, so each rank counts the barriers and exchanges
that it has passed, by prefix, and writes the counts to the new store. A rank that finds the old
store gone in the middle of a barrier makes up for it in the new store, unless a rank that had
passed says so there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.distributed import Store, TCPStore

from rankcall.c10d import client
from rankcall.c10d.connection import clock
from rankcall.c10d.errors import StoreLostError
from rankcall.c10d.own_connections import connect_to
from rankcall.c10d.requests import Check, Read, Set, Steps
from rankcall.durations import Duration, seconds
from rankcall.store.arguments import check_rank
from rankcall.store.barriers import barrier
from rankcall.store.errors import BarrierTimeout
from rankcall.store.exchanges import synchronize
from rankcall.store.protocol import frame, unframe
from rankcall.whole_numbers import whole_number

# A rank that makes up for a barrier on a new host cannot know whether the others have passed it on
# the old one: they say so on the new host, but only once they get there. So it waits in the barrier
# for this long, then asks whether one of them has said so, and goes on waiting.
_SLICE_S = 0.5
# A host that is stopped closes no connection. So a long wait is cut into pieces of this length, and
# between two of them the rank looks whether others have moved to a later host.
_PIECE_S = 20.0
_LOOK_S = 2.0  # for a look for other ranks on later hosts
_FOREVER_S = 1e6
_MOVED = "rankcall.failover/moved"
_LEAST_S = 0.001
T = TypeVar("T")


def failover(
    hosts: Sequence[str], serve: int | None = None, *, connect_timeout: Duration = 10.0
) -> Failover:
    """Use the stores at ``hosts`` (``"address:port"``), one after the other.

    Args:
        hosts: The same list on all ranks.
        serve: The index of the host whose store this process hosts, from now on.
        connect_timeout: How long connecting to one host may take before the next is tried, in
            seconds.

    Raises:
        ValueError: The list is empty, or a host is not ``"address:port"``.
        StoreLostError: No host answers.
    """
    places = [_place_of(host) for host in hosts]
    if not places:
        raise ValueError("failover needs at least one host")
    if serve is not None:
        check_rank(serve, len(places), "serve")
    return Failover(_Hosts(places, seconds(connect_timeout, "connect_timeout")), serve)


def _place_of(text: str) -> tuple[str, int]:
    """Return the address and the port of ``"address:port"``."""
    address, _, port = text.rpartition(":")
    number = whole_number(port, least=1, most=65535)
    if not address or number is None:
        raise ValueError(f"a host is 'address:port'; got {text!r}")
    return address.strip("[]"), number


class _Hosts:
    """The hosts in turn. ``index`` is the one in use."""

    def __init__(self, places: Sequence[tuple[str, int]], timeout: float) -> None:
        self._places = places
        self._ahead: dict[int, Store] = {}  # connections to later hosts
        self._tried = 0.0  # seconds that went into connecting to the one in use
        self.timeout = timeout
        self.index = 0

    @property
    def is_over(self) -> bool:
        """Whether no host is left."""
        return self.index >= len(self._places)

    def serve(self, index: int) -> Store:
        """Host one of the stores in this process."""
        address, port = self._places[index]
        return TCPStore(address, port, is_master=True, wait_for_workers=False)

    def connect(self, reason: str, within_s: float) -> Store:
        """Connect to the host in use, or to the next that answers.

        Raises ``StoreLostError``, with the ``reason`` why the last one was left, if none does in
        time.
        """
        until = clock.monotonic() + within_s
        while not self.is_over:
            left = max(0.0, min(self.timeout - self._tried, until - clock.monotonic()))
            store = self._ahead.get(self.index) or connect_to(*self._places[self.index], left)
            if store is not None:
                self._tried = 0.0
                return store
            self._tried += left
            if self._tried < self.timeout:
                raise StoreLostError(f"{reason}. No time was left to connect to the next host")
            self.index, self._tried = self.index + 1, 0.0
        names = ", ".join(f"{address}:{port}" for address, port in self._places)
        raise StoreLostError(f"no store is left of {names}: {reason}", host=names)

    def later_has(self, key: str, within_s: float) -> bool:
        """Return whether the store of a later host has a key."""
        until = clock.monotonic() + within_s
        for index in range(self.index + 1, len(self._places)):
            left = max(_LEAST_S, until - clock.monotonic())
            store = self._ahead.get(index) or connect_to(*self._places[index], left)
            if store is None:
                continue
            self._ahead[index] = store
            try:
                left = max(_LEAST_S, until - clock.monotonic())
                if client.perform(store, left, _check(key)):
                    return True
            except StoreLostError:
                del self._ahead[index]
        return False


class Failover:
    """A store that outlives its host. ``store`` is the one in use. One thread at a time.

    A host that dies is left at once. A host that is stopped is left when a call's time is over, or
    after twenty seconds if that is sooner. A call that waits longer, or that timed out, checks
    whether other ranks have moved to a later host, and follows them.
    """

    def __init__(self, hosts: _Hosts, serve: int | None) -> None:
        self._hosts = hosts
        self._passed: dict[tuple[str, str], int] = {}  # by kind and prefix
        self._results: dict[str, list[bytes]] = {}  # of the last exchange under each prefix
        self._settled: set[tuple[str, str]] = set()  # no rank was further than this one
        self._lost: str | None = None  # why the store in use cannot be used
        self._in_doubt = False  # the last call timed out
        self._served = None if serve is None else hosts.serve(serve)
        self.store: Store = hosts.connect("no host has answered yet", _FOREVER_S)

    @property
    def moves(self) -> int:
        """How many hosts have been left."""
        return self._hosts.index

    def barrier(
        self,
        world_size: int,
        key_prefix: str,
        barrier_timeout: Duration = 300,
        rank: int | None = None,
        **named: Any,
    ) -> None:
        """Do as ``rankcall.store.barrier``, on the host in use."""
        self._call(
            "b",
            key_prefix,
            seconds(barrier_timeout, "barrier_timeout"),
            lambda store, name, left: barrier(store, world_size, name, left, rank, **named),
            lambda blob: None,
        )

    def synchronize(
        self,
        data: bytes | str,
        rank: int,
        world_size: int,
        key_prefix: str,
        timeout: Duration = 300,
        **named: Any,
    ) -> list[bytes]:
        """Do as ``rankcall.store.synchronize``, on the host in use."""
        values = self._call(
            "s",
            key_prefix,
            seconds(timeout, "timeout"),
            lambda store, name, left: synchronize(
                store, data, rank, world_size, name, left, **named
            ),
            lambda blob: unframe(blob, world_size),
        )
        self._results[key_prefix] = values
        return values

    def _call(
        self,
        kind: str,
        prefix: str,
        timeout: float,
        call: Callable[[Store, str, float], T],
        passed: Callable[[bytes], T],
    ) -> T:
        """Make a call; after a move make up for it on the new host, in the time that is left."""
        turn, deadline = self._passed.get((kind, prefix), 0), clock.monotonic() + timeout
        while True:
            left = max(_LEAST_S, deadline - clock.monotonic())
            try:
                result = self._piece(kind, prefix, turn, left, call, passed)
                break
            except StoreLostError as error:
                if self._lost is None:
                    self._leave(str(error))
                if clock.monotonic() >= deadline or self._hosts.is_over:
                    raise
            except BarrierTimeout:
                self._in_doubt = True
                if clock.monotonic() >= deadline:
                    raise
        self._in_doubt = False
        self._settled.add((kind, prefix))
        self._passed[kind, prefix] = turn + 1
        return result

    def _piece(
        self,
        kind: str,
        prefix: str,
        turn: int,
        left: float,
        call: Callable[[Store, str, float], T],
        passed: Callable[[bytes], T],
    ) -> T:
        """Go on with a call for as long as a stopped host may go unnoticed."""
        deadline = clock.monotonic() + left
        look = min(left / 2, _LOOK_S)
        if self._in_doubt and self._lost is None and self._hosts.later_has(_MOVED, look):
            self._leave("other ranks have moved to a later host")
        if self._lost is not None:
            self._move(left)
        is_certain = not self.moves or (kind, prefix) in self._settled
        if not is_certain:
            left = max(_LEAST_S, deadline - clock.monotonic())
            key = _passed_key(kind, prefix, turn)
            blob = client.perform(self.store, min(left, self._hosts.timeout), _read(key))
            if blob is not None:
                return passed(blob)
        # On a new host the generations count from this turn, not from the first.
        name = prefix if not self.moves else f"{prefix}/{turn}"
        left = max(_LEAST_S, deadline - clock.monotonic())
        return call(self.store, name, min(left, _PIECE_S if is_certain else _SLICE_S))

    def _leave(self, reason: str) -> None:
        """Give up the host in use."""
        self._hosts.index += 1
        self._lost = reason
        self._settled.clear()

    def _move(self, within_s: float) -> None:
        """Go on to the next host, and write there how much this rank has passed."""
        until = clock.monotonic() + within_s
        store = self._hosts.connect(self._lost or "", within_s)

        def steps() -> Steps[bool]:
            yield Set(_MOVED, b"1")
            for (kind, prefix), count in self._passed.items():
                values = self._results.get(prefix, []) if kind == "s" else []
                blob = b"".join(frame(rank, value) for rank, value in enumerate(values))
                yield Set(_passed_key(kind, prefix, count - 1), blob)
            return bool((yield Check((_MOVED,))))  # an answer: the store has all of it

        try:
            client.perform(store, max(_LEAST_S, until - clock.monotonic()), steps())
        except StoreLostError as error:
            self._leave(str(error))
            raise
        self.store, self._lost = store, None


def _passed_key(kind: str, prefix: str, turn: int) -> str:
    return f"{prefix}/rankcall.0/failover/{kind}{turn}"


def _check(key: str) -> Steps[bool]:
    return bool((yield Check((key,))))


def _read(key: str) -> Steps[bytes | None]:
    value: bytes | None = yield Read(key)
    return value
