"""Barriers of large worlds: a host's ranks meet on the host, and their leader speaks for them.

The leader (local rank 0) hosts a store of torch's on loopback, where its host's ranks meet. Then it
meets the other leaders in the caller's store, which sees hosts and not ranks, and lets its own
ranks go. Where one of them does not come, the leader writes down who has; where the leader is the
one that does not come, its ranks do so themselves. So the missing are named rank by rank.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed import Store

from rankcall.errors import WorldMismatch
from rankcall.store import _messages, _roster
from rankcall.store._barrier import barrier
from rankcall.store._bounded import BEYOND_S, within
from rankcall.store._checks import check_rank
from rankcall.store._errors import BarrierTimeout, StoreLost
from rankcall.store._house import House, delete, enter, hear
from rankcall.store._keys import Keys, attempt_of, keys_of
from rankcall.store._link import Link
from rankcall.store._member import Call
from rankcall.store._view import look

__all__ = ["led_barrier"]

_PATIENCE_S = 0.25  # a host whose ranks have not all come after this says who has
_LOOK_S = 1.0


def led_barrier(
    store: Store,
    world_size: int,
    key_prefix: str,
    timeout: float,
    rank: int,
    local_rank: int,
    local_world_size: int,
    *,
    decoder: Any = None,
    what: str | None = None,
    hosts: Mapping[int, str] | None = None,
    attempt: int | None = None,
) -> None:
    """Wait for all, as ``barrier``; ``timeout`` seconds at most."""
    check_rank(local_rank, local_world_size, "local_rank")
    if world_size % local_world_size or rank % local_world_size != local_rank:
        raise ValueError(
            f"rank {rank} of {world_size} with local_rank {local_rank} of {local_world_size}: "
            "leaders need as many ranks on every host, numbered host by host as torchrun does; "
            "leave local_rank out"
        )
    began = time.monotonic()
    keys = keys_of(key_prefix, "p", attempt_of(attempt), world_size)
    house = enter(store, keys, rank, local_rank, local_world_size, timeout)
    meeting = _Round(store, house, keys, rank, began, timeout, hosts or {}, decoder, what)
    if local_rank == 0:
        meeting.lead()
    else:
        meeting.follow()
    house.rounds[key_prefix] = meeting.turn + 1


class _Round:
    """One rank's way through one barrier. Deadlines are monotonic seconds."""

    def __init__(
        self,
        store: Store,
        house: House,
        keys: Keys,
        rank: int,
        began: float,
        timeout: float,
        hosts: Mapping[int, str],
        decoder: Any,
        what: str | None,
    ) -> None:
        self.turn = house.rounds.get(keys.prefix, 0)
        self._store = store
        self._house = house
        self._keys = keys
        self._rank = rank
        self._began = began
        self._timeout = timeout
        self._deadline = began + timeout
        self._hosts = hosts
        self._decoder = decoder
        self._what = what
        self._home = f"{keys.prefix}/local"
        self._world = f"{keys.prefix}/hosts"
        self._out = self._out_of(self.turn)
        self._here = f"{keys.base}{keys.world_size}/here{self.turn}"

    def _out_of(self, turn: int) -> str:
        return f"{self._keys.prefix}/rankcall.o{self._keys.attempt}/{turn}"

    def _left(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    def _meet(self, store: Store, size: int, prefix: str, rank: int, seconds: float) -> None:
        barrier(store, size, prefix, seconds, rank, attempt=self._keys.attempt, what=self._what)

    # --- the leader ---

    def lead(self) -> None:
        """Gather this host's ranks, meet the other leaders, let the ranks go."""
        house = self._house
        try:
            self._gather()
            self._meet(self._store, house.hosts, self._world, house.host, self._left())
        except BarrierTimeout:
            error = self._named()
            if error is None:
                self._release({})
                return
            self._release({"missing": error.missing_ranks, "hosts": error.hosts})
            raise error from None
        except (StoreLost, WorldMismatch) as error:
            self._release({"error": str(error), "lost": isinstance(error, StoreLost)})
            raise
        self._release({})
        self._forget()

    def _gather(self) -> None:
        """Wait for this host's ranks; where that takes long, tell the others who has come."""
        house, told, patience = self._house, -1, _PATIENCE_S
        while True:
            seconds = min(patience, self._left())
            try:
                self._meet(house.store, house.size, self._home, 0, seconds)
                return
            except BarrierTimeout as error:
                if error.arrived != told:
                    told = error.arrived
                    gone = set(error.missing_ranks)
                    self._say_here([one for one in range(house.size) if one not in gone])
                if time.monotonic() >= self._deadline:
                    raise
                patience = _LOOK_S
            except StoreLost:
                # This process hosts that store: it is there, and something held up the answer.
                if time.monotonic() >= self._deadline:
                    raise
                patience = _LOOK_S

    def _say_here(self, local_ranks: Sequence[int]) -> None:
        first = self._house.ranks(self._house.host)[0]
        line = " ".join(str(first + one) for one in local_ranks) + "\n"

        def step(link: Link, call: Call, until: float) -> bool:
            link.append(self._here, line.encode())
            return True

        within(self._store, self._left(), step, step)
        if self._here not in self._house.wrote:
            self._house.wrote.append(self._here)

    def _release(self, outcome: dict[str, Any]) -> None:
        outcome["at"] = time.monotonic()
        self._house.store.set(self._out, json.dumps(outcome))  # this process hosts that store

    def _forget(self) -> None:
        """Remove what the last round left: all are past it."""
        if self.turn:
            self._house.store.delete_key(self._out_of(self.turn - 1))
        old = [key for key in self._house.wrote if key != self._here]
        if self._house.announced:
            old.append(self._house.announced)
        if old:
            self._house.announced, self._house.wrote = None, []
            delete(self._store, old, self._left())

    # --- the others ---

    def follow(self) -> None:
        """Meet this host's ranks, and wait until the leader lets them go."""
        self._assemble()
        outcome = self._hear_out()
        if outcome is None:
            named = self._named()
            if named is not None:
                raise named
        elif "error" in outcome:
            kind = StoreLost if outcome["lost"] else WorldMismatch
            raise kind(outcome["error"])
        elif "missing" in outcome:
            hosts = {int(rank): host for rank, host in outcome["hosts"].items()}
            raise self._error(outcome["missing"], hosts)

    def _assemble(self) -> None:
        """Meet this host's ranks; while the leader is not here, tell the others who is.

        Early, because another host's ranks may be at their deadline before this one.
        """
        house, told, patience = self._house, frozenset[int](), _PATIENCE_S
        while True:
            began, seconds = time.monotonic(), min(patience, self._left())
            try:
                self._meet(house.store, house.size, self._home, house.local_rank, seconds)
                return
            except BarrierTimeout as error:
                here, gone = frozenset(range(house.size)) - {*error.missing_ranks}, False
                alone = 0 in error.missing_ranks
            except StoreLost:
                # Told at once, its host has ended; else something held up the answer.
                here, gone = frozenset([house.local_rank]), time.monotonic() - began < seconds
                alone = gone
            if alone and here - told:
                told |= here
                self._say_here(sorted(here))
            if gone or time.monotonic() >= self._deadline:
                return
            patience = _LOOK_S

    def _hear_out(self) -> dict[str, Any] | None:
        """Return what the leader said in this call's time."""
        limit = self._deadline + BEYOND_S / 2
        while (now := time.monotonic()) < limit:
            try:
                value = hear(self._house.store, self._out, max(0.01, limit - now))
            except StoreLost:
                return None
            if value is None:
                return None
            outcome: dict[str, Any] = json.loads(value)
            if outcome["at"] >= self._began or set(outcome) == {"at"}:
                return outcome
            time.sleep(0.005)  # of a call that timed out before: the leader has not retried yet
        return None

    # --- naming ---

    def _named(self) -> BarrierTimeout | None:
        """Return the error that names the missing rank by rank; None where all have come."""
        house, keys = self._house, self._keys
        world = keys_of(self._world, "b", keys.attempt, house.hosts)

        def step(link: Link, call: Call, until: float) -> tuple[list[int], dict[int, str]]:
            done = link.check([world.done(self.turn)])
            view = look(link, world, self.turn)
            absent = [] if done else view.missing
            here = set(map(int, link.read_log(self._here).split())) if absent else set()
            here |= {self._rank}
            known = view.roster.hosts
            missing = [one for host in absent for one in house.ranks(host) if one not in here]
            return missing, {
                one: known[one // house.size] for one in missing if one // house.size in known
            }

        missing, known = within(self._store, BEYOND_S / 2, step, step)
        return self._error(missing, known) if missing else None

    def _error(self, missing: Sequence[int], known: Mapping[int, str]) -> BarrierTimeout:
        mine = {self._rank: _roster.new_claim(self._rank, self._keys.world_size).host}
        return _messages.timed_out(
            "barrier",
            self._keys,
            rank=self._rank,
            missing=list(missing),
            arrived=self._keys.world_size - len(missing),
            timeout=self._timeout,
            hosts={**mine, **known, **self._hosts},
            decoder=self._decoder,
            what=self._what,
        )
