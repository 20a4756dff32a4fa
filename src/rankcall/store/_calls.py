"""``barrier``, ``synchronize``, ``get_all``, ``clean_up`` and ``store_timeout``."""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import Store

from rankcall.c10d.calls import Call, on_fork
from rankcall.c10d.client import run
from rankcall.c10d.connection import clock
from rankcall.c10d.errors import StoreLostError, check_store, lost
from rankcall.c10d.location import where
from rankcall.c10d.requests import Add, Check, Delete, Read, Set, Steps, Wait
from rankcall.durations import Duration, seconds
from rankcall.process import host_name
from rankcall.store import _errors, _protocol
from rankcall.store._errors import (
    Decoder,
    check_prefix,
    check_rank,
    check_world,
)
from rankcall.store._keys import BARRIER, CLEAN_UP, EXCHANGE, GET_ALL, Keys
from rankcall.store._protocol import (
    Claim,
    NotAllArrived,
    Unconfirmed,
    WorldsDiffer,
    announce,
    registered_sizes,
)
from rankcall.store.local import LocalStore, local_store

# Barriers without ranks: a counter gives out tickets, ``world_size`` of them to a generation.
#
# Nothing tells two processes apart here, so no missing process can be named. A process that timed
# out keeps its ticket, and waits with it when it calls again. If the answer to a request for a
# ticket was lost, the process does not know its ticket: it cannot call again under this prefix.


NO_RANK = -1


@dataclass
class Tickets:
    """The tickets of this process under one prefix that it has not passed a barrier with."""

    unused: list[int] = field(default_factory=list)
    is_in_doubt: bool = False  # a request for a ticket was not answered


class TooFew(NotAllArrived):
    """The deadline came first. ``arrived`` processes of this generation have come."""

    def __init__(self, arrived: int) -> None:
        super().__init__(())
        self.arrived = arrived


def draw(keys: Keys, tickets: Tickets) -> Steps[int]:
    """Return a ticket that this process has not used, or draw one. It counts from 1."""
    if tickets.unused:
        return tickets.unused.pop()
    if tickets.is_in_doubt:
        raise Unconfirmed
    try:
        ticket: int = yield Add(keys.tickets, 1)
    except BaseException:
        tickets.is_in_doubt = True
        raise
    return ticket


def meet(keys: Keys, ticket: int) -> Steps[None]:
    """Wait until all tickets of the generation are drawn. Raises ``TooFew``, ``WorldsDiffer``."""
    generation, position = divmod(ticket - 1, keys.world_size)
    if position == 0 and generation == 0:
        yield from announce(keys, b"%d" % keys.world_size)
    if position == keys.world_size - 1:
        yield Set(keys.passed(generation), b"1")
        if generation > 0:  # all have drawn a ticket of this one, so all have left the last
            yield Delete(keys.passed(generation - 1))
        return
    if (yield Wait((keys.passed(generation),))):
        return
    drawn = int((yield Read(keys.tickets)) or 0)
    if drawn >= (generation + 1) * keys.world_size:
        return
    others = []
    for size in registered_sizes((yield Read(keys.register))):
        world = keys.of_size(size)
        if size != keys.world_size and (yield Check((world.tickets,))):
            waiting = int((yield Read(world.tickets)) or 0) % size
            others += [Claim(NO_RANK, size, "", 0, "")] * waiting
    arrived = drawn - generation * keys.world_size
    if others:
        here = [Claim(NO_RANK, keys.world_size, "", 0, "")] * arrived
        raise WorldsDiffer([*here, *others])
    raise TooFew(arrived)


LARGEST = 7 << 20  # a TCPStore closes the connection of a process that sends 8 MiB
_RETIRED = 1024

T = TypeVar("T")


@dataclass(eq=False)
class LocalMember(_protocol.Member):
    """A member of this process, which one call at a time may use."""

    lock: Any = field(default_factory=threading.Lock)
    call: Call | None = None
    is_retired: bool = False  # it has cleaned up: the next use of the prefix needs another one


_members_here: weakref.WeakValueDictionary[str, _protocol.Member] = weakref.WeakValueDictionary()
_retired: deque[str] = deque(maxlen=_RETIRED)  # nonces of members that have cleaned up
on_fork(_members_here.clear)


def new_claim(rank: int, world_size: int) -> _protocol.Claim:
    """Return a claim of this process, with a nonce of its own."""
    host = re.sub(r"\s+", "_", host_name()) or "unknown"
    return _protocol.Claim(rank, world_size, os.urandom(6).hex(), os.getpid(), host)


@dataclass
class _Request:
    """One call of a public function, for its errors."""

    kind: str
    keys: Keys
    rank: int
    timeout: float
    what: str | None = None
    hosts: Mapping[int, str] | None = None
    decoder: Decoder | None = None
    did: str = "arrived"
    member: LocalMember | None = None  # of the last call with these arguments

    @property
    def name(self) -> str:
        return _errors.name_of(self.kind, self.keys.prefix, self.what)

    def late(self, error: _protocol.NotAllArrived) -> Exception:
        """Return the error for a timeout."""
        known = {**error.hosts, **_neighbours(self.keys.world_size, self.rank, error.hosts)}
        return _errors.timed_out(
            self.kind,
            self.keys,
            error,
            rank=self.rank,
            timeout=self.timeout,
            hosts={**known, self.rank: host_name(), **(self.hosts or {})},
            decoder=self.decoder,
            what=self.what,
            did=self.did,
        )

    def unnamed(self) -> Exception:
        """Return the error for a timeout in which no missing rank could be named."""
        return self.late(_protocol.NotAllArrived((), named=False))

    def explained(self, error: Exception, member: LocalMember, store: Store) -> Exception:
        """Return what to raise because of an error of the protocol."""
        if isinstance(error, _protocol.NotAllArrived):
            return self.late(error)
        if isinstance(error, _protocol.WorldsDiffer):
            return _errors.worlds_differ(self.kind, self.keys, self.rank, error.claims, self.what)
        if isinstance(error, _protocol.RankTaken):
            claims = [error.holder, member.claim]
            return _errors.claimed_twice(self.kind, self.keys, claims, self.what)
        if isinstance(error, _protocol.CleanUpPending):
            return _errors.clean_up_pending(
                self.kind, self.keys, error.missing, self.rank, self.timeout, self.what
            )
        if isinstance(error, _protocol.Unconfirmed):
            reason = f"{self.name}: requests to arrive were not answered; use another key_prefix"
            return lost(where(store), reason)
        if isinstance(error, StoreLostError):
            return StoreLostError(
                f"{self.name}: {error}", host=error.host, is_silent=error.is_silent
            )
        return error


def _neighbours(world_size: int, rank: int, known: Mapping[int, str]) -> dict[int, str]:
    """Return the hosts of the ranks beside those known: torchrun numbers ranks host by host."""
    size = os.environ.get("LOCAL_WORLD_SIZE") or "0"
    if os.environ.get("WORLD_SIZE") != str(world_size) or not size.isdecimal() or int(size) < 1:
        return {}
    by_host = {
        known_rank // int(size): host for known_rank, host in {**known, rank: host_name()}.items()
    }
    return {
        unknown_rank: by_host[unknown_rank // int(size)]
        for unknown_rank in range(world_size)
        if unknown_rank // int(size) in by_host and unknown_rank not in known
    }


def _local_member(state: LocalStore, keys: Keys, rank: int) -> LocalMember:
    """Return this process as a rank of a world, on this store object."""
    place = keys.prefix, keys.attempt, keys.world_size, rank
    member: LocalMember | None = state.members.get(place)
    if member is None or member.is_retired:
        new = LocalMember(new_claim(rank, keys.world_size), _members_here, _retired)
        if member is not None:
            state.members.pop(place, None)
        member = state.members.setdefault(place, new)
        _members_here[member.claim.nonce] = member
    return member


def _wait_for_earlier_call(member: LocalMember, keys: Keys, store: Store, deadline: float) -> None:
    """Reserve a member for one call when a call that its caller has given up has ended."""
    earlier_call = member.call
    if earlier_call is not None and not earlier_call.is_abandoned:
        raise _errors.claimed_by_a_thread(keys, member.claim)
    if not member.lock.acquire(timeout=max(0.0, min(deadline - clock.monotonic(), 1e6))):
        raise lost(where(store), "no answer to an earlier call yet")


def _perform(
    store: Store,
    request: _Request,
    steps: Callable[[LocalMember], Steps[T]],
    unnamed: Callable[[], Exception] | None = None,
    kind: str | None = None,
) -> T:
    """Run a protocol for one rank; ``kind`` goes on to the next generation when it has passed."""
    keys = request.keys
    local = local_store(store)
    deadline = clock.monotonic() + request.timeout
    left = request.timeout
    while True:
        member, call = request.member, Call()
        if member is None or member.is_retired:
            member = request.member = _local_member(local, keys, request.rank)
        if not member.lock.acquire(False):
            try:
                _wait_for_earlier_call(member, keys, store, deadline)
            except StoreLostError as error:
                raise request.explained(error, member, store) from None
        member.call = call
        try:
            result = run(store, left, steps(member), call, unnamed)
            if kind is not None:
                member.progress[kind].advance()
            return result
        except _protocol.SameProcess as same:
            # This process is this rank already, by way of another store object.
            local.members[keys.prefix, keys.attempt, keys.world_size, request.rank] = same.member
            request.member = None
            left = max(0.001, deadline - clock.monotonic())
        except (
            _protocol.NotAllArrived,
            _protocol.WorldsDiffer,
            _protocol.RankTaken,
            _protocol.CleanUpPending,
            _protocol.Unconfirmed,
        ) as error:
            raise request.explained(error, member, store) from None
        except StoreLostError as error:
            raise request.explained(error, member, store) from error.__cause__
        finally:
            if call.has_helper:
                call.when_over(member.lock.release)
            else:
                member.lock.release()


def barrier(
    store: Store,
    world_size: int,
    key_prefix: str,
    barrier_timeout: Duration = 300,
    rank: int | None = None,
    rank_tracing_decoder: Callable[[int], str] | None = None,
    trace_timeout: Duration = 10,
    *,
    what: str | None = None,
    hosts: Mapping[int, str] | None = None,
    attempt: int | None = None,
) -> None:
    """Wait until all ranks are here; name every missing rank, on every rank, if they are not.

    A rank needs one round trip to a ``TCPStore``, two to other stores, and two more the first time.
    It may call from any thread; the store's own connection and timeout are not touched.

    Args:
        store: Any ``torch.distributed.Store``.
        world_size: How many ranks there are.
        key_prefix: Names the barrier. It serves any number of barriers, one after the other.
        barrier_timeout: In seconds. The call ends at the latest one second later (on a
            ``FileStore`` two), also if the store's host is stopped.
        rank: This rank. Then a rank that timed out may call again: it has arrived, and is not
            counted twice. Without it, processes are counted, and none can be named.
        rank_tracing_decoder: Turns a rank into a name that a person knows, for the error.
        trace_timeout: How long naming the missing may take after the timeout, in seconds; never
            more than one second. With 0, no rank is named.
        what: The purpose of the barrier; it stands in every error.
        hosts: The launcher's table of hosts by rank. Without it, the hosts are known of ranks that
            have been at this barrier before.
        attempt: Keeps the keys of a restarted job apart; by default torchrun's restart count.

    Raises:
        BarrierTimeout: Not all ranks came in time.
        WorldMismatchError: Other ranks wait in a world of another size, or another process is this
        rank. StoreLostError: The store's host is gone, or does not answer.
        ValueError: An argument is out of its range.
        TypeError: An argument is of the wrong type.
    """
    state = local_store(store)
    check_prefix(key_prefix)
    check_world(world_size)
    timeout_s = seconds(barrier_timeout, "barrier_timeout")
    trace_s = seconds(trace_timeout, "trace_timeout", zero=True)
    keys = state.keys(key_prefix, attempt, world_size)
    if rank is None:
        if rank_tracing_decoder is not None:
            raise ValueError("rank_tracing_decoder names ranks: give rank as well")
        _barrier_without_ranks(store, keys, timeout_s, what)
        return
    check_rank(rank, world_size)
    request = _Request("barrier", keys, rank, timeout_s, what, hosts, rank_tracing_decoder)
    _perform(
        store,
        request,
        lambda member: _protocol.meet(keys, member, trace_s > 0),
        request.unnamed,
        BARRIER,
    )


def _barrier_without_ranks(store: Store, keys: Keys, timeout: float, what: str | None) -> None:
    """Wait until ``world_size`` processes are here."""
    state, call = local_store(store), Call()
    place = keys.prefix, keys.attempt, keys.world_size
    tickets: Tickets = state.members.setdefault(place, Tickets())
    drawn: list[int] = []

    def steps() -> Steps[None]:
        drawn.append((yield from draw(keys, tickets)))
        yield from meet(keys, drawn[0])

    def explained(error: Exception) -> Exception:
        name = _errors.name_of("barrier", keys.prefix, what)
        if isinstance(error, TooFew):
            return _errors.timed_out(
                "barrier",
                keys,
                error,
                rank=None,
                timeout=timeout,
                hosts={},
                what=what,
                arrived=error.arrived,
            )
        if isinstance(error, _protocol.WorldsDiffer):
            return _errors.worlds_differ("barrier", keys, None, error.claims, what)
        if isinstance(error, StoreLostError):
            return StoreLostError(f"{name}: {error}", host=error.host, is_silent=error.is_silent)
        reason = f"{name}: a request to arrive was not answered; use another key_prefix, or rank="
        return lost(where(store), reason)

    try:
        run(store, timeout, steps(), call)
    except (
        TooFew,
        _protocol.WorldsDiffer,
        _protocol.Unconfirmed,
        StoreLostError,
    ) as error:
        # The next call of this process waits with the same ticket.
        call.when_over(lambda: tickets.unused.extend(drawn))
        raise explained(error) from None


def synchronize(
    store: Store,
    data: bytes | str,
    rank: int,
    world_size: int,
    key_prefix: str,
    timeout: Duration = 300,
    *,
    host_rank: int = 0,
    what: str | None = None,
    attempt: int | None = None,
) -> list[bytes]:
    """Hand in ``data``, and return the data of all ranks, in the order of the ranks.

    Every rank gets the same list. A ``key_prefix`` serves any number of times. A rank that calls
    again after a timeout goes on waiting with the data that it handed in first.

    Args:
        store: Any ``torch.distributed.Store``.
        data: At most 7 MiB: a TCPStore takes no more. Text is encoded as UTF-8.
        rank: This rank.
        world_size: How many ranks there are.
        key_prefix: Names the exchange.
        timeout: In seconds; see ``barrier``.
        host_rank: The rank whose process hosts the store. It leaves last.
        what: The purpose of the exchange; it stands in every error.
        attempt: Keeps the keys of a restarted job apart; by default torchrun's restart count.

    Raises:
        BarrierTimeout: Not all ranks came in time; it has the complete list, on every rank.
        WorldMismatchError: As for ``barrier``.
        StoreLostError: The store's host is gone, or does not answer.
        ValueError: An argument is out of its range.
        TypeError: An argument is of the wrong type.
    """
    state = local_store(store)
    check_prefix(key_prefix)
    check_rank(rank, world_size)
    check_rank(host_rank, world_size, "host_rank")
    timeout_s = seconds(timeout, "timeout")
    keys = state.keys(key_prefix, attempt, world_size)
    request = _Request("synchronize", keys, rank, timeout_s, what)
    value = data if data.__class__ is bytes and len(data) <= LARGEST else _data(data, rank)
    return _perform(
        store,
        request,
        lambda member: _protocol.exchange(keys, member, value, host_rank),
        request.unnamed,
        EXCHANGE,
    )


def _data(data: bytes | str, rank: int) -> bytes:
    if isinstance(data, str):
        data = data.encode()
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"data must be bytes or str; got {type(data).__name__} on rank {rank}")
    data = bytes(data)
    if len(data) > LARGEST:
        raise ValueError(
            f"data is {len(data):,} bytes on rank {rank}; a store takes {LARGEST:,} at most: "
            "use a collective for more"
        )
    return data


def get_all(
    store: Store,
    rank: int,
    prefix: str,
    world_size: int,
    *,
    host_rank: int = 0,
    timeout: Duration | None = None,
    what: str | None = None,
    attempt: int | None = None,
) -> list[bytes]:
    """Return the values of the keys ``{prefix}0`` to ``{prefix}{world_size - 1}``.

    Args:
        store: Any ``torch.distributed.Store``.
        rank: This rank.
        prefix: The beginning of the keys, which the ranks set themselves.
        world_size: How many ranks there are.
        host_rank: The rank whose process hosts the store. It returns when all others have read, so
            that its process may end; the others do not wait.
        timeout: In seconds; by default the store's own.
        what: The purpose of the values; it stands in every error.
        attempt: Keeps the keys of a restarted job apart; by default torchrun's restart count.

    Raises:
        BarrierTimeout: ``missing_ranks`` have not set their key, or, on ``host_rank``, have not
            read.
        WorldMismatchError: Another process is this rank.
        StoreLostError: The store's host is gone, or does not answer.
        ValueError: An argument is out of its range.
        TypeError: An argument is of the wrong type.
    """
    state = local_store(store)
    check_prefix(prefix)
    check_rank(rank, world_size)
    check_rank(host_rank, world_size, "host_rank")
    own: Any = store  # torch's types leave ``timeout`` out
    timeout_s = seconds(own.timeout if timeout is None else timeout, "timeout")
    keys = state.keys(prefix, attempt, world_size)
    names = [f"{prefix}{index}" for index in range(world_size)]
    request = _Request("get_all", keys, rank, timeout_s, what, did="have set their key")
    values, unread = _perform(
        store,
        request,
        lambda member: _protocol.gather(keys, member, names, host_rank),
        kind=GET_ALL,
    )
    if unread:
        request.did = "have read the values"
        raise request.late(_protocol.NotAllArrived(unread))
    return values


def clean_up(
    store: Store,
    key_prefix: str,
    world_size: int,
    rank: int | None = None,
    *,
    attempt: int | None = None,
    timeout: Duration = 60,
) -> None:
    """Remove all keys that this package made under ``key_prefix``, also those of earlier attempts.

    With ``rank``, every rank calls it once it has no more use for the prefix. No rank waits, and
    the last rank removes the keys. A rank that uses the prefix again before that waits for it.
    Without ``rank``, the keys are removed at once: no process may be using the prefix. Keys that
    others made are never touched.

    Raises ``StoreLostError``, ``WorldMismatchError``, ``ValueError`` and ``TypeError``.
    """
    state = local_store(store)
    check_prefix(key_prefix)
    check_world(world_size)
    timeout_s = seconds(timeout, "timeout")
    keys = state.keys(key_prefix, attempt, world_size)
    place = keys.prefix, keys.attempt, keys.world_size
    if rank is None:
        call = Call()
        run(store, timeout_s, _protocol.remove_all(keys), call)
        for key in [key for key in state.members if key[:3] == place]:
            del state.members[key]
        return
    check_rank(rank, world_size)
    request = _Request("clean_up", keys, rank, timeout_s)
    cleaned: LocalMember | None = state.members.get((*place, rank))
    if cleaned is not None and cleaned.is_retired:
        cleaned.is_retired = False
        is_pending = _perform(store, request, lambda member: _retire(keys, member))
        if is_pending:
            return
    _perform(store, request, lambda member: _retire(keys, member))


def _retire(keys: Keys, member: LocalMember) -> Steps[bool]:
    try:
        return (yield from _protocol.clean_up(keys, member))
    finally:
        if member.of_kind(CLEAN_UP).has_begun:
            member.is_retired = True
            if member.claim.nonce not in _retired:
                _retired.append(member.claim.nonce)


@contextmanager
def store_timeout(store: Store, timeout: Duration) -> Iterator[None]:
    """Set the store's timeout to ``timeout`` seconds; put the old one back on every way out.

    The timeout is the store object's: all threads that use it see it, and those that use the same
    store through a ``PrefixStore``. The functions of this module do not need it. Raises
    ``ValueError`` for a timeout that is not positive.
    """
    check_store(store)
    timeout_s = seconds(timeout, "timeout")
    known: Any = store  # torch's types leave ``timeout`` out
    before: timedelta = known.timeout
    known.set_timeout(timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        known.set_timeout(before)
