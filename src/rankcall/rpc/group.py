"""What all back ends share. Each back end is one module, imported when it is first used."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed.rpc import _is_current_rpc_agent_set, api

from rankcall.background import BackgroundCall
from rankcall.errors import RpcTimeout, StoreLostError

# The RPC group of this process, and what all back ends need to join and leave one.


_DEFAULT_INIT_S = 60.0
_SHORTEST_INIT_S = 5.0
_GRACE_S = 0.5  # lets the call's own timeout fire first: its error is clearer

T = TypeVar("T")


class Group(Protocol):
    """A group that this process has joined."""

    def leave(self, deadline: float) -> None:
        """Leave in good order, by the deadline (monotonic seconds)."""


class _State:
    def __init__(self) -> None:
        self.group: Group | None = None


_state = _State()


def set_group(group: Group | None) -> None:
    """Remember the group for ``shutdown``, or forget it."""
    _state.group = group


def current_group() -> Group | None:
    """Return the group if this process is in one."""
    return _state.group


def bounded(call: Callable[[], T], deadline: float, doing: str) -> T:
    """Return what ``call()`` returns or raise what it raises; it runs on a helper thread.

    None of a TCPStore's timeouts applies while its host is stopped, so this raises
    ``StoreLostError`` if
    the call has not ended by the deadline (monotonic seconds). The thread is left behind then.
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
    """Return the time to a deadline, but no less than ``least``."""
    return max(least, deadline - time.monotonic())


def wait_idle(agent: Any, deadline: float) -> None:
    """Wait until no call of this worker is in flight. Raises ``RpcTimeout``."""
    while calls := int(agent.get_debug_info().get("agent.client_active_calls", 0)):
        if time.monotonic() > deadline:
            raise RpcTimeout(
                f"worker {agent.get_worker_info().name!r} still waits for the answers to "
                f"{calls} of its calls"
            )
        time.sleep(0.005)


def check_arguments(store: dist.Store, options: Any, wanted: type) -> None:
    """Raise ``TypeError`` if a back end got something else than a store and its own options."""
    if not isinstance(store, dist.Store):
        raise TypeError(f"`store` must be a c10d::Store; got {type(store).__name__} {store!r}")
    if not isinstance(options, wanted):
        raise TypeError(
            f"`rpc_backend_options` must be a `{wanted.__name__}`; "
            f"got {type(options).__name__} {options!r}"
        )


@contextlib.contextmanager
def undone_on_error() -> Iterator[None]:
    """Take a half-started agent down again, so that the next ``init_rpc`` can start one."""
    try:
        yield
    except BaseException as error:
        set_group(None)
        if _is_current_rpc_agent_set():
            try:
                api._finalize_shutdown()  # type: ignore[no-untyped-call]
            except Exception as another:
                note = f"taking the agent down failed as well: {another}"
                getattr(error, "add_note", lambda _: None)(note)
        raise
