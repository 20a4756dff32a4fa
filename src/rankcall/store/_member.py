"""What this process remembers of its part under a prefix: which generation it is in."""

from __future__ import annotations

import os
import threading
import time
import weakref
from dataclasses import dataclass

from torch.distributed import Store

from rankcall.errors import WorldMismatch
from rankcall.store._keys import Keys
from rankcall.store._link import Link, lost, on_fork
from rankcall.store._roster import Claim, new_claim

__all__ = ["IDENTITY", "Call", "Member", "drop", "forget", "hold", "identity_of"]

IDENTITY = "rankcall.store"


class Call:
    """One call of a public function, which may go on on another thread than it began on."""

    def __init__(self) -> None:
        self.abandoned = False  # its caller has given up; it ends when the store answers


@dataclass
class Member:
    """One rank under one prefix. ``arrived`` outlives a timeout: a retry does not arrive twice."""

    claim: Claim
    claimed: bool = False
    generation: int = 0
    arrived: bool = False
    large: bool = False  # the last generation's data was too large to be copied
    holder: Call | None = None

    def leave(self) -> None:
        """Go on to the next generation."""
        self.generation += 1
        self.arrived = False


Place = tuple[str, Keys, int]
_members: dict[Place, Member] = {}
_identities: weakref.WeakKeyDictionary[Store, str] = weakref.WeakKeyDictionary()


def identity_of(store: Store, link: Link) -> str:
    """Name a store, whichever of this process's objects leads to it.

    The store itself holds the name, so that a new store on an old address is another one.
    """
    identity = _identities.get(store)
    if identity is None:
        identity = link.set_first(IDENTITY, os.urandom(8).hex())
        _identities[store] = identity
    return identity


_holding = threading.Condition()


def hold(store: Store, link: Link, keys: Keys, rank: int, call: Call, deadline: float) -> Member:
    """Return this process's part, for this call alone until ``drop``.

    Waits for a call that was given up. Raises ``WorldMismatch`` where another thread is in there as
    the same rank just now.
    """
    place = identity_of(store, link), keys, rank
    with _holding:
        found = _members.setdefault(place, Member(new_claim(rank, keys.world_size)))
        while found.holder is not None and found.holder is not call:
            left = deadline - time.monotonic()
            if found.holder.abandoned and left <= 0:
                raise lost(link.where, "no answer to an earlier call yet")
            if not found.holder.abandoned:
                raise WorldMismatch(
                    f"rank {rank} of {keys.world_size} is in {keys.prefix!r} already, in another "
                    f"thread of this process ({found.claim.who}): give each thread a rank, or a "
                    "key_prefix, of its own",
                    claims=[found.claim.plain],
                )
            _holding.wait(left)
        found.holder = call
    return found


def drop(member: Member) -> None:
    """Let the next call have it."""
    with _holding:
        member.holder = None
        _holding.notify_all()


def forget(store: Store, link: Link, keys: Keys, rank: int) -> Member | None:
    """Drop and return this process's part; None where it has none."""
    return _members.pop((identity_of(store, link), keys, rank), None)


on_fork(_members.clear)
on_fork(_identities.clear)
