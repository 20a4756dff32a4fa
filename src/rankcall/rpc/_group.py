"""The group this process is a member of: kept from its start to its end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.rpc import (
    _delete_all_user_and_unforked_owner_rrefs,
    _is_current_rpc_agent_set,
    api,
)

from rankcall.errors import RpcTimeout
from rankcall.rpc._bounded import bounded
from rankcall.rpc._roll import Roll

_DEFAULT_INIT_S = 60.0
_SHORTEST_INIT_S = 5.0
_NAMING_S = 2.0  # kept of shutdown's time to find out who is missing


class Group(Protocol):
    """A group this process has joined."""

    def leave(self, deadline: float) -> None:
        """Part from the others in good order, by the deadline (monotonic seconds)."""


class _State:
    def __init__(self) -> None:
        self.group: Group | None = None


_state = _State()


def set_group(group: Group | None) -> None:
    """Remember the group for ``shutdown``, or forget it."""
    _state.group = group


def current_group() -> Group | None:
    """Return the group, while there is one."""
    return _state.group


class StaticGroup:
    """A group whose members all come, and all go, together."""

    def __init__(self, agent: Any, roll: Roll, store: dist.Store) -> None:
        self._agent, self._roll, self._store = agent, roll, store

    def leave(self, deadline: float) -> None:
        """Wait until every member leaves and no call is under way anywhere.

        Raises ``RpcTimeout`` that names who did not come.
        """
        self._roll.exchange("shutdown", None, deadline)
        _delete_all_user_and_unforked_owner_rrefs(timedelta(seconds=_left(deadline)))
        wait_idle(self._agent, deadline)
        self._join(deadline)
        self._roll.farewell(deadline)

    def _join(self, deadline: float) -> None:
        """Have the agent wait until no call is under way; torch's looks at the store's time-out."""
        join_until = deadline - min(_NAMING_S, _left(deadline) / 2)
        left = _left(join_until)
        self._store.set_timeout(timedelta(seconds=left))
        try:
            bounded(lambda: self._agent.join(shutdown=True, timeout=left), join_until, "shutdown")
        except RpcTimeout:
            raise
        except RuntimeError as error:
            self._roll.hopeless = None
            self._roll.exchange("shutdown, cut short", None, deadline)
            raise RpcTimeout(f"RPC shutdown did not end in time: {error}") from error


def init_deadline(rpc_timeout: float) -> float:
    """Return when coming up ends: a call's time-out, but long enough to come up at all.

    0 stands for calls without a time-out; coming up has one all the same.
    """
    return time.monotonic() + max(rpc_timeout or _DEFAULT_INIT_S, _SHORTEST_INIT_S)


def wait_idle(agent: Any, deadline: float) -> None:
    """Wait until this worker has no call of its own under way. Raises ``RpcTimeout``."""
    while int(agent.get_debug_info().get("agent.client_active_calls", 0)):
        if time.monotonic() > deadline:
            calls = agent.get_debug_info()["agent.client_active_calls"]
            raise RpcTimeout(f"{agent.get_worker_info().name!r} still waits for {calls} calls")
        time.sleep(0.005)


def check_arguments(store: dist.Store, options: Any, wanted: type) -> None:
    """Raise ``TypeError`` where a back end is given no store, or the options of another."""
    if not isinstance(store, dist.Store):
        raise TypeError(f"`store` must be a c10d::Store; got {type(store).__name__} {store!r}")
    if not isinstance(options, wanted):
        raise TypeError(
            f"`rpc_backend_options` must be a `{wanted.__name__}`; "
            f"got {type(options).__name__} {options!r}"
        )


@contextlib.contextmanager
def undone_on_error() -> Iterator[None]:
    """Take a half-started agent down again, so that the next ``init_rpc`` finds none."""
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


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())
