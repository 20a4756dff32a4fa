"""``barrier``: wait for all, and name whoever does not come, on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from torch.distributed import Store

from rankcall.store import _again, _anonymous, _messages
from rankcall.store._bounded import BEYOND_S, told, within
from rankcall.store._checks import check_rank, check_seconds, check_store, check_world
from rankcall.store._errors import BarrierTimeout, StoreLost
from rankcall.store._keys import Keys, attempt_of, keys_of
from rankcall.store._link import Link
from rankcall.store._meeting import Meeting, meeting
from rankcall.store._member import Call
from rankcall.store._sizes import strays
from rankcall.store._view import open_worlds

__all__ = ["barrier", "explain", "unnamed"]


def barrier(
    store: Store,
    world_size: int,
    key_prefix: str,
    barrier_timeout: float = 300,
    rank: int | None = None,
    rank_tracing_decoder: Callable[[int], str] | None = None,
    trace_timeout: float = 10,
    *,
    what: str | None = None,
    hosts: Mapping[int, str] | None = None,
    attempt: int | None = None,
    local_rank: int | None = None,
    local_world_size: int | None = None,
) -> None:
    """Wait until all ``world_size`` ranks are here; two round trips to the store.

    ``barrier_timeout`` is in seconds, and is kept to within one second, also where the store's host
    is stopped. With ``rank``, every rank that times out gets the complete list of the missing; a
    ``key_prefix`` serves any number of barriers, one after the other; and a rank may call again
    after a timeout: its arrival stands. ``rank_tracing_decoder`` turns a rank into what a person
    knows it by. ``trace_timeout`` bounds what naming may take beyond the timeout (never more than
    one second; 0: no names). ``what`` stands in every error. ``hosts`` is the launcher's table;
    without it hosts are known of ranks that have been here before, and of their neighbours.
    ``attempt`` (default: torchrun's restart count) keeps what an earlier attempt left apart.

    With ``local_rank`` and ``local_world_size`` on every rank (torchrun's ``LOCAL_RANK`` and
    ``LOCAL_WORLD_SIZE``), each host's ranks meet on their host and the first of them speaks for
    them: what the store has to do grows with the hosts, not with the ranks.

    Raises ``BarrierTimeout``; ``WorldMismatch`` where others wait in a world of another size, or
    another process is this rank; ``StoreLost``; ``ValueError`` and ``TypeError``. May be called
    from any thread; the store's own connection and timeout are not touched.
    """
    began = time.monotonic()
    again = rank is not None and local_rank is None and local_world_size is None
    try:
        if again and _again.passed(store, world_size, key_prefix, attempt, rank, barrier_timeout):
            return
    except StoreLost as error:
        raise told(error, _messages.titled("barrier", key_prefix, what)) from error.__cause__
    check_store(store, key_prefix)
    check_world(world_size)
    timeout = check_seconds(barrier_timeout, "barrier_timeout")
    naming = min(BEYOND_S, check_seconds(trace_timeout, "trace_timeout", positive=False))
    which = attempt_of(attempt)
    keys = keys_of(key_prefix, "b", which, world_size)
    if rank is None:
        if rank_tracing_decoder is not None:
            raise ValueError("rank_tracing_decoder names ranks: give rank as well")
        _anonymous.barrier(store, keys, timeout, what)
        return
    check_rank(rank, world_size)
    if local_rank is not None or local_world_size is not None:
        from rankcall.store._hosts import led_barrier

        if local_rank is None or local_world_size is None:
            raise ValueError("local_rank and local_world_size go together")
        led_barrier(
            store, world_size, key_prefix, timeout, rank, local_rank, local_world_size,
            decoder=rank_tracing_decoder, what=what, hosts=hosts, attempt=which,
        )  # fmt: skip
        return

    def step(link: Link, call: Call, until: float) -> bool | None:
        with meeting(store, link, keys, rank, call, until, what=what) as one:
            one.arrive()
            if not one.wait():
                return None
            _again.remember(store, keys, rank, one.member)
            return one.leave()

    def last(link: Link, call: Call, until: float) -> bool:
        with meeting(store, link, keys, rank, call, until, what=what) as one:
            limit = until + naming if naming else None
            explain("barrier", link, one, timeout, limit, hosts, rank_tracing_decoder, what)
            return one.leave()

    left = max(timeout - (time.monotonic() - began), 0.0)
    within(
        store, left, step, last, lambda: unnamed("barrier", keys, rank, timeout, what),
        _messages.titled("barrier", key_prefix, what),
    )  # fmt: skip


def explain(
    kind: str,
    link: Link,
    meeting: Meeting,
    timeout: float,
    until: float | None,
    hosts: Mapping[int, str] | None = None,
    decoder: Callable[[int], str] | None = None,
    what: str | None = None,
) -> None:
    """Raise with the names of the missing, after a timeout; return where all came after all.

    Raises ``BarrierTimeout``, or ``WorldMismatch`` where that is the reason.
    """
    keys, rank = meeting.keys, meeting.rank
    view = meeting.look() if until is not None else None
    if view is None or (until is not None and time.monotonic() > until):
        raise unnamed(kind, keys, rank, timeout, what)
    if view.complete:
        meeting.rescue()
        return
    roster = view.roster
    if roster.twice:
        raise _messages.claimed_twice(keys, roster.twice[0], what)
    others = open_worlds(link, keys)
    if others:
        raise _messages.worlds_differ(keys, rank, [*roster.claims, *others], what)
    raise _messages.timed_out(
        kind,
        keys,
        rank=rank,
        missing=view.missing,
        arrived=keys.world_size - len(view.missing),
        timeout=timeout,
        hosts={**roster.hosts, **(hosts or {})},
        decoder=decoder,
        what=what,
        notes=_messages.turned_away(strays(link, keys, "!"), roster.claims, keys.world_size),
    )


def unnamed(kind: str, keys: Keys, rank: int, timeout: float, what: str | None) -> BarrierTimeout:
    """Return the error for when there was no time to find out who is missing."""
    return _messages.timed_out(
        kind, keys, rank=rank, missing=(), arrived=0, timeout=timeout, hosts={}, what=what,
        named=False,
    )  # fmt: skip
