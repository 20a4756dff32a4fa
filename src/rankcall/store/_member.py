"""What this process remembers of its part under a prefix: which generation it is in."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field

from torch.distributed import Store

from rankcall.errors import WorldMismatch
from rankcall.store._connection import local, on_fork
from rankcall.store._keys import Keys
from rankcall.store._link import Link, lost
from rankcall.store._roster import Claim, new_claim

__all__ = ["IDENTITY", "Call", "Member", "drop", "forget", "hold", "identity_of", "known", "take"]

IDENTITY = "rankcall.store"


class Call:
    """One call of a public function, which may go on on another thread than it began on.

    It ends in one of two ways, never both: it is finished, or its caller gives it up. A call that
    was given up ends when the store answers, and must not use up what the next call will wait for.
    """

    def __init__(self) -> None:
        self.abandoned = False
        self.late = False  # the store has answered, and the time is up
        self.link: Link | None = None  # that it is on
        self._finished = False

    def heard_within(self, seconds: float) -> bool:
        """Whether the store has answered this call so lately."""
        return self.link is not None and time.monotonic() - self.link.heard < seconds

    def finish(self) -> bool:
        """Say that the call has its result; False where its caller is gone."""
        with _deciding:
            self._finished = not self.abandoned
            return self._finished

    def abandon(self) -> bool:
        """Give the call up; False where it has just finished."""
        with _deciding:
            self.abandoned = not self._finished
            return self.abandoned


_deciding = threading.Lock()


@dataclass
class Member:
    """One rank under one prefix. ``arrived`` outlives a timeout: a retry does not arrive twice."""

    claim: Claim
    claimed: bool = False
    generation: int = 0
    arrived: bool = False
    unsure: bool = False  # an addition was not answered: it may be done yet, or not
    agreed: bool = False  # has said which world it means
    told: set[str] = field(default_factory=set)  # of whom that came from a world of another size
    large: bool = False  # the last generation's data was too large to be copied
    holder: Call | None = None
    free: list[bool] = field(default_factory=lambda: [True])  # empty while a call has it
    forgotten: bool = False  # by a clean-up

    def leave(self) -> None:
        """Go on to the next generation."""
        self.generation += 1
        self.arrived = False


Place = tuple[str, Keys, int]
_members: dict[Place, Member] = {}


def identity_of(store: Store, link: Link) -> str:
    """Name a store, whichever of this process's objects leads to it.

    The store itself holds the name, so that a new store on an old address is another one.
    """
    known = local(store)
    if known.identity is None:
        known.identity = link.set_first(IDENTITY, os.urandom(8).hex())
    return known.identity


_AGAIN_S = 0.01


def hold(store: Store, link: Link, keys: Keys, rank: int, call: Call, deadline: float) -> Member:
    """Return this process's part, for this call alone until ``drop``.

    Waits for a call that was given up. Raises ``WorldMismatch`` where another thread is in there as
    the same rank just now.
    """
    place = identity_of(store, link), keys, rank
    found = _members.get(place)
    if found is None:
        found = _members.setdefault(place, Member(new_claim(rank, keys.world_size)))
    while not take(found, call):
        before = found.holder
        if before is None:
            continue
        if not before.abandoned:
            raise WorldMismatch(
                f"rank {rank} of {keys.world_size} is in {keys.prefix!r} already, in another "
                f"thread of this process ({found.claim.who}): give each thread a rank, or a "
                "key_prefix, of its own",
                claims=[found.claim.plain],
            )
        if time.monotonic() >= deadline:
            raise lost(link.where, "no answer to an earlier call yet")
        time.sleep(_AGAIN_S)
    return found


def take(member: Member, call: Call, again: bool = True) -> bool:
    """Take it for a call, if no other call has it; ``again``: or this one has it already."""
    try:
        member.free.pop()  # one thread succeeds
    except IndexError:
        return again and member.holder is call
    member.holder = call
    return True


def drop(member: Member) -> None:
    """Let the next call have it; once for each ``take``."""
    if member.holder is not None:
        member.holder = None
        member.free.append(True)


def forget(store: Store, link: Link, keys: Keys, rank: int) -> None:
    """Drop this process's part."""
    found = _members.pop((identity_of(store, link), keys, rank), None)
    if found is not None:
        found.forgotten = True


def known(store: Store, link: Link, keys: Keys, rank: int) -> Claim | None:
    """Return this process's claim, if it has made one."""
    found = _members.get((identity_of(store, link), keys, rank))
    return found.claim if found else None


on_fork(_members.clear)
