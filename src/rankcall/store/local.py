"""What this process remembers of the agreements that it makes over one store object."""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import Store

from rankcall.c10d.calls import Call, on_fork
from rankcall.c10d.location import is_hosted_here
from rankcall.c10d.own_connections import StoreState, state_of
from rankcall.process import host_name
from rankcall.store.keys import Keys, attempt_of_this_process
from rankcall.store.protocol import Claim, Member
from rankcall.store.tickets import Tickets

# Clean-ups that a process remembers. A claim that it finds in the store is its own old one if it is
# among these; a process that has cleaned up a thousand prefixes since meets none of the first.
_RETIRED = 1024


@dataclass(eq=False)
class LocalMember(Member):
    """A member of this process, which one call at a time may use."""

    lock: Any = field(default_factory=threading.Lock)
    call: Call | None = None  # the one that holds the lock
    is_retired: bool = False  # it has cleaned up: the next use of the prefix needs another one

    def end_call(self) -> None:
        """Let the next call use this member. The last one is forgotten: it refers to the user's."""
        self.call = None
        self.lock.release()


# Of all store objects: a process may be one rank by way of two objects for one store, for example
# two PrefixStores. Weak, because a member belongs to its store object, and ends with it.
_members_here: weakref.WeakValueDictionary[str, Member] = weakref.WeakValueDictionary()
_retired: deque[str] = deque(maxlen=_RETIRED)  # nonces of members that have cleaned up
on_fork(_members_here.clear)


@dataclass
class LocalWorld:
    """The memory of one world under one prefix, until that is cleaned up."""

    keys: Keys
    members: dict[int, LocalMember] = field(default_factory=dict)  # this process, by its ranks
    tickets: Tickets = field(default_factory=Tickets)


@dataclass
class LocalStore:
    """The memory of one store object. It lives as long as that does."""

    state: StoreState  # with the connections that all protocols share
    attempt: int  # of the job, when this process first agreed over the store
    worlds: dict[tuple[str, int, int], LocalWorld] = field(default_factory=dict)
    seen: dict[str, tuple[bytes, float]] = field(default_factory=dict)  # of roll calls
    _is_hosted_here: bool | None = None

    def world(self, prefix: str, attempt: int | None, world_size: int) -> LocalWorld:
        """Return the memory of a world; raise ``ValueError`` if there can be no such attempt."""
        place = prefix, self.attempt if attempt is None else attempt, world_size
        world = self.worlds.get(place)
        if world is None:
            if place[1] < 0:
                raise ValueError(f"attempt counts restarts from 0; got {attempt}")
            keys = Keys(*place, self.state.appends, self.state.counts)
            world = self.worlds.setdefault(place, LocalWorld(keys))  # another thread may be faster
        return world

    def is_hosted_here(self, store: Store) -> bool:
        """Return whether the store ends with this process.

        The first call looks at all sockets of the process, so it is not made before a deadline is.
        """
        if self._is_hosted_here is None:
            self._is_hosted_here = is_hosted_here(store)
        return self._is_hosted_here

    def new_member(self, store: Store, world: LocalWorld, rank: int) -> LocalMember:
        """Make this process a rank of a world, on this store object."""
        claim = _new_claim(rank, world.keys.world_size)
        new = LocalMember(claim, _members_here, _retired, self.is_hosted_here(store))
        earlier = world.members.get(rank)
        if earlier is not None and earlier.is_retired:
            world.members.pop(rank, None)
        member = world.members.setdefault(rank, new)  # another thread may have been faster
        _members_here[member.claim.nonce] = member
        return member

    def forget(self, keys: Keys) -> None:
        """Forget a world, whose keys have been removed."""
        self.worlds.pop((keys.prefix, keys.attempt, keys.world_size), None)


def retire(member: LocalMember) -> None:
    """Note that a member has cleaned up."""
    member.is_retired = True
    if member.claim.nonce not in _retired:
        _retired.append(member.claim.nonce)


def _new_claim(rank: int, world_size: int) -> Claim:
    """Return a claim of this process, with a nonce of its own."""
    host = re.sub(r"\s+", "_", host_name()) or "unknown"  # a claim's fields end at a blank
    return Claim(rank, world_size, os.urandom(6).hex(), os.getpid(), host)


# Weak, because rankcall keeps no store of the user's alive.
_known: weakref.WeakKeyDictionary[Store, LocalStore] = weakref.WeakKeyDictionary()
on_fork(_known.clear)  # a child is another process: it has not arrived where its parent has


def local_store(store: Store) -> LocalStore:
    """Return what this process remembers of a store object; or raise ``TypeError``."""
    local = _known.get(store) if isinstance(store, Store) else None
    if local is None:
        state = state_of(store)  # raises
        local = LocalStore(state, attempt_of_this_process())
        local = _known.setdefault(store, local)  # another thread may have been faster
    return local
