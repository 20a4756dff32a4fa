"""How much a call's time says about the machine and how much about the call."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_TICK_S = 0.01
_CHAIN = 10  # a call goes through that many hands at most: threads, processes, the store's


@contextmanager
def stopwatch() -> Iterator[list[float]]:
    """Time a block; the list has, after it, the seconds it would take on an idle machine.

    A thread that sleeps again and again shows by how much the machine makes a thread wait.
    """
    took: list[float] = []
    worst, over = 0.0, threading.Event()

    def watch() -> None:
        nonlocal worst
        while not over.is_set():
            began = time.monotonic()
            over.wait(_TICK_S)
            worst = max(worst, time.monotonic() - began - _TICK_S)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    began = time.monotonic()
    try:
        yield took
    finally:
        seconds = time.monotonic() - began
        over.set()
        thread.join()
        took.append(max(0.0, seconds - _CHAIN * worst))
