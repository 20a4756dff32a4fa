"""Process groups: notice them as torch.distributed creates them, and find ranks on other hosts.

torch keeps every group's ranks in one dict, filled at the end of each way to make a group. A dict
of ours in its place sees them all: init, new_group, subgroups, DeviceMesh, split_group. It is put
there once and stays: another thread may be adding a group while recording is switched on or off.

Groups are referred to weakly. A group that is kept alive keeps its store's server listening, and
the next ``init_process_group("env://")`` on that port would fail.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rankcall.ring.tables import ERA, Group

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
        # How often torch started over (``init_process_group``), and how often each name was used
        # since: together they are a group's epoch, because torch uses names again.
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


def back_ends_of(process_group: Any) -> dict[str, str]:
    """Return the back ends that a group has, by kind of device."""
    devices = {device.type for device in process_group._device_types}
    config = str(c10d._world.pg_backend_config.get(process_group, ""))
    by_device = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    return {device: name for device, name in by_device.items() if device in devices}


def sides_of(group: Group, back_ends: Mapping[str, str]) -> tuple[Group, Group | None]:
    """Return a group as its back end for devices has it, and as one of its own for the CPU has it.

    Each back end counts its own calls. With ``cpu:gloo,cuda:nccl``, two threads may issue on both
    at a time, so that a count of both would differ from rank to rank.
    """
    on_host = back_ends.get("cpu")
    others = sorted({*back_ends.values()} - {on_host})
    if on_host is None or not others:
        return group, None
    return (
        replace(group, backend=",".join(others)),
        replace(group, name=f"{group.name}/cpu", backend=on_host),
    )


watch = GroupWatch()
