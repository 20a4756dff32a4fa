"""Which process has which rank of a static group, and how workers that start again meet.

All keys are below an epoch: ``epoch-<n>/rank/<rank>`` says which process has a rank. A process that
calls ``init_rpc`` again moves the group to the next epoch, and workers that have not come up in the
previous one begin again there. So workers that retry meet, whenever each of them began.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from typing import Any, NamedTuple

from rankcall.c10d.parts import publish_once
from rankcall.c10d.requests import CompareSet, Read, Steps, Until
from rankcall.errors import RpcTimeout
from rankcall.process import DEAD, Process
from rankcall.ranks import MAX_RANKS
from rankcall.whole_numbers import LARGEST, whole_number

# The last epoch that this process took part in, by the identity of the store.
_last_epochs: dict[str, int] = {}


class RankClaim(NamedTuple):
    """The place of this process in a group."""

    epoch: int
    rank: int
    world_size: int


def claiming(name: str, rank: int, world_size: int) -> Steps[RankClaim]:
    """Enter the current epoch and claim a rank there; the requests of ``claim_rank``.

    Args:
        name: The worker's name.
        rank: The rank to claim; -1 for the first that is free.
        world_size: The number of workers; -1 for the one that other workers have given.

    Raises:
        RuntimeError: The rank is taken by a process that may still live, all ranks are, or the
            world size differs from that of the group.
        RpcTimeout: No worker has given the world size in time.
    """
    # It has the process in it, so that no two workers' claims are equal.
    claim = json.dumps({"name": name, **process_record()}).encode()
    while True:
        epoch = yield from _enter_epoch()
        size = yield from _agree_on_size(epoch, world_size)
        _check_size(name, rank, world_size, size)
        holder, wanted = b"", rank
        for wanted in range(size) if rank == -1 else [rank]:
            text = yield from publish_once(key_in_epoch(epoch, f"rank/{wanted}"), claim)
            if text == claim:
                return RankClaim(epoch, wanted, size)
            holder = text
        holder_name, process = _holder(key_in_epoch(epoch, f"rank/{wanted}"), holder)
        if process.liveness() != DEAD:
            break
        # It died in its init_rpc. Its rank is not taken over within the epoch: it may have arrived
        # in exchanges there, which nobody can take back. So all begin again in the next epoch.
        yield from _end_epoch(epoch)
    if rank == -1:
        raise RuntimeError(f"all {size} ranks of the group are taken: none for {name!r}")
    raise RuntimeError(
        f"rank argument {rank} of worker {name!r} is not unique: "
        f"worker {holder_name!r} has rank {rank}"
    )


def current_epoch() -> Steps[int]:
    """Return the epoch that the group is in; the first caller of all begins epoch 0."""
    return stored_number("epoch", (yield from publish_once("epoch", b"0")))


def key_in_epoch(epoch: int, name: str) -> str:
    """Return the store's key of this name for one epoch."""
    return f"epoch-{epoch}/{name}"


def process_record() -> dict[str, Any]:
    """Return what other processes need to find out whether this one still lives."""
    return dataclasses.asdict(Process.current())


def _agree_on_size(epoch: int, world_size: int) -> Steps[int]:
    key = key_in_epoch(epoch, "size")
    if world_size != -1:
        given = yield from publish_once(key, b"%d" % world_size)
        return stored_number(key, given, most=MAX_RANKS)
    # Not a Wait: a TCPStore without libuv does not wake one for a key made by compare_set.
    size = yield Until(Read(key), bool)
    if size is None:
        raise RpcTimeout("no worker of the group has said how many workers there are")
    return stored_number(key, size, most=MAX_RANKS)


def stored_number(key: str, value: bytes, most: int = LARGEST) -> int:
    """Return a number that workers share in the store.

    Raises ``RuntimeError`` if it is none: then another program writes there, and a loop up to its
    number would not end.
    """
    number = whole_number(value, most=most)
    if number is None:
        raise RuntimeError(_strange(key, f"not a number up to {most:,}"))
    return number


def _holder(key: str, text: bytes) -> tuple[str, Process]:
    """Return the worker that has claimed a rank. Raises ``RuntimeError`` if it cannot be one."""
    try:
        fields = json.loads(text)
        name = fields.pop("name")
        return str(name), Process(**fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise RuntimeError(_strange(key, "not the claim of a worker")) from None


def _strange(key: str, problem: str) -> str:
    return f"{key!r} in the job's store is {problem}: another program writes there"


def _check_size(name: str, rank: int, world_size: int, size: int) -> None:
    if world_size not in (-1, size):
        raise RuntimeError(
            f"world_size argument {world_size} of worker {name!r} doesn't match group size {size}"
        )
    if not -1 <= rank < size:
        raise RuntimeError(
            f"rank argument {rank} of worker {name!r} doesn't match group size {size}"
        )


def _end_epoch(epoch: int) -> Steps[None]:
    """Move the group on, unless another worker has done so already."""
    yield CompareSet("epoch", b"%d" % epoch, b"%d" % (epoch + 1))


def _enter_epoch() -> Steps[int]:
    """Return the current epoch; a process takes part in each epoch once.

    The store's identity is a random value in the store itself: an object or an address would not
    do, as a process may connect to one store again, or to a new store at the same address.
    """
    identity = (yield from publish_once("identity", secrets.token_hex(8).encode())).decode()
    epoch = yield from current_epoch()
    if epoch == _last_epochs.get(identity):
        yield from _end_epoch(epoch)
        epoch = yield from current_epoch()
    _last_epochs[identity] = epoch
    return epoch
