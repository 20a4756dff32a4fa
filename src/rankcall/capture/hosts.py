"""Find out which ranks are on other hosts.

torchrun's variables say it. Without torchrun, ranks announce their host names through the store
of the default group. The number of devices on a host is never used: it is wrong for jobs on the
CPU, for hosts of different sizes and for GPUs that are divided between jobs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rankcall.capture.groups import watch
from rankcall.process import host_name
from rankcall.ranks import MAX_RANKS
from rankcall.ring.tables import Group
from rankcall.whole_numbers import whole_number

logger = logging.getLogger("rankcall")

# Until a rank has said where it is, it is taken for one elsewhere. It is not asked for at each op,
# because a look-up is a request to the job's store.
_ASK_AGAIN_SECONDS = 0.2

Lookup = Callable[[Iterable[int]], dict[int, str]]


def ranks_of_this_node() -> range | None:
    """Return the ranks of this torchrun agent, which are consecutive; None without torchrun."""
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    numbers = [whole_number(os.environ.get(name), most=MAX_RANKS) for name in names]
    rank, local_rank, local_size, node = numbers
    if rank is None or local_rank is None or local_size is None or node is None:
        return None
    return range(rank - local_rank, rank - local_rank + local_size)


class Hosts:
    """Answers whether a group crosses hosts; looks each group and rank up once.

    ``lookup`` returns the hosts of those ranks that have announced theirs. A rank that has not
    counts as being on another host: a surplus description is better than a missing one.
    """

    def __init__(
        self,
        here: range | None,
        host: str,
        lookup: Lookup,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._not_before = 0.0
        self._here = here
        self._host = host
        self._lookup = lookup
        self._hosts: dict[int, str] = {}
        self._crossing: dict[tuple[int, ...], bool] = {}

    def crosses(self, ranks: tuple[int, ...]) -> bool:
        """Tell whether a group of this rank has members on more than one host."""
        known = self._crossing.get(ranks)
        if known is None:
            known = any(self.is_elsewhere(rank) for rank in ranks) or not ranks
            if self._here is not None or all(rank in self._hosts for rank in ranks):
                self._crossing[ranks] = known
        return known

    def is_elsewhere(self, rank: int) -> bool:
        """Tell whether a rank is on another host."""
        if self._here is not None:
            return rank not in self._here
        if rank not in self._hosts and self._clock() >= self._not_before:
            self._hosts.update(self._lookup([rank]))
            if rank not in self._hosts:
                self._not_before = self._clock() + _ASK_AGAIN_SECONDS
        return self._hosts.get(rank) != self._host


class HostNames:
    """Announces this rank's host name once there is a default group, and looks up the others'.

    ``lookup`` never waits for another rank, and may be called from any thread. The store is never
    kept, and the group only by a weak reference: a store that is kept would keep its port.
    """

    def __init__(self) -> None:
        self._world: tuple[int, ...] = ()
        self._names: dict[int, str] = {}
        self._group: weakref.ref[Any] | None = None
        self._groups = watch
        watch.add(self._on_group)

    def close(self) -> None:
        """Stop watching groups."""
        self._groups.remove(self._on_group)
        self._group = None

    def lookup(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the hosts of those ranks that have announced theirs."""
        store, names = self._store(), dict(self._names)
        if store is None or len(names) == len(self._world):
            return names
        # A wait for a key would hold the store's lock against the training thread, so check first.
        with contextlib.suppress(Exception):
            if store.check([_key(rank) for rank in self._world]):
                names = self._names = _read_names(store, self._world)
            else:
                names |= _read_names(store, [rank for rank in ranks if store.check([_key(rank)])])
        return names

    def _on_group(self, process_group: Any, group: Group) -> None:
        if process_group is not _world().default_pg and group.description != "default_pg":
            return
        self._world, self._names = group.ranks, {}
        self._group = weakref.ref(process_group)
        rank = group.ranks[process_group.rank()]
        store = self._store()
        try:
            if store is not None:
                store.set(_key(rank), host_name())
        except Exception as error:
            logger.warning("rankcall could not announce this host's name: %s", error)

    def _store(self) -> Any:
        """Return the group's store for the moment of a request; None once the group is gone."""
        process_group = self._group() if self._group is not None else None
        known = _world().pg_map.get(process_group) if process_group is not None else None
        return known[1] if known is not None else None


def _world() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._world


def _read_names(store: Any, ranks: Sequence[int]) -> dict[int, str]:
    """Return the names that some ranks have announced, in one request if the store has that."""
    keys = [_key(rank) for rank in ranks]
    at_once = bool(keys) and store.has_extended_api()
    names = store.multi_get(keys) if at_once else [store.get(key) for key in keys]
    return {rank: name.decode("utf-8", "replace") for rank, name in zip(ranks, names, strict=True)}


def _key(rank: int) -> str:
    return f"rankcall/host/{rank}"
