"""Send a bundle when a rank ends, on a thread of its own that started with the recording.

Python 3.12 starts no thread while the interpreter exits, and the user's thread must not wait for
a store. So each rank of a job with several nodes has a thread that waits for the end. Then it
sends the records of this rank, and of the ranks of its node that have ended without sending
theirs. Rank 0 collects the records that the ranks of other nodes have sent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rankcall.background import BackgroundCall, exit_budget
from rankcall.c10d.requests import Steps
from rankcall.capture.recording import RecordingEnd
from rankcall.job.bundles import is_shared, keep_bundles, make_bundle, node_rings
from rankcall.job.posts import ENDED, Posts
from rankcall.job.sealing import sealed
from rankcall.job.uploads import upload
from rankcall.ring.layout import Header

if TYPE_CHECKING:
    from torch.distributed import Store


Rings = dict[Path, Header]
T = TypeVar("T")

logger = logging.getLogger("rankcall")

LEAVE_S = 1.0  # how long the end of a process is held up, at most
_STORE_S = 0.8  # of it, for the store: it has to end before the process goes on without it
_UPLOAD_S = 1.5  # more, if the records also go to a URL

FindStore = Callable[[], "tuple[Store | None, str]"]


@dataclass(frozen=True)
class Place:
    """The place of a rank's records."""

    run_dir: Path
    attempt: int
    rank: int
    world_size: int


class Departure:
    """Sends the records of this rank when it ends.

    Args:
        place: The place of the records.
        find_store: Returns the job's store (or None) and the prefix of the job's
            evidence. No reference to the store is kept.
        url: Where to write the records as well; empty for nowhere.
    """

    def __init__(self, place: Place, find_store: FindStore, url: str = "") -> None:
        self._place = place
        self._url = url
        self._find_store = find_store
        self._wake = threading.Event()
        self._is_leaving = self._has_failed = False
        from rankcall.c10d.calls import Call  # here: the launcher imports this without torch

        self._call = Call("the newest records of this rank")
        self._pid = os.getpid()
        self._helper = BackgroundCall(self._run, "rankcall-leave")

    def recording_ended(self, how: RecordingEnd) -> None:
        """Send the records if the process ends; otherwise only end the thread."""
        if how.process_ends:
            self.leave(how.has_failed)
        else:
            self.stay()

    def leave(self, failed: bool) -> None:
        """Send the records now; wait for that for a second at most. Never raises.

        If ``failed``, an exception has ended this rank. Rank 0 then waits for the other nodes.
        """
        if self._is_leaving or os.getpid() != self._pid:
            return
        self._is_leaving, self._has_failed = True, failed
        self._wake.set()
        most = LEAVE_S + (_UPLOAD_S if self._url else 0.0)
        if not exit_budget.spend(self._helper.ended, most):
            with contextlib.suppress(Exception):
                self._call.abandon()
            logger.debug("the newest records of this rank have not been sent in time")

    def stay(self) -> None:
        """End the thread without sending anything."""
        self._wake.set()
        if os.getpid() == self._pid:
            exit_budget.spend(self._helper.ended, LEAVE_S)

    def _run(self) -> None:
        self._wake.wait()
        try:
            if self._is_leaving:
                self._send()
        except Exception as error:  # of the store, the disk or the network
            logger.debug("the newest records of this rank are not sent: %s", error)

    def _send(self) -> None:
        place = self._place
        rings = node_rings(place.run_dir, place.attempt)
        ended = _ended(rings, place.rank)
        if self._url:
            upload(self._url, place.run_dir, ended, rings)
        mine = {header.rank for header in rings.values()}
        if len(mine) >= place.world_size or is_shared(place.run_dir, place.attempt):
            return
        store, prefix = self._find_store()
        if store is None or (0 in mine and place.rank != 0):
            return
        posts = Posts(f"{prefix}/{place.attempt}/{ENDED}", place.world_size)
        if place.rank == 0:
            wait_s = _STORE_S if self._has_failed else 0.0
            steps = posts.collect(mine, wait_s)
            bundles = self._perform(store, steps)
            for problem in keep_bundles(place.run_dir, bundles):
                logger.warning(problem)
        else:
            bundle = make_bundle(place.run_dir, ended, place.world_size, rings)
            ranks = {header.rank for header in ended.values()}
            self._perform(store, posts.post(ranks, bundle))

    def _perform(self, store: Store, steps: Steps[T]) -> T:
        """Make requests to the job's store on this thread: none can be started at exit."""
        from rankcall.c10d.client import Over, perform

        return perform(store, _STORE_S, sealed(steps), over=Over.NEW, call=self._call)


def _ended(rings: Rings, rank: int) -> Rings:
    """Return the rings of this rank and of those that have ended."""
    return {
        path: header
        for path, header in rings.items()
        if header.rank == rank or header.process_state() not in ("alive", "stopped")
    }
