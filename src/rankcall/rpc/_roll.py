"""What the workers of a static group tell each other through the store, by ``rankcall.store``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from rankcall.errors import RpcTimeout
from rankcall.rpc._bounded import bounded
from rankcall.store import BarrierTimeout, synchronize

_ASK_S = 1.0  # how often to ask whether a peer has died


class Roll:
    """The numbered workers of a group and their exchanges over ``store``.

    Each method is called by every worker, in the same order, and ends by its deadline (seconds on
    the monotonic clock).
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self.rank, self.world_size = store, rank, world_size
        self.describe: Callable[[int], str] = lambda rank: f"rank {rank}"
        # Returns why it is no use to wait any longer, or "".
        self.hopeless: Callable[[], str] | None = None

    def exchange(self, label: str, value: Any, deadline: float) -> list[Any]:
        """Give ``value`` (anything JSON can carry) to all; return what all gave, in rank order.

        Raises ``RpcTimeout`` that names who did not come, ``StoreLost``.
        """
        data = json.dumps(value).encode()
        while True:
            left = max(0.01, deadline - time.monotonic())
            patience = min(left, _ASK_S) if self.hopeless else left
            try:
                told = synchronize(
                    self._store, data, self.rank, self.world_size, label, patience
                )  # again after a time-out: it goes on waiting
                return [json.loads(each) for each in told]
            except BarrierTimeout as late:
                reason = self.hopeless() if self.hopeless else ""
                if reason or time.monotonic() >= deadline:
                    raise self._lateness(label, late, reason) from late

    def farewell(self, deadline: float) -> None:
        """Let rank 0 go last: it may host the store that the others still read."""
        keys = [f"gone/{rank}" for rank in range(1, self.world_size)]
        left = timedelta(seconds=max(0.01, deadline - time.monotonic()))
        with suppress(RuntimeError):
            if self.rank:
                self._store.set(f"gone/{self.rank}", "")
            elif keys:
                bounded(lambda: self._store.wait(keys, left), deadline, "shutdown")

    def _lateness(self, label: str, late: BarrierTimeout, reason: str) -> RpcTimeout:
        missing: Sequence[int] = late.missing_ranks
        names = ", ".join(self.describe(rank) for rank in missing) or "not known"
        return RpcTimeout(
            f"RPC {label} on {self.describe(self.rank)}: {late.arrived} of {self.world_size} "
            f"workers came{' (' + reason + ')' if reason else ' in time'}; missing: {names}",
            missing_ranks=missing,
            arrived=late.arrived,
            world_size=self.world_size,
            hosts=late.hosts,
            rank=self.rank,
            what=label,
        )


def claim_place(store: Store, name: str, rank: int, world_size: int, deadline: float) -> Roll:
    """Take a place in the group and return its roll.

    A rank or world size of -1 is taken from the group. Raises ``RuntimeError`` where either
    disagrees with what the group knows, ``RpcTimeout`` where nobody says how many it is of,
    ``StoreLost``.
    """
    return bounded(
        lambda: _claim_place(store, name, rank, world_size, deadline), deadline, f"init of {name!r}"
    )


def _claim_place(store: Store, name: str, rank: int, world_size: int, deadline: float) -> Roll:
    size = _agreed_size(store, world_size, deadline)
    if world_size not in (-1, size):
        raise RuntimeError(
            f"world_size argument {world_size} of worker {name!r} doesn't match group size {size}"
        )
    if not -1 <= rank < size:
        raise RuntimeError(
            f"rank argument {rank} of worker {name!r} doesn't match group size {size}"
        )
    for candidate in range(size) if rank == -1 else [rank]:
        holder = _claim(store, f"place/{candidate}", name)
        if holder is None:
            return Roll(store, candidate, size)
    if rank == -1:
        raise RuntimeError(f"all {size} ranks of the group are taken: no place for {name!r}")
    raise RuntimeError(
        f"rank argument {rank} of worker {name!r} is not unique: worker {holder!r} has rank {rank}"
    )


def _agreed_size(store: Store, world_size: int, deadline: float) -> int:
    if world_size != -1:
        return int(store.compare_set("size", "", str(world_size)))
    try:
        store.wait(["size"], timedelta(seconds=max(0.01, deadline - time.monotonic())))
    except RuntimeError as error:
        raise RpcTimeout("no worker of the group has said how many there are") from error
    return int(store.get("size"))


def _claim(store: Store, key: str, name: str) -> str | None:
    """Set a key that nobody has set; return who has otherwise."""
    if store.add(f"{key}/claims", 1) == 1:
        store.set(f"{key}/name", name)
        return None
    store.wait([f"{key}/name"])
    return store.get(f"{key}/name").decode()


def check_names(names: Iterable[str]) -> None:
    """Raise ``RuntimeError`` naming the ranks that chose one name."""
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        ranks.setdefault(name, []).append(rank)
    for name, owners in ranks.items():
        if len(owners) > 1:
            shared = " and ".join(map(str, owners))
            raise RuntimeError(f"worker name {name!r} is not unique: ranks {shared} have it")
