"""The end of a program that did not call ``shutdown``: its agent is closed at exit."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable

from torch.distributed.rpc import _is_current_rpc_agent_set, api

from rankcall import background
from rankcall.background import EXIT_S, exit_budget
from rankcall.rpc.backends.zmq.agent_module import agent_module

_close: Callable[[], None] | None = None


def end_at_exit() -> None:
    """Close the agent at exit, before what the program has registered until now.

    Functions of ``atexit`` run in reverse order, so this one is registered anew by each
    ``init_rpc``: a program's own functions may free what the agent's threads use.
    """
    global _close
    if _close is not None:
        atexit.unregister(_close)
    owner = os.getpid()
    _close = background.at_exit(lambda: _at_exit(owner))


def _at_exit(owner: int) -> None:
    """Take down what a program that ends without ``shutdown`` left running.

    A forked child has the agent but none of its threads, and leaves it alone.
    """
    if os.getpid() != owner or not _is_current_rpc_agent_set():
        return
    if isinstance(api._get_current_rpc_agent(), agent_module().ZmqAgent):
        # The agent bounds its own wait; the time that it takes is not there for other waits.
        exit_budget.spend(lambda _: api._finalize_shutdown(), EXIT_S)  # type: ignore[no-untyped-call]
