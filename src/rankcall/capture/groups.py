"""Process groups: notice them as torch.distributed creates them, and find ranks on other hosts.

torch keeps every group's ranks in one dict, filled at the end of each way to make a group. A dict
of ours in its place sees them all: init, new_group, subgroups, DeviceMesh, split_group. It is put
there once and stays: another thread may be adding a group while recording is switched on or off.

Groups are referred to weakly. A group that is kept alive keeps its store's server listening, and
the next ``init_process_group("env://")`` on that port would fail.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rankcall.process import host_name
from rankcall.ring import ERA, Group

logger = logging.getLogger("rankcall")
_MOST_NAMES = 1 << 16  # of groups, to tell whether one is used again
Observer = Callable[[Any, Group], None]


class _GroupRanks(dict[Any, dict[int, int]]):
    """torch's table of group ranks, which reports every new group."""

    def __init__(self, report: Callable[[Any], None]) -> None:
        super().__init__()
        self._report = report

    def __setitem__(self, group: Any, ranks: dict[int, int]) -> None:
        is_new = group not in self
        super().__setitem__(group, ranks)
        if is_new and isinstance(group, dist.ProcessGroup):
            self._report(group)


class GroupWatch:
    """Tells observers of new process groups, inline, on the thread that creates them."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []
        self._era = -1
        self._uses: dict[str, int] = {}
        self._known: weakref.WeakKeyDictionary[Any, Group] = weakref.WeakKeyDictionary()
        self._is_installed = False

    def add(self, observer: Observer, existing: bool = True) -> None:
        """Observe; groups that exist are reported at once."""
        if not self._observers:
            self._describe_existing()
        self._observers.append(observer)
        if existing:
            for process_group in list(c10d._world.pg_group_ranks):
                if process_group in self._known:
                    self._call(observer, process_group, self._known[process_group])

    def remove(self, observer: Observer) -> None:
        """Stop observing."""
        if observer in self._observers:
            self._observers.remove(observer)

    def forget(self) -> None:
        """Stop observing altogether: this is a forked child, and the observers are its parent's."""
        self._observers = []

    def _describe_existing(self) -> None:
        self._install()
        self._era, self._uses, self._known = -1, {}, weakref.WeakKeyDictionary()
        for process_group, ranks in list(c10d._world.pg_group_ranks.items()):
            if isinstance(process_group, dist.ProcessGroup):
                self._describe(process_group, ranks)

    def _install(self) -> None:
        """Put our dict in the place of torch's, without losing what is added meanwhile."""
        table = c10d._world.pg_group_ranks
        if isinstance(table, _GroupRanks):
            return
        ours = _GroupRanks(self._on_group)
        dict.update(ours, table)
        c10d._pg_group_ranks = ours
        dict.update(ours, {group: table[group] for group in list(table) if group not in ours})
        if not self._is_installed:
            self._is_installed = True
            os.register_at_fork(after_in_child=self.forget)

    def _on_group(self, process_group: Any) -> None:
        if not self._observers:
            return
        try:
            group = self._describe(process_group, c10d._world.pg_group_ranks[process_group])
        except Exception:
            logger.warning("rankcall could not describe a new process group", exc_info=True)
            return
        for observer in list(self._observers):
            self._call(observer, process_group, group)

    def _call(self, observer: Observer, process_group: Any, group: Group) -> None:
        try:
            observer(process_group, group)
        except Exception:
            logger.warning("an observer of process groups failed", exc_info=True)

    def _describe(self, process_group: Any, ranks: dict[int, int]) -> Group:
        name = str(c10d._world.pg_names[process_group])
        if process_group is c10d._world.default_pg or self._starts_over():
            self._era, self._uses = self._era + 1, {}
        if len(self._uses) >= _MOST_NAMES:
            self._uses = {}
        epoch = max(self._era, 0) * ERA + self._uses.get(name, 0)
        self._uses[name] = self._uses.get(name, 0) + 1
        backend = str(c10d._world.pg_map[process_group][0]).lower()
        group = Group(
            name,
            epoch,
            backend,
            str(getattr(process_group, "group_desc", "") or ""),
            tuple(sorted(ranks, key=lambda rank: ranks[rank])),
        )
        self._known[process_group] = group
        return group

    def _starts_over(self) -> bool:
        """Tell whether torch has forgotten all groups that are known here."""
        table = c10d._world.pg_group_ranks
        return not any(known in table for known in list(self._known))


watch = GroupWatch()


# Find out which ranks are on other hosts.
#
# torchrun's variables say it. Without torchrun, ranks announce their host names through the store
# of the default group. The number of devices on a host is never used: it is wrong for jobs on the
# CPU, for hosts of different sizes and for GPUs that are divided between jobs.


_ASK_AGAIN_SECONDS = 0.2

Lookup = Callable[[Iterable[int]], dict[int, str]]


def ranks_of_this_node() -> range | None:
    """Return the ranks of this torchrun agent, which are consecutive; None without torchrun."""
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    numbers = [os.environ.get(name, "") for name in names]
    if not all(number.isdigit() for number in numbers):
        return None
    rank, local_rank, local_size, _ = map(int, numbers)
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
