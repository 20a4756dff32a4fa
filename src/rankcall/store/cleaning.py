"""``clean_up``: remove the keys of a prefix, once no rank has any more use for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch.distributed import Store

from rankcall.c10d import client
from rankcall.c10d.calls import Call
from rankcall.c10d.requests import Steps
from rankcall.durations import Duration, seconds
from rankcall.errors import warn_renamed
from rankcall.store import protocol
from rankcall.store.arguments import check_prefix, check_rank, check_world
from rankcall.store.calls import RankCall, perform
from rankcall.store.errors import name_of
from rankcall.store.keys import CLEAN_UP, Keys
from rankcall.store.local import LocalMember, local_store, retire

F = TypeVar("F", bound=Callable[..., Any])


def _with_the_old_order(function: F) -> F:
    """Accept the arguments in the order of version 0.1 as well, with a ``DeprecationWarning``.

    That was ``clean_up(store, key_prefix, world_size, rank=None)``. A prefix is text and a rank is
    not, so the second argument tells the orders apart.
    """

    @functools.wraps(function)
    def either_order(store: Store, *arguments: Any, **named: Any) -> Any:
        is_old = bool(arguments) and isinstance(arguments[0], str)
        has_no_rank = not arguments and "rank" not in named
        if is_old or has_no_rank:
            warn_renamed(
                "the order clean_up(store, key_prefix, world_size, rank=None)",
                "clean_up(store, rank, world_size, key_prefix)",
            )
            named.update(zip(("key_prefix", "world_size", "rank"), arguments, strict=False))
            named.setdefault("rank", None)
            arguments = ()
        return function(store, *arguments, **named)

    return cast("F", either_order)


@_with_the_old_order
def clean_up(
    store: Store,
    rank: int | None,
    world_size: int,
    key_prefix: str,
    timeout: Duration = 60,
    *,
    attempt: int | None = None,
) -> None:
    """Remove all keys that this package made under ``key_prefix``, also those of earlier attempts.

    Keys that others made are never touched.

    Args:
        store: Any ``torch.distributed.Store``.
        rank: This rank. Every rank calls it once it has no more use for the prefix. No rank waits,
            and the last rank removes the keys. A rank that uses the prefix again before that waits
            for it. With None, the keys are removed at once: no process may be using the prefix.
        world_size: How many ranks there are.
        key_prefix: The prefix.
        timeout: In seconds, or a ``timedelta``.
        attempt: Keeps the keys of a restarted job apart; by default torchrun's restart count.

    Raises:
        StoreLostError: The store's host is gone, or does not answer.
        WorldMismatchError: Another process is this rank.
        ValueError: An argument is out of its range.
        TypeError: An argument is of the wrong type.
    """
    local = local_store(store)
    check_prefix(key_prefix)
    check_world(world_size)
    timeout_s = seconds(timeout, "timeout")
    world = local.world(key_prefix, attempt, world_size)
    keys = world.keys
    if rank is None:
        call = Call(name_of("clean_up", key_prefix, None))
        client.perform(store, timeout_s, protocol.remove_all(keys), call=call)
        local.forget(keys)
        return
    check_rank(rank, world_size)
    cleaned = world.members.get(rank)
    if cleaned is not None and cleaned.is_retired:
        # This process has cleaned up before. If the keys of that use are still there, its answer
        # was lost or another rank has not come yet: go on with that clean-up, and begin no new one.
        cleaned.is_retired = False
        again = RankCall("clean_up", world, rank, timeout_s)
        if perform(store, local, again, lambda member: _retire(keys, member)):
            return
    request = RankCall("clean_up", world, rank, timeout_s)
    perform(store, local, request, lambda member: _retire(keys, member))


def _retire(keys: Keys, member: LocalMember) -> Steps[bool]:
    try:
        return (yield from protocol.clean_up(keys, member))
    finally:
        # Also if it failed: perhaps the requests have taken effect, and the claim is going.
        if member.of_kind(CLEAN_UP).has_begun:
            retire(member)
