"""Static groups: a fixed number of workers that come up together and go down together.

All keys are below an epoch: ``epoch-<n>/rank/<rank>`` says which process has a rank. A process that
calls ``init_rpc`` again moves the group to the next epoch, and workers that still wait in the
previous one follow it. So workers that retry meet, whenever each of them began.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store
from torch.distributed.rpc import _delete_all_user_and_unforked_owner_rrefs

from rankcall.errors import RpcTimeout
from rankcall.process import DEAD, Process
from rankcall.rpc._group import bounded, seconds_left, wait_idle
from rankcall.store import BarrierTimeout, synchronize

_ASK_S = 1.0  # how often a waiting worker looks for peers that died or started again
_NAMING_S = 2.0  # of shutdown's time: kept to find out who is missing

# The last epoch that this process took part in, by the identity of the store.
_last_epochs: dict[str, int] = {}


class _StartedAgain(Exception):
    """Another worker has called ``init_rpc`` again, in a later epoch."""


class StaticMembership:
    """This worker's rank in a static group, and the group's exchanges over the store.

    Every worker calls the same methods in the same order. Each ends by its deadline (seconds on the
    monotonic clock).
    """

    def __init__(self, store: Store, name: str, rank: int, world_size: int) -> None:
        self._root, self._name = store, name
        self.rank, self.world_size = rank, world_size
        self._epoch = 0
        self._store: Store = store
        self._names: list[str] = []
        self._processes: list[Process] = []
        # Returns the reasons why workers are known to be gone, by name.
        self.gone: Callable[[], Mapping[str, str]] = dict

    @property
    def store(self) -> Store:
        """The store for keys of this attempt to form the group."""
        return self._store

    def introduce(self, card: Mapping[str, Any], deadline: float) -> list[dict[str, Any]]:
        """Give ``card``, which JSON can carry, to all; return the cards of all, in rank order.

        ``card["node"]["name"]`` is the worker's name. Raises ``RuntimeError`` if two workers have
        the same name, ``RpcTimeout`` that names the missing workers, ``StoreLost``.
        """
        record = {**card, "process": _process_record()}
        while True:
            try:
                cards: list[dict[str, Any]] = self.exchange("init", record, deadline)
                break
            except _StartedAgain:
                self._claim_rank(deadline)
        names = [card["node"]["name"] for card in cards]
        check_names(names)
        self._names = names
        self._processes = [Process(**card["process"]) for card in cards]
        return cards

    def exchange(self, label: str, value: Any, deadline: float) -> list[Any]:
        """Give ``value``, which JSON can carry, to all; return the values of all, in rank order.

        Raises ``RpcTimeout`` that names the missing workers, also before the deadline if one of
        them is known to be gone; ``StoreLost``.
        """
        data = json.dumps(value).encode()
        while True:
            patience = min(seconds_left(deadline, 0.01), _ASK_S)
            try:
                values = synchronize(
                    self._store, data, self.rank, self.world_size, label, patience
                )  # called again after a timeout, it goes on waiting
                return [json.loads(each) for each in values]
            except BarrierTimeout as late:
                if gone := self._reasons_gone(late.missing_ranks):
                    # The others may only be late, and are not blamed.
                    raise self._timeout(label, late, "; ".join(gone.values()), list(gone)) from late
                if time.monotonic() >= deadline:
                    raise self._timeout(label, late, "", late.missing_ranks) from late
                if bounded(lambda: _current_epoch(self._root), deadline, label) != self._epoch:
                    if label == "init":
                        raise _StartedAgain from late
                    reason = "a worker has called init_rpc again; do the same here"
                    raise self._timeout(label, late, reason, late.missing_ranks) from late

    def farewell(self, deadline: float) -> None:
        """Let rank 0 leave last: it may host the store that the others still read."""
        keys = [f"gone/{rank}" for rank in range(1, self.world_size)]
        left = timedelta(seconds=seconds_left(deadline, 0.01))
        with contextlib.suppress(RuntimeError):
            if self.rank:
                bounded(lambda: self._store.set(f"gone/{self.rank}", ""), deadline, "shutdown")
            elif keys:
                bounded(lambda: self._store.wait(keys, left), deadline, "shutdown")

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

    def _claim_rank(self, deadline: float) -> None:
        """Enter the current epoch and claim the rank there; -1 claims the first that is free."""
        bounded(lambda: self._claim(deadline), deadline, f"init of {self._name!r}")

    def _claim(self, deadline: float) -> None:
        record = {"name": self._name, **_process_record()}
        while True:
            self._epoch = _enter_epoch(self._root)
            self._store = PrefixStore(f"epoch-{self._epoch}", self._root)
            size = _agree_on_size(self._store, self.world_size, deadline)
            self._check_size(size)
            holder = _claim_one(
                self._store, range(size) if self.rank == -1 else [self.rank], record
            )
            if isinstance(holder, int):
                self.rank, self.world_size = holder, size
                return
            name = holder.pop("name")
            if Process(**holder).liveness() != DEAD:
                break
            _end_epoch(self._root, self._epoch)  # it died in its init_rpc
        if self.rank == -1:
            raise RuntimeError(f"all {size} ranks of the group are taken: none for {self._name!r}")
        raise RuntimeError(
            f"rank argument {self.rank} of worker {self._name!r} is not unique: "
            f"worker {name!r} has rank {self.rank}"
        )

    def _check_size(self, size: int) -> None:
        if self.world_size not in (-1, size):
            raise RuntimeError(
                f"world_size argument {self.world_size} of worker {self._name!r} doesn't match "
                f"group size {size}"
            )
        if not -1 <= self.rank < size:
            raise RuntimeError(
                f"rank argument {self.rank} of worker {self._name!r} doesn't match "
                f"group size {size}"
            )


def claim_rank(
    store: Store, name: str, rank: int, world_size: int, deadline: float
) -> StaticMembership:
    """Claim a rank in the group. A rank or world size of -1 is taken from the group.

    Raises ``RuntimeError`` if either disagrees with the group, ``RpcTimeout`` if no worker says how
    many there are, ``StoreLost``.
    """
    membership = StaticMembership(store, name, rank, world_size)
    membership._claim_rank(deadline)
    return membership


class StaticGroup:
    """A group whose members all come, and all go, together."""

    def __init__(self, agent: Any, membership: StaticMembership, store: Store) -> None:
        self._agent, self._membership, self._store = agent, membership, store

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
        """Have the agent wait until no call is in flight; torch's waits in the store."""
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


def _process_record() -> dict[str, Any]:
    return dataclasses.asdict(Process.current())


def _current_epoch(store: Store) -> int:
    return int(store.compare_set("epoch", "", "0"))


def _end_epoch(store: Store, epoch: int) -> None:
    """Move the group on, unless another worker has done so already."""
    store.compare_set("epoch", str(epoch), str(epoch + 1))


def _enter_epoch(store: Store) -> int:
    """Return the current epoch; a process takes part in each epoch once."""
    identity = store.compare_set("identity", "", secrets.token_hex(8)).decode()
    epoch = _current_epoch(store)
    if epoch == _last_epochs.get(identity):
        _end_epoch(store, epoch)
        epoch = _current_epoch(store)
    _last_epochs[identity] = epoch
    return epoch


def _agree_on_size(store: Store, world_size: int, deadline: float) -> int:
    if world_size != -1:
        return int(store.compare_set("size", "", str(world_size)))
    try:
        store.wait(["size"], timedelta(seconds=seconds_left(deadline, 0.01)))
    except RuntimeError as error:
        raise RpcTimeout("no worker of the group has said how many workers there are") from error
    return int(store.get("size"))


def _claim_one(
    store: Store, candidates: Iterable[int], record: Mapping[str, Any]
) -> int | dict[str, Any]:
    """Claim the first rank that is free and return it, or return the record of the last holder."""
    mine = json.dumps(record)
    holder = mine
    for rank in candidates:
        holder = store.compare_set(f"rank/{rank}", "", mine).decode()
        if holder == mine:
            return rank
    record_of_holder: dict[str, Any] = json.loads(holder)
    return record_of_holder
