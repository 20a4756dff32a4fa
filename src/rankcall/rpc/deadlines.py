"""What RPC waits for while it starts and ends, each wait with a deadline (monotonic seconds)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from rankcall.background import BackgroundCall
from rankcall.errors import RpcTimeout, StoreLostError

_DEFAULT_INIT_S = 60.0  # torch's default for the timeout of a call
# A user who gives calls a short timeout does not mean the start: other workers may still be
# importing torch, which takes seconds.
_SHORTEST_INIT_S = 5.0
_GRACE_S = 0.5  # lets the call's own timeout fire first: its error is clearer
_IDLE_POLL_S = 0.005  # the agent has no event for its last answer, and a shutdown is rare

T = TypeVar("T")


def bounded(call: Callable[[], T], deadline: float, doing: str) -> T:
    """Return what ``call()`` returns or raise what it raises; it runs on a helper thread.

    Raises ``StoreLostError`` if the call has not ended by the deadline, and leaves the thread
    behind. A thread is needed because none of a TCPStore's timeouts applies while its host is
    stopped.
    """
    helper = BackgroundCall(call, "rankcall-rpc-store")
    if not helper.ended(max(0.0, deadline - time.monotonic()) + _GRACE_S):
        helper.give_up()
        raise StoreLostError(
            f"RPC {doing}: the store does not answer: the process that hosts it is stopped, or "
            "cut off from this one. Look at that process"
        )
    return helper.outcome()


def init_deadline(rpc_timeout: float) -> float:
    """Return the deadline of ``init_rpc``, given the timeout of a call.

    A timeout of 0 means calls without a deadline; ``init_rpc`` has one all the same.
    """
    return time.monotonic() + max(rpc_timeout or _DEFAULT_INIT_S, _SHORTEST_INIT_S)


def seconds_left(deadline: float, least: float = 0.1) -> float:
    """Return the time to a deadline, but no less than ``least``.

    What comes after a deadline still gets a moment. torch takes a timeout of 0 for none at all, and
    a store that is well answers within that moment.
    """
    return max(least, deadline - time.monotonic())


def wait_idle(agent: Any, deadline: float) -> None:
    """Wait until no call of this worker is in flight. Raises ``RpcTimeout``."""
    while calls := int(agent.get_debug_info().get("agent.client_active_calls", 0)):
        if time.monotonic() > deadline:
            raise RpcTimeout(
                f"worker {agent.get_worker_info().name!r} still waits for the answers to "
                f"{calls} of its calls"
            )
        time.sleep(_IDLE_POLL_S)
