"""One call of one rank: run its protocol, and say its errors in the user's terms.

A *member* is this process as one rank, with what it remembers between calls. The functions that
users call are in ``barriers``, ``exchanges`` and ``cleaning``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from torch.distributed import Store

from rankcall.c10d import client
from rankcall.c10d.calls import Call
from rankcall.c10d.connection import LONGEST_S, clock
from rankcall.c10d.errors import StoreLostError, lost
from rankcall.c10d.location import where
from rankcall.c10d.requests import Steps
from rankcall.process import host_name
from rankcall.store import errors, protocol
from rankcall.store.errors import Decoder
from rankcall.store.local import LocalMember, LocalStore, LocalWorld
from rankcall.whole_numbers import whole_number

T = TypeVar("T")
# If the time is over and the store is only too slow to name the missing ranks, the error of these
# functions is a ``BarrierTimeout`` that names none, and no ``StoreLostError``.
_NAMES_MISSING = ("barrier", "synchronize")


class RankCall(Call):
    """One call of a public function by one rank, with all that its errors say.

    Args:
        kind: The function.
        world: The caller's world, as this process remembers it.
        rank: The caller's rank.
        timeout_s: The caller's timeout.
        what: The caller's name for the purpose of the call.
        hosts: The hosts that the caller knows, by rank.
        decoder: Turns a rank into a name that a person knows.
    """

    did = "arrived"  # what the ranks have done that are not missing

    def __init__(
        self,
        kind: str,
        world: LocalWorld,
        rank: int,
        timeout_s: float,
        what: str | None = None,
        hosts: Mapping[int, str] | None = None,
        decoder: Decoder | None = None,
    ) -> None:
        self.kind = kind
        self.world = world
        self.keys = world.keys
        self.rank = rank
        self.timeout_s = timeout_s
        self.what = what
        self.hosts = hosts
        self.decoder = decoder

    @property
    def name(self) -> str:
        """The text that stands before those of its errors; most calls never make it."""
        return errors.name_of(self.kind, self.keys.prefix, self.what)

    def timed_out(self, error: protocol.NotAllArrived) -> Exception:
        """Return the error for a timeout."""
        known = {**error.hosts, **_neighbours(self.keys.world_size, self.rank, error.hosts)}
        return errors.timed_out(
            self.kind,
            self.keys,
            error,
            rank=self.rank,
            timeout_s=self.timeout_s,
            hosts={**known, self.rank: host_name(), **(self.hosts or {})},
            decoder=self.decoder,
            what=self.what,
            did=self.did,
        )

    def explained(
        self, error: protocol.ProtocolError, member: LocalMember, store: Store
    ) -> Exception:
        """Return the public error for an error of the protocol."""
        if isinstance(error, protocol.NotAllArrived):
            return self.timed_out(error)
        if isinstance(error, protocol.WorldsDiffer):
            return errors.worlds_differ(self.kind, self.keys, self.rank, error.claims, self.what)
        if isinstance(error, protocol.RankTaken):
            claims = [error.holder, member.claim]
            return errors.claimed_twice(self.kind, self.keys, claims, self.what)
        if isinstance(error, protocol.CleanUpPending):
            return errors.clean_up_pending(
                self.kind, self.keys, error.missing, self.rank, self.timeout_s, self.what
            )
        assert isinstance(error, protocol.Unconfirmed), error
        return errors.unconfirmed(self.name, where(store))


def _neighbours(world_size: int, rank: int, known: Mapping[int, str]) -> dict[int, str]:
    """Return the hosts of the ranks beside those known: torchrun numbers ranks host by host."""
    size = whole_number(os.environ.get("LOCAL_WORLD_SIZE"), least=1)
    if os.environ.get("WORLD_SIZE") != str(world_size) or size is None:
        return {}
    by_host = {
        known_rank // size: host for known_rank, host in {**known, rank: host_name()}.items()
    }
    return {
        unknown_rank: by_host[unknown_rank // size]
        for unknown_rank in range(world_size)
        if unknown_rank // size in by_host and unknown_rank not in known
    }


def perform(
    store: Store,
    local: LocalStore,
    request: RankCall,
    steps: Callable[[LocalMember], Steps[T]],
    advances: str | None = None,
) -> T:
    """Run a protocol for one rank, and translate its errors.

    Args:
        store: The user's store.
        local: What this process remembers of it.
        request: The call. It is made once.
        steps: Makes the protocol for a member. It is called again if this process turns out to be
            this rank already, by way of another store object.
        advances: The kind of call whose generation ends when the protocol returns. Only the
            caller's thread goes on to the next one: a helper that was given up may end later.
    """
    members = request.world.members
    deadline = clock.monotonic() + request.timeout_s
    left_s = request.timeout_s
    while True:
        member = members.get(request.rank)
        if member is None or member.is_retired:
            member = local.new_member(store, request.world, request.rank)
            left_s = max(0.001, deadline - clock.monotonic())
        if not member.lock.acquire(False):
            _wait_for_earlier_call(member, request, store, deadline)
        member.call = request
        try:
            result = client.perform(store, left_s, steps(member), call=request, state=local.state)
            if advances is not None:
                member.progress[advances].advance()
            return result
        except protocol.SameProcess as same:
            # By way of another object for the same store.
            members[request.rank] = cast("LocalMember", same.member)
            left_s = max(0.001, deadline - clock.monotonic())
        except protocol.ProtocolError as error:
            raise request.explained(error, member, store) from None
        except StoreLostError as error:
            if request.kind in _NAMES_MISSING and error.answered_lately:
                raise request.timed_out(protocol.NotAllArrived((), named=False)) from None
            raise
        finally:
            # A helper that was given up may still be making requests for this member.
            request.when_over(member.end_call)


def _wait_for_earlier_call(
    member: LocalMember, request: RankCall, store: Store, deadline: float
) -> None:
    """Reserve a member for one call when a call that its caller has given up has ended."""
    earlier_call = member.call
    if earlier_call is not None and not earlier_call.is_abandoned:
        raise errors.claimed_by_a_thread(request.keys, member.claim)
    if not member.lock.acquire(timeout=max(0.0, min(deadline - clock.monotonic(), LONGEST_S))):
        reason = "no answer to an earlier call yet"
        raise lost(where(store), reason, is_silent=True, name=request.name)
