"""Send the evidence of a verdict to other nodes, on the watcher's thread of the node's leader."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rankcall.background import BackgroundCall
from rankcall.errors import warn_once
from rankcall.job.bundles import is_shared, keep_bundles, make_bundle, node_rings
from rankcall.job.posts import ENDED, SETTLE_S, Posts
from rankcall.job.uploads import upload
from rankcall.ring.layout import Header

COLLECT_TO = "RANKCALL_COLLECT_TO"  # a URL, to which each node writes its newest records

Rings = dict[Path, Header]

MOST_S = SETTLE_S + 4.0  # that ``send`` takes: the verdict may have to end the job after it

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

    def send(self, prefix: str, verdict: str, attempt: int) -> list[str]:
        """Send this node's bundle for a verdict, and keep those of other nodes if it collects.

        Takes ten seconds at most, if the store, other nodes or the URL do not answer. Raises
        ``OSError``, and what ``perform`` raises.

        Args:
            prefix: The prefix of the job's evidence in the store; empty if there is no store.
            verdict: The id of the verdict, the same on all nodes.
            attempt: The attempt of the job.

        Returns:
            A line for each bundle that cannot be kept.
        """
        until = time.monotonic() + MOST_S
        rings = node_rings(self._run_dir, attempt)
        with self._uploading(rings, until):
            mine = {header.rank for header in rings.values()}
            world = max((header.world_size for header in rings.values()), default=0)
            if len(mine) >= world or not prefix:
                return []  # all ranks are on this node

            def perform(steps: Any) -> Any:
                return self._perform(max(0.1, until - time.monotonic()), steps)

            if self._last is not None and 0 in mine:
                perform(self._last.remove())
            shared = is_shared(self._run_dir, attempt)
            bundle = b"" if shared else make_bundle(self._run_dir, rings, world)
            self._last = Posts(f"{prefix}/{attempt}/{verdict}", world)
            bundles = perform(self._last.exchange(mine, bundle, self._name))
            if 0 in mine:  # a node whose ranks have all ended does not answer
                ended = Posts(f"{prefix}/{attempt}/{ENDED}", world)
                bundles += perform(ended.collect(mine, 0.0))
            return keep_bundles(self._run_dir, bundles)

    @contextlib.contextmanager
    def _uploading(self, rings: Rings, until: float) -> Iterator[None]:
        """Write the rings to the URL, if one is given, while the block runs and until then."""
        url = os.environ.get(COLLECT_TO, "")
        if not url:
            yield
            return
        call = BackgroundCall(lambda: upload(url, self._run_dir, rings, rings), "rankcall-upload")
        try:
            yield
        finally:
            if not call.ended(until - time.monotonic()):
                warn_once(f"the URL of {COLLECT_TO} has not taken any record within {MOST_S:g} s")
                call.give_up()
