"""``barrier``: wait for all ranks, and name every one that does not come."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch.distributed import Store

from rankcall.c10d import client
from rankcall.c10d.calls import Call
from rankcall.c10d.errors import StoreLostError
from rankcall.c10d.location import where
from rankcall.c10d.requests import Steps
from rankcall.durations import Duration, seconds
from rankcall.store import errors, protocol, tickets
from rankcall.store.arguments import check_prefix, check_rank, check_world
from rankcall.store.calls import RankCall, perform
from rankcall.store.keys import BARRIER
from rankcall.store.local import LocalStore, LocalWorld, local_store


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
            rank.
        StoreLostError: The store's host is gone, or does not answer.
        ValueError: An argument is out of its range.
        TypeError: An argument is of the wrong type.
    """
    local = local_store(store)
    check_prefix(key_prefix)
    timeout_s = seconds(barrier_timeout, "barrier_timeout")
    trace_s = seconds(trace_timeout, "trace_timeout", zero=True)
    if rank is None:
        check_world(world_size)
        if rank_tracing_decoder is not None:
            raise ValueError("rank_tracing_decoder names ranks: give rank as well")
        world = local.world(key_prefix, attempt, world_size)
        _barrier_without_ranks(store, local, world, timeout_s, what)
        return
    check_rank(rank, world_size)
    world = local.world(key_prefix, attempt, world_size)
    keys = world.keys
    request = RankCall("barrier", world, rank, timeout_s, what, hosts, rank_tracing_decoder)
    perform(store, local, request, lambda member: protocol.meet(keys, member, trace_s > 0), BARRIER)


def _barrier_without_ranks(
    store: Store, local: LocalStore, world: LocalWorld, timeout_s: float, what: str | None
) -> None:
    """Wait until ``world_size`` processes are here."""
    keys, mine = world.keys, world.tickets
    drawn: list[int] = []

    def steps() -> Steps[None]:
        drawn.append((yield from tickets.draw(keys, mine)))
        yield from tickets.meet(keys, drawn[0], local.is_hosted_here(store))

    name = errors.name_of("barrier", keys.prefix, what)
    call = Call(name)
    try:
        client.perform(store, timeout_s, steps(), call=call)
    except (protocol.ProtocolError, StoreLostError) as error:
        # The next call of this process waits with the same ticket.
        call.when_over(lambda: mine.unused.extend(drawn))
        if isinstance(error, tickets.TooFew):
            raise errors.timed_out(
                "barrier",
                keys,
                error,
                rank=None,
                timeout_s=timeout_s,
                hosts={},
                what=what,
                arrived=error.arrived,
            ) from None
        if isinstance(error, protocol.WorldsDiffer):
            raise errors.worlds_differ("barrier", keys, None, error.claims, what) from None
        if isinstance(error, protocol.Unconfirmed):
            raise errors.unconfirmed(name, where(store), "rank=") from None
        raise
