"""``clean_up``: leave no key behind under a prefix."""

from __future__ import annotations

from torch.distributed import Store

from rankcall.store import _anonymous, _words
from rankcall.store._bounded import within
from rankcall.store._checks import check_rank, check_seconds, check_store, check_world
from rankcall.store._keys import attempt_of, keys_of
from rankcall.store._link import Link
from rankcall.store._meeting import meeting
from rankcall.store._member import Call, forget, known
from rankcall.store._removal import remove

__all__ = ["clean_up"]


def clean_up(
    store: Store,
    key_prefix: str,
    world_size: int,
    rank: int | None = None,
    *,
    attempt: int | None = None,
    timeout: float = 60,
) -> None:
    """Remove all keys that this module made under ``key_prefix``, also of earlier attempts.

    With ``rank``, every rank calls it once it has no more use for the prefix; nobody waits, and the
    last one removes. Without, the keys are removed at once: nobody may be using the prefix. When
    all have returned, the prefix may be used again. Keys that others made are never touched.

    Raises ``StoreLost``, ``WorldMismatch``, ``ValueError`` and ``TypeError``.
    """
    check_store(store, key_prefix)
    check_world(world_size)
    seconds = check_seconds(timeout, "timeout")
    keys = keys_of(key_prefix, "c", attempt_of(attempt), world_size)
    if rank is not None:
        check_rank(rank, world_size)

    def step(link: Link, call: Call, until: float) -> bool | None:
        if rank is None:
            return remove(link, key_prefix)
        for kind in "bsg":
            forget(store, link, keys.of_kind(kind), rank)
        _anonymous.forget(store, link, keys.of_kind("b"))
        word, _ = _words.place(rank)
        claim = known(store, link, keys, rank)
        if claim and claim.nonce.encode() not in link.read_log(keys.rosters[word]):
            forget(store, link, keys, rank)  # of a clean-up that is over
        with meeting(store, link, keys, rank, call, until) as one:
            one.arrive()
            if one.passed:
                remove(link, key_prefix)
            one.over = True
        return True

    def last(link: Link, call: Call, until: float) -> bool:
        raise AssertionError("a clean-up does not wait")

    within(store, seconds, step, last)
