"""``synchronize``, ``any_failed`` and ``get_all``: give every rank the data of all ranks."""

from __future__ import annotations

import traceback
from typing import Any

from torch.distributed import Store

from rankcall.durations import Duration, seconds
from rankcall.store import protocol
from rankcall.store.arguments import check_prefix, check_rank
from rankcall.store.calls import RankCall, perform
from rankcall.store.keys import EXCHANGE, GET_ALL
from rankcall.store.local import local_store

_ERROR_CHARACTERS = 2000  # each rank reads the errors of all, and all may have failed
LARGEST = 7 << 20  # a TCPStore closes the connection of a process that sends 8 MiB


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
    local = local_store(store)
    check_prefix(key_prefix)
    check_rank(rank, world_size)
    check_rank(host_rank, world_size, "host_rank")
    timeout_s = seconds(timeout, "timeout")
    world = local.world(key_prefix, attempt, world_size)
    keys = world.keys
    request = RankCall("synchronize", world, rank, timeout_s, what)
    value = _checked(data, rank)
    return perform(
        store,
        local,
        request,
        lambda member: protocol.exchange(keys, member, value, host_rank),
        EXCHANGE,
    )


def any_failed(
    store: Store,
    error: BaseException | str | None,
    rank: int,
    world_size: int,
    key_prefix: str,
    timeout: Duration = 300,
    **named: Any,
) -> dict[int, str]:
    """Say whether this rank failed, and return the failures of all ranks, by rank.

    Every rank gets the same dict, which is empty if no rank failed. So all ranks take the same
    branch after a part of the job that can fail on one of them, for example a checkpoint.

    Args:
        store: Any ``torch.distributed.Store``.
        error: This rank's failure, or None. All ranks get the first 2,000 characters of its text.
        rank: This rank.
        world_size: How many ranks there are.
        key_prefix: Names the question. It serves any number of times.
        timeout: In seconds; see ``barrier``.
        **named: ``host_rank``, ``what`` and ``attempt``, as for ``synchronize``.

    Raises:
        BarrierTimeout: Not all ranks came in time; a rank that died is in its list.
        WorldMismatchError: As for ``barrier``.
        StoreLostError: The store's host is gone, or does not answer.
        ValueError: An argument is out of its range.
        TypeError: An argument is of the wrong type.
    """
    if isinstance(error, BaseException):
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
    elif error is None or isinstance(error, str):
        text = error or ""
    else:
        raise TypeError(f"error must be an exception, a str or None; got {type(error).__name__}")
    # The first byte says whether there is an error, because the text of one may be empty.
    data = b"" if error is None else b"!" + text[:_ERROR_CHARACTERS].encode("utf-8", "replace")
    answers = synchronize(store, data, rank, world_size, key_prefix, timeout, **named)
    return {
        other: answer[1:].decode("utf-8", "replace")
        for other, answer in enumerate(answers)
        if answer
    }


def _checked(data: bytes | str, rank: int) -> bytes:
    """Return the data as bytes; raise ``TypeError`` or ``ValueError`` if a store cannot take it."""
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
    local = local_store(store)
    check_prefix(prefix)
    check_rank(rank, world_size)
    check_rank(host_rank, world_size, "host_rank")
    own: Any = store  # torch's types leave ``timeout`` out
    timeout_s = seconds(own.timeout if timeout is None else timeout, "timeout")
    world = local.world(prefix, attempt, world_size)
    keys = world.keys
    names = [f"{prefix}{index}" for index in range(world_size)]
    request = RankCall("get_all", world, rank, timeout_s, what)
    request.did = "have set their key"
    values, unread = perform(
        store,
        local,
        request,
        lambda member: protocol.gather(keys, member, names, host_rank),
        GET_ALL,
    )
    if unread:
        request.did = "have read the values"
        raise request.timed_out(protocol.NotAllArrived(unread))
    return values
