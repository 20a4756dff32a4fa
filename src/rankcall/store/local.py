"""What this process remembers of the agreements that it makes over one store object."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import Store

from rankcall.c10d.calls import on_fork
from rankcall.c10d.own_connections import state_of
from rankcall.store._keys import Keys, attempt_of_this_process, keys_of


@dataclass
class LocalStore:
    """The memory of one store object. It lives as long as that does."""

    appends: bool  # whether the store can append to a key
    counts: bool  # whether the store takes ``Arrive``
    attempt: int  # of the job, when this process first agreed over the store
    members: dict[Any, Any] = field(default_factory=dict)
    seen: dict[str, tuple[bytes, float]] = field(default_factory=dict)  # of roll calls

    def keys(self, prefix: str, attempt: int | None, world_size: int) -> Keys:
        """Return the keys of a world under a prefix."""
        which = self.attempt if attempt is None else attempt
        return keys_of(prefix, which, world_size, self.appends, self.counts)


# Weak, because rankcall keeps no store of the user's alive.
_known: weakref.WeakKeyDictionary[Store, LocalStore] = weakref.WeakKeyDictionary()
on_fork(_known.clear)  # a child is another process: it has not arrived where its parent has


def local_store(store: Store) -> LocalStore:
    """Return what this process remembers of a store object; or raise ``TypeError``."""
    local = _known.get(store) if isinstance(store, Store) else None
    if local is None:
        state = state_of(store)  # raises
        local = LocalStore(state.appends, state.counts, attempt_of_this_process())
        local = _known.setdefault(store, local)  # another thread may have been faster
    return local
