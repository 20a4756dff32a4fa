"""Send the evidence of a verdict to other nodes, on the watcher's thread of the node's leader."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from rankcall.attach import COLLECT_TO, evidence_store
from rankcall.capture.recording import Recording, restart_count
from rankcall.errors import warn_once
from rankcall.process import host_name
from rankcall.transfer.bundle import is_shared, keep_bundles, make_bundle, node_rings
from rankcall.transfer.posts import ENDED, SETTLE_S, Posts
from rankcall.transfer.remote import upload
from rankcall.watch._exchange import Exchange, Unreachable

logger = logging.getLogger("rankcall.watch")

_MARGIN_S = 4.0  # for the requests


class EvidenceSender:
    """Sends the bundles of one node, and keeps those of others if this node collects them."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._exchange = Exchange(_store)
        self._last: Posts | None = None

    def send(self, recording: Recording, verdict: str) -> None:
        """Send this node's bundle for a verdict, and keep those of other nodes if it collects.

        Never raises. Takes ten seconds at most, if other nodes do not answer.
        """
        try:
            self._send(recording, verdict)
        except Unreachable as error:
            logger.debug("the newest records are not sent to other nodes: %s", error)
        except (OSError, ValueError) as error:
            logger.warning("the newest records cannot be sent to other nodes: %s", error)

    def _send(self, recording: Recording, verdict: str) -> None:
        identity, url = recording.identity, os.environ.get(COLLECT_TO, "")
        rings = node_rings(self._run_dir, identity.attempt)
        if url:
            upload(url, self._run_dir, rings, rings)
        mine = {header.rank for header in rings.values()}
        world = max((header.world_size for header in rings.values()), default=0)
        if len(mine) >= world:
            return  # all ranks are on this node
        found = evidence_store()
        if found is None:
            return
        prefix = f"{found[1]}/{identity.attempt}"
        if self._last is not None and 0 in mine:
            self._exchange.perform(_MARGIN_S, self._last.remove())
        first_attempt = identity.attempt - restart_count()
        shared = is_shared(self._run_dir, first_attempt)
        bundle = b"" if shared else make_bundle(self._run_dir, rings, world)
        self._last = Posts(f"{prefix}/{verdict}")
        name = f"{host_name()}.{os.getpid()}"
        steps = self._last.exchange(mine, bundle, world, name)
        bundles = self._exchange.perform(SETTLE_S + _MARGIN_S, steps)
        if 0 in mine:  # a node whose ranks have all ended does not answer
            ended = Posts(f"{prefix}/{ENDED}").collect(mine, world, 0.0)
            bundles += self._exchange.perform(_MARGIN_S, ended)
        for problem in keep_bundles(self._run_dir, bundles):
            warn_once(problem)


def _store() -> Any:
    found = evidence_store()
    return None if found is None else found[0]
