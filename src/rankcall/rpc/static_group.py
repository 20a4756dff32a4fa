"""A static group: a fixed number of workers that come up together, exchange values, and leave."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store
from torch.distributed.rpc import _delete_all_user_and_unforked_owner_rrefs

from rankcall.c10d.client import perform
from rankcall.c10d.requests import Set, Steps, Wait
from rankcall.errors import RpcTimeout
from rankcall.process import DEAD, Process
from rankcall.rpc.deadlines import bounded, seconds_left, wait_idle
from rankcall.rpc.rank_claims import claiming, current_epoch, key_in_epoch, process_record
from rankcall.store import BarrierTimeout, StoreLostError, synchronize

_ASK_S = 1.0  # how often a waiting worker looks for peers that died or started again
# torch's join says only that it ran out of time. This part of shutdown's time is kept for an
# exchange that finds out which workers are missing.
_NAMING_S = 2.0

T = TypeVar("T")


class _BeginAgain(Exception):
    """Another worker has called ``init_rpc`` again, in a later epoch."""


class StaticMembership:
    """This worker's rank in a static group, and the group's exchanges over the store.

    Every worker calls the same methods in the same order. Each ends by its deadline (seconds on the
    monotonic clock).
    """

    def __init__(self, store: Store, name: str, rank: int, world_size: int) -> None:
        self._store, self._name = store, name
        self.rank, self.world_size = rank, world_size
        self._epoch = 0
        self._names: list[str] = []
        self._processes: list[Process] = []
        self.is_up = False  # all workers have come up: too late to begin again
        # Returns the reasons why workers are known to be gone, by name.
        self.gone: Callable[[], Mapping[str, str]] = dict

    @property
    def store(self) -> Store:
        """The store for keys of this attempt to form the group."""
        return PrefixStore(f"epoch-{self._epoch}", self._store)

    def introduce(self, worker: Mapping[str, Any], deadline: float) -> list[dict[str, Any]]:
        """Give this worker's record to all; return the records of all, in rank order.

        ``worker["node"]["name"]`` is the worker's name. Raises ``RuntimeError`` if two workers have
        the same name, ``RpcTimeout`` that names the missing workers, ``StoreLostError``.
        """
        own_record = {**worker, "process": process_record()}
        records: list[dict[str, Any]] = self.exchange("init", own_record, deadline)
        names = [record["node"]["name"] for record in records]
        check_names(names)
        self._names = names
        self._processes = [Process(**record["process"]) for record in records]
        return records

    def exchange(self, label: str, value: Any, deadline: float) -> list[Any]:
        """Give ``value``, which JSON can carry, to all; return the values of all, in rank order.

        Raises ``RpcTimeout`` that names the missing workers, also before the deadline if one of
        them is known to be gone; ``StoreLostError``.
        """
        data = json.dumps(value).encode()
        patience = _ASK_S
        while True:
            left = min(seconds_left(deadline, 0.01), patience)
            try:
                values = synchronize(
                    self._store, data, self.rank, self.world_size, self._key(label), left
                )  # called again after a timeout, it goes on waiting
                return [json.loads(encoded) for encoded in values]
            except StoreLostError as lost:
                if not lost.is_silent or time.monotonic() >= deadline:
                    raise
                # The line to the store may be busy, or lose packets: ask again, for longer. A
                # store that is gone is not asked again.
                patience *= 2
            except BarrierTimeout as late:
                if gone := self._reasons_gone(late.missing_ranks):
                    # The others may only be late, and are not blamed.
                    raise self._timeout(label, late, "; ".join(gone.values()), list(gone)) from late
                if time.monotonic() >= deadline:
                    raise self._timeout(label, late, "", late.missing_ranks) from late
                if perform(self._store, seconds_left(deadline), current_epoch()) != self._epoch:
                    # A worker that has not come up can follow into the new epoch by itself. One
                    # that has is known to its peers by the session of this epoch, and torch's
                    # distributed autograd allows one rank in a process: its user must act.
                    if not self.is_up:
                        raise _BeginAgain from late
                    reason = "a worker has called init_rpc again; do the same here"
                    raise self._timeout(label, late, reason, late.missing_ranks) from late

    def farewell(self, deadline: float) -> None:
        """Let rank 0 leave last: it may host the store that the others still read.

        Not an exchange, because its answer would be read from the store as well, and rank 0 would
        have to wait again. Errors are ignored: everybody has agreed to leave already.
        """
        gone = [self._key(f"gone/{rank}") for rank in range(1, self.world_size)]

        def steps() -> Steps[None]:
            if self.rank:
                yield Set(gone[self.rank - 1], b"")
            elif gone:
                yield Wait(gone)

        with contextlib.suppress(RuntimeError):
            perform(self._store, seconds_left(deadline, 0.01), steps())

    def describe(self, rank: int) -> str:
        """Return a worker's name and rank, as far as they are known."""
        return f"{self._names[rank]!r} (rank {rank})" if self._names else f"rank {rank}"

    def _reasons_gone(self, missing_ranks: Iterable[int]) -> dict[int, str]:
        """Return for each of the missing that will not come why, by rank."""
        gone, reasons = self.gone(), {}
        for rank in missing_ranks if self._processes else ():
            name, process = self._names[rank], self._processes[rank]
            if name in gone:
                reasons[rank] = gone[name]
            elif process.liveness() == DEAD:
                reasons[rank] = f"worker {name!r} is gone: its process {process.pid} has ended"
        return reasons

    def _timeout(
        self, label: str, late: BarrierTimeout, reason: str, missing: Sequence[int]
    ) -> RpcTimeout:
        names = ", ".join(map(self.describe, missing)) or "not known"
        return RpcTimeout(
            f"RPC {label} on {self.describe(self.rank)}: {late.arrived} of {self.world_size} "
            f"workers arrived{' (' + reason + ')' if reason else ' in time'}; missing: {names}",
            missing_ranks=missing,
            arrived=late.arrived,
            world_size=self.world_size,
            hosts=late.hosts,
            rank=self.rank,
            what=label,
        )

    def claim_rank(self, deadline: float) -> None:
        """Enter the current epoch and claim the rank there; -1 claims the first that is free."""
        claim = claiming(self._name, self.rank, self.world_size)
        left = seconds_left(deadline)
        self._epoch, self.rank, self.world_size = perform(self._store, left, claim)

    def _key(self, name: str) -> str:
        return key_in_epoch(self._epoch, name)


def form_group(
    join: Callable[[StaticMembership], T],
    store: Store,
    name: str,
    rank: int,
    world_size: int,
    deadline: float,
) -> T:
    """Claim a rank in the group, and return ``join(membership)``, which brings the agent up.

    If another worker begins again in the meantime, so does this one. A rank or world size of -1 is
    taken from the group. Raises ``RuntimeError`` if either disagrees with the group, ``RpcTimeout``
    if no worker says how many there are, ``StoreLostError``.
    """
    while True:
        membership = StaticMembership(PrefixStore("static", store), name, rank, world_size)
        membership.claim_rank(deadline)
        with contextlib.suppress(_BeginAgain):
            return join(membership)


class StaticGroup:
    """A group whose members all come, and all go, together."""

    def __init__(self, agent: Any, membership: StaticMembership, store: Store) -> None:
        self._agent, self._membership, self._store = agent, membership, store
        membership.is_up = True

    def leave(self, deadline: float) -> None:
        """Wait until every member leaves and no call is in flight anywhere.

        Raises ``RpcTimeout`` that names the members that did not leave.
        """
        self._membership.exchange("shutdown", None, deadline)
        _delete_all_user_and_unforked_owner_rrefs(timedelta(seconds=seconds_left(deadline)))
        wait_idle(self._agent, deadline)
        self._join(deadline)
        self._membership.farewell(deadline)

    def _join(self, deadline: float) -> None:
        """Have the agent wait until no call is in flight.

        torch's agent waits in the store, with the store's own timeout, and not always within it.
        """
        join_until = deadline - min(_NAMING_S, seconds_left(deadline) / 2)
        left = seconds_left(join_until)
        self._store.set_timeout(timedelta(seconds=left))
        try:
            bounded(lambda: self._agent.join(shutdown=True, timeout=left), join_until, "shutdown")
        except RpcTimeout:
            raise
        except RuntimeError as error:
            self._membership.exchange("shutdown, cut short", None, deadline)
            raise RpcTimeout(f"RPC shutdown did not end in time: {error}") from error


def check_names(names: Iterable[str]) -> None:
    """Raise ``RuntimeError`` that names the ranks with the same name."""
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        ranks.setdefault(name, []).append(rank)
    for name, owners in ranks.items():
        if len(owners) > 1:
            shared = " and ".join(map(str, owners))
            raise RuntimeError(f"worker name {name!r} is not unique: ranks {shared} have it")
