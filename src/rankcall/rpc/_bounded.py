"""Calls that always end: none of a TCPStore's time-outs applies while its host is stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from rankcall.background import BackgroundCall
from rankcall.store import StoreLost

_GRACE_S = 0.5  # what ends by itself at the deadline says better why

T = TypeVar("T")


def bounded(call: Callable[[], T], deadline: float, doing: str) -> T:
    """Return what ``call()`` returns or raise what it raises; it runs on a thread of its own.

    Raises ``StoreLost`` where it has not ended by the deadline (monotonic seconds); the thread is
    left behind then.
    """
    helper = BackgroundCall(call, "rankcall-rpc-store")
    if not helper.ended(max(0.0, deadline - time.monotonic()) + _GRACE_S):
        raise StoreLost(
            f"RPC {doing}: the store does not answer: its host is stopped, or cut off. "
            "Look at the process that hosts it"
        )
    return helper.outcome()
