"""Calls that always end: none of a TCPStore's time-outs applies while its host is stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from rankcall.store import StoreLost

_GRACE_S = 0.5  # what ends by itself at the deadline says better why

T = TypeVar("T")


def bounded(call: Callable[[], T], deadline: float, doing: str) -> T:
    """Return what ``call()`` returns or raise what it raises; it runs on a thread of its own.

    Raises ``StoreLost`` where it has not ended by the deadline (monotonic seconds); the thread is
    left behind then.
    """
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="rankcall-rpc-store", daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()) + _GRACE_S)
    if raised:
        raise raised[0]
    if not returned:
        raise StoreLost(
            f"RPC {doing}: the store does not answer: its host is stopped, or cut off. "
            "Look at the process that hosts it"
        )
    return returned[0]
