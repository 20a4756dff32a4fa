"""Find the thread of this process that trains: its stack says where the rank stands.

That is not always the main thread. A Ray Train worker, for example, trains in another one. The
rank writes the thread's kernel id into its ring, for processes that ask for stacks.
"""

from __future__ import annotations

import mmap
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from rankcall.record import RECORD
from rankcall.ring.layout import Geometry, offset_of

if TYPE_CHECKING:
    from rankcall.capture.interface import Capture


_NEWEST = 64  # records: a thread that saves checkpoints issues fewer of them
_SEARCH_EVERY = 8  # looks: the heartbeat takes one twice a second, and a search costs most of it


class TrainingThread:
    """The thread that trains, as far as steps and records show it.

    It is the thread that stepped an optimizer last. Without one, it is the thread that issued most
    of the newest calls; before the first call, the thread that switched recording on. With
    autograd's threads for devices, the calls may come from a thread that runs no Python code, so
    only Python's threads count.
    """

    def __init__(self, ring: mmap.mmap, geometry: Geometry) -> None:
        self._ring, self._geometry = ring, geometry
        self._first = threading.get_native_id()
        self._stepped = 0
        self._found, self._looks_left = 0, 0
        self._agree = False  # the newest calls were all of one thread at the last search

    def note_step(self) -> None:
        """Note that this thread has stepped an optimizer."""
        self._stepped = threading.get_native_id()

    def look(self) -> int:
        """Return what ``find`` returns; or has returned at one of the last looks, if calls agreed.

        At the beginning of a job, a search is made at each look: the first calls may come from
        another thread than those that follow, and a rank may hang soon after.
        """
        self._looks_left -= 1
        is_due = self._looks_left < 0 or not self._agree
        if self._stepped or is_due or not _lives(self._found):
            self._found, self._looks_left = self.find(), _SEARCH_EVERY
        return self._found

    def find(self) -> int:
        """Return its kernel id; 0 if it is not known or has ended."""
        if _lives(self._stepped):
            return self._stepped
        threads = _python_threads()
        likeliest = (*self._issuing(), self._first)
        return next((thread for thread in likeliest if thread in threads), 0)

    def _issuing(self) -> list[int]:
        """Return the threads of the newest calls, the one with the most calls first."""
        at = offset_of("head")
        head = int.from_bytes(self._ring[at : at + 8], "little")
        newest = range(max(0, head - min(_NEWEST, self._geometry.capacity)), head)
        slots = np.fromiter(newest, np.int64) & (self._geometry.capacity - 1)
        begin, most = self._geometry.records_offset, self._geometry.capacity
        records = np.frombuffer(self._ring, RECORD, most, begin)
        threads, counts = np.unique(records["thread"][slots], return_counts=True)
        self._agree = len(newest) == _NEWEST and len(threads) == 1
        issuing: list[int] = threads[np.argsort(-counts, kind="stable")].tolist()
        return issuing


def _lives(thread: int) -> bool:
    """Return whether a thread of this process has that kernel id."""
    return thread != 0 and os.path.exists(f"/proc/self/task/{thread}")


def _python_threads() -> set[int | None]:
    """Return the kernel ids of the threads that Python has started, and the main thread's."""
    return {
        thread.native_id
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread)  # one of autograd's may have become this
    }


def count_steps(capture: Capture, training_thread: TrainingThread) -> Any:
    """Count optimizer steps in the ring from now on; return torch's handle, whose remove() ends it.

    Steps of a compiled optimizer are not counted, because a hook would break its graph.
    """
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        # ZeRO's optimizer steps another one inside, which is counted already.
        if type(optimizer).__name__ != "ZeroRedundancyOptimizer":
            capture.step()
            training_thread.note_step()

    return register_optimizer_step_post_hook(stepped)
