"""``synchronize`` and ``get_all``: everybody's data on everybody."""

from __future__ import annotations

import struct
import time

from torch.distributed import Store

from rankcall.store import _messages
from rankcall.store._barrier import explain, unnamed
from rankcall.store._bounded import BEYOND_S, within
from rankcall.store._checks import check_rank, check_seconds, check_store
from rankcall.store._keys import Keys, attempt_of, keys_of
from rankcall.store._link import Link, lost
from rankcall.store._meeting import Meeting, meeting
from rankcall.store._member import Call

__all__ = ["framed", "get_all", "synchronize", "unframed"]

_FRAME = struct.Struct("<II")  # rank, bytes that follow
LARGEST = 7 << 20  # a TCPStore closes the connection of whoever sends 8 MiB
_LEAVE_POLL_S = (0.0002, 0.01)


def synchronize(
    store: Store,
    data: bytes,
    rank: int,
    world_size: int,
    key_prefix: str,
    timeout: float = 300,
    *,
    host_rank: int = 0,
    what: str | None = None,
    attempt: int | None = None,
) -> list[bytes]:
    """Hand in ``data`` and return what all ranks handed in, in rank order.

    Every rank gets the same list; a ``key_prefix`` serves any number of times. A rank that calls
    again after a timeout goes on waiting with what it handed in first. ``host_rank`` (the one that
    hosts the store) leaves last. ``data`` is at most 7 MiB, which is what a TCPStore takes.

    Otherwise as ``barrier``: raises ``BarrierTimeout`` with the complete list of the missing on
    every rank, ``WorldMismatch``, ``StoreLost``, ``ValueError`` and ``TypeError``.
    """
    check_store(store, key_prefix)
    check_rank(rank, world_size)
    check_rank(host_rank, world_size, "host_rank")
    seconds = check_seconds(timeout, "timeout")
    frame = framed(data, rank)
    keys = keys_of(key_prefix, "s", attempt_of(attempt), world_size)

    def finish(link: Link, one: Meeting, blob: bytes, until: float) -> list[bytes]:
        found = unframed(blob, world_size)
        _leave(link, keys, rank, one.generation, host_rank, until)
        one.leave()
        return found

    def step(link: Link, call: Call, until: float) -> list[bytes] | None:
        with meeting(store, link, keys, rank, call, until, data=True, what=what) as one:
            one.arrive(frame)
            blob = one.wait_data(until)
            return None if blob is None else finish(link, one, blob, until)

    def last(link: Link, call: Call, until: float) -> list[bytes]:
        with meeting(store, link, keys, rank, call, until, data=True, what=what) as one:
            explain("synchronize", link, one, seconds, until + BEYOND_S, what=what)
            blob = one.wait_data(time.monotonic() + BEYOND_S)
            if blob is None:
                raise lost(link.where, "no answer")
            return finish(link, one, blob, until)

    return within(
        store, seconds, step, last, lambda: unnamed("synchronize", keys, rank, seconds, what),
        _messages.titled("synchronize", key_prefix, what),
    )  # fmt: skip


def framed(data: bytes, rank: int) -> bytes:
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"data must be bytes; got {type(data).__name__} on rank {rank}")
    data = bytes(data)
    if len(data) > LARGEST:
        raise ValueError(
            f"data is {len(data):,} bytes on rank {rank}; a store takes {LARGEST:,} at most: "
            "use a collective for more"
        )
    return _FRAME.pack(rank, len(data)) + data


def unframed(blob: bytes, world_size: int) -> list[bytes]:
    """Take the frames apart; of one rank's the first counts, on every rank."""
    found: dict[int, bytes] = {}
    at = 0
    while at + _FRAME.size <= len(blob):
        rank, size = _FRAME.unpack_from(blob, at)
        at += _FRAME.size
        found.setdefault(rank, blob[at : at + size])
        at += size
    assert len(found) == world_size, "a meeting is complete when all have handed in"
    return [found[rank] for rank in range(world_size)]


def _leave(
    link: Link, keys: Keys, rank: int, generation: int, host_rank: int, until: float
) -> list[int]:
    """Sign off; on the host's rank wait until all others have. Return who has not in time.

    Whoever hosts the store may end its process once this returns: nobody needs it any more. It
    does not matter to the others' result, so a rank that died meanwhile is no error here.
    """
    key = keys.left(generation)
    if rank != host_rank:
        link.append(key, b"%d\n" % rank)
        return []
    others = set(range(keys.world_size)) - {rank}
    pause, longest = _LEAVE_POLL_S
    while True:
        gone = set(map(int, link.read_log(key).split()))
        if others <= gone or time.monotonic() > until:
            break
        time.sleep(pause)
        pause = min(pause * 1.5, longest)
    link.delete_log(key)
    return sorted(others - gone)


def get_all(
    store: Store,
    rank: int,
    prefix: str,
    world_size: int,
    *,
    host_rank: int = 0,
    timeout: float | None = None,
    what: str | None = None,
    attempt: int | None = None,
) -> list[bytes]:
    """Return the values of the keys ``{prefix}0`` to ``{prefix}{world_size - 1}``.

    Waits for keys that are not there yet, ``timeout`` seconds at most (default: the store's own).
    ``host_rank``, the rank that hosts the store, returns when all others have read, so that its
    process may end; the others do not wait. Raises ``BarrierTimeout``, whose ``missing_ranks`` are
    those without a key, or on ``host_rank`` those that have not read; ``StoreLost``, ``ValueError``
    and ``TypeError``.
    """
    check_store(store, prefix)
    check_rank(rank, world_size)
    check_rank(host_rank, world_size, "host_rank")
    known = store.timeout.total_seconds() if timeout is None else timeout  # type: ignore[attr-defined]
    seconds = check_seconds(known, "timeout")
    keys = keys_of(prefix, "g", attempt_of(attempt), world_size)
    names = [f"{prefix}{one}" for one in range(world_size)]

    def step(link: Link, call: Call, until: float) -> list[bytes] | None:
        with meeting(store, link, keys, rank, call, until) as one:
            if not link.wait(names, until):
                return None
            values = link.multi_get(names)
            unread = _leave(link, keys, rank, one.generation, host_rank, until)
            one.leave()
            if unread:
                raise _unread(keys, rank, unread, seconds, what, "have read the values")
            return values

    def last(link: Link, call: Call, until: float) -> list[bytes]:
        with meeting(store, link, keys, rank, call, until):
            missing = link.absent(names)
            raise _unread(keys, rank, missing, seconds, what, "have set their key")

    return within(store, seconds, step, last, saying=_messages.titled("get_all", prefix, what))


def _unread(
    keys: Keys, rank: int, missing: list[int], seconds: float, what: str | None, did: str
) -> Exception:
    return _messages.timed_out(
        "get_all", keys, rank=rank, missing=missing, arrived=keys.world_size - len(missing),
        timeout=seconds, hosts={}, what=what, did=did,
    )  # fmt: skip
