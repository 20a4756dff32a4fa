"""Tell other ranks this host's name over the default group's store, and learn theirs."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch.distributed import distributed_c10d as c10d

from rankcall.capture.groups import watch
from rankcall.ring.tables import Group
from rankcall.rundir import host_name

logger = logging.getLogger("rankcall")


class HostNames:
    """Publishes this rank's host name as soon as there is a default group; asks without waiting.

    ``lookup`` may be called from any thread. The store is never kept, and the group only by a weak
    reference: a store that is kept would keep its port.
    """

    def __init__(self) -> None:
        self._world: tuple[int, ...] = ()
        self._known: dict[int, str] = {}
        self._group: weakref.ref[Any] | None = None
        watch.add(self._on_group)

    def close(self) -> None:
        """Stop watching groups."""
        watch.remove(self._on_group)
        self._group = None

    def lookup(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the hosts of those ranks that have told theirs."""
        store, found = self._store(), dict(self._known)
        if store is None or len(found) == len(self._world):
            return found
        # A wait for a key would hold the store's lock against the training thread: look first.
        with contextlib.suppress(Exception):
            if store.check([_key(rank) for rank in self._world]):
                found = self._known = _told(store, self._world)
            else:
                found |= _told(store, [rank for rank in ranks if store.check([_key(rank)])])
        return found

    def _on_group(self, process_group: Any, group: Group) -> None:
        if process_group is not c10d._world.default_pg and group.description != "default_pg":
            return
        self._world, self._known = group.ranks, {}
        self._group = weakref.ref(process_group)
        rank = group.ranks[process_group.rank()]
        store = self._store()
        try:
            if store is not None:
                store.set(_key(rank), host_name())
        except Exception as error:
            logger.warning("rankcall could not tell the others this host's name: %s", error)

    def _store(self) -> Any:
        """Return the group's store for a moment; None once the group was destroyed."""
        process_group = self._group() if self._group is not None else None
        known = c10d._world.pg_map.get(process_group) if process_group is not None else None
        return known[1] if known is not None else None


def _told(store: Any, ranks: Sequence[int]) -> dict[int, str]:
    """Return what some ranks have told, in one request where the store can: all ranks ask."""
    keys = [_key(rank) for rank in ranks]
    whole = bool(keys) and store.has_extended_api()
    names = store.multi_get(keys) if whole else [store.get(key) for key in keys]
    return {rank: name.decode("utf-8", "replace") for rank, name in zip(ranks, names, strict=True)}


def _key(rank: int) -> str:
    return f"rankcall/host/{rank}"
