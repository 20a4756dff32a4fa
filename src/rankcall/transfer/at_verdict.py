"""Send the evidence of a verdict to other nodes, on the watcher's thread of the node's leader."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rankcall.transfer.bundle import (
    COLLECT_TO,
    is_shared,
    keep_bundles,
    make_bundle,
    node_rings,
    upload,
)
from rankcall.transfer.posts import ENDED, SETTLE_S, Posts

_MARGIN_S = 4.0  # for the requests

Perform = Callable[[float, Any], Any]  # makes requests to the job's store, with a deadline


class EvidenceSender:
    """Sends the bundles of one node, and keeps those of others if this node collects them.

    Args:
        run_dir: The run directory of this node.
        name: A name of this node that no other node has.
        perform: Makes the requests of a protocol.
    """

    def __init__(self, run_dir: Path, name: str, perform: Perform) -> None:
        self._run_dir = run_dir
        self._name = name
        self._perform = perform
        self._last: Posts | None = None

    def send(self, prefix: str, verdict: str, first_attempt: int, attempt: int) -> list[str]:
        """Send this node's bundle for a verdict, and keep those of other nodes if it collects.

        Takes ten seconds at most, if other nodes do not answer. Raises ``OSError``, and what
        ``perform`` raises.

        Args:
            prefix: The prefix of the job's evidence in the store; empty if there is no store.
            verdict: The id of the verdict, the same on all nodes.
            first_attempt: The attempt of the job before any restart.
            attempt: The attempt of the job now.

        Returns:
            A line for each bundle that cannot be kept.
        """
        rings = node_rings(self._run_dir, attempt)
        url = os.environ.get(COLLECT_TO, "")
        if url:
            upload(url, self._run_dir, rings, rings)
        mine = {header.rank for header in rings.values()}
        world = max((header.world_size for header in rings.values()), default=0)
        if len(mine) >= world or not prefix:
            return []  # all ranks are on this node
        if self._last is not None and 0 in mine:
            self._perform(_MARGIN_S, self._last.remove())
        shared = is_shared(self._run_dir, first_attempt)
        bundle = b"" if shared else make_bundle(self._run_dir, rings, world)
        self._last = Posts(f"{prefix}/{attempt}/{verdict}")
        steps = self._last.exchange(mine, bundle, world, self._name)
        bundles = self._perform(SETTLE_S + _MARGIN_S, steps)
        if 0 in mine:  # a node whose ranks have all ended does not answer
            ended = Posts(f"{prefix}/{attempt}/{ENDED}").collect(mine, world, 0.0)
            bundles += self._perform(_MARGIN_S, ended)
        return keep_bundles(self._run_dir, bundles)
