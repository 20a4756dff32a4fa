"""The run that the ranks of a job choose: how it is published in the store, and in which store."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankcall.c10d.requests import Read, Steps, Until

if TYPE_CHECKING:
    from torch.distributed import Store

KEY = "rankcall/run"
MOST_ATTEMPTS = 100_000  # of one run directory; a larger number is damage


@dataclass(frozen=True)
class Choice:
    """The run of a job. ``first_attempt`` is the number of its attempt before any restart."""

    run_dir: Path
    first_attempt: int = 0

    def encode(self) -> bytes:
        """Return the choice as it is published in the store."""
        return json.dumps({"run_dir": str(self.run_dir), "attempt": self.first_attempt}).encode()


def decode(published: bytes) -> Choice:
    """Return a choice that was published. Raises ``ValueError`` if it is not a choice."""
    try:
        fields = json.loads(published)
        run_dir, attempt = Path(fields["run_dir"]), int(fields["attempt"])
    except (TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"not the choice of a run: {published[:200]!r}") from error
    if not run_dir.is_absolute() or not 0 <= attempt < MOST_ATTEMPTS:
        raise ValueError(f"not the choice of a run: {published[:200]!r}")
    return Choice(run_dir, attempt)


def agree(key: str, propose: Callable[[], Choice] | None) -> Steps[Choice | None]:
    """Return the choice of the job; None if it has not been published by the deadline.

    Args:
        key: The key in the store, the same on all ranks.
        propose: Called if nothing is published yet. Without it, wait for another rank's proposal.
            If another rank's is returned, the caller withdraws its own.
    """
    if propose is None:
        published = yield Until(Read(key), lambda value: value is not None)
    else:
        published = yield Read(key)
        if published is None:
            from rankcall.c10d.parts import publish_once

            published = yield from publish_once(key, propose().encode())
    return None if published is None else decode(published)


def store_and_key(store: Store) -> tuple[Store, str]:
    """Return the store and the key for a group's store.

    Below torchrun it is the agent's store, which all restarts of the job share. Each restart has
    another prefix in it.
    """
    from torch.distributed import PrefixStore, TCPStore

    root: Any = store
    while isinstance(root, PrefixStore):
        root = root.underlying_store
    agent = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if is_elastic() and isinstance(root, TCPStore) and (root.host, str(root.port)) == agent:
        return root, f"{KEY}/{os.environ.get('TORCHELASTIC_RUN_ID', '')}"
    return store, KEY


def evidence_store() -> tuple[Store | None, str]:
    """Return the store through which evidence leaves a node, and the prefix of its keys there.

    None and an empty prefix if the default group is gone, and its store with it.
    """
    from torch.distributed import distributed_c10d

    world: Any = distributed_c10d._world
    group = world.default_pg
    if group is None:
        return None, ""
    store, key = store_and_key(world.pg_map[group][1])
    return store, f"rankcall/evidence{key.removeprefix(KEY)}"


def is_elastic() -> bool:
    """Return whether a torchrun agent holds the job's store, and may restart the job."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
