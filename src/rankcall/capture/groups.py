"""Notice process groups as torch.distributed creates them, without wrapping its functions.

torch keeps every group's ranks in one dict, filled at the end of each way to make a group. A dict
of ours in its place sees them all: init, new_group, subgroups, DeviceMesh, split_group.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rankcall.ring.tables import ERA, Group

logger = logging.getLogger("rankcall")
Observer = Callable[[Any, Group], None]


class _GroupRanks(dict[Any, dict[int, int]]):
    """torch's table of group ranks, which tells observers about every new group."""

    def __init__(self, content: dict[Any, dict[int, int]], told: Callable[[Any], None]) -> None:
        super().__init__(content)
        self._told = told

    def __setitem__(self, group: Any, ranks: dict[int, int]) -> None:
        new = group not in self
        super().__setitem__(group, ranks)
        if new and isinstance(group, dist.ProcessGroup):
            self._told(group)


class GroupWatch:
    """Tells observers of new process groups, inline, on the thread that creates them."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []
        self._era = -1
        self._uses: dict[str, int] = {}
        self._known: dict[Any, Group] = {}
        self._forks = False

    def add(self, observer: Observer, existing: bool = True) -> None:
        """Observe; groups that exist are reported at once. The first observer arms the watch."""
        if not self._observers:
            self._arm()
        self._observers.append(observer)
        if existing:
            for process_group in list(c10d._world.pg_group_ranks):
                if process_group in self._known:
                    self._call(observer, process_group, self._known[process_group])

    def remove(self, observer: Observer) -> None:
        """Stop observing; the last one to go puts torch's own dict back."""
        if observer in self._observers:
            self._observers.remove(observer)
            if not self._observers:
                self._disarm()

    def forget(self) -> None:
        """Stop observing altogether: this is a forked child, and the observers are its parent's."""
        if self._observers:
            self._observers = []
            self._disarm()

    def _arm(self) -> None:
        if not self._forks:
            self._forks = True
            os.register_at_fork(after_in_child=self.forget)
        self._era, self._uses, self._known = -1, {}, {}
        table = c10d._world.pg_group_ranks
        for process_group in table:
            if isinstance(process_group, dist.ProcessGroup):
                self._describe(process_group, table[process_group])
        c10d._pg_group_ranks = _GroupRanks(table, self._told)

    def _disarm(self) -> None:
        c10d._pg_group_ranks = dict(c10d._pg_group_ranks)
        self._known = {}

    def _told(self, process_group: Any) -> None:
        try:
            table = c10d._world.pg_group_ranks
            self._known = {known: self._known[known] for known in table if known in self._known}
            group = self._describe(process_group, table[process_group])
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
        if process_group is c10d._world.default_pg or not self._known:
            self._era, self._uses = self._era + 1, {}
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


watch = GroupWatch()
