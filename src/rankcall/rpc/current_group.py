"""The RPC group that this process is in, and how a start that failed is undone.

torch allows one agent in a process, so there is at most one group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from torch.distributed.rpc import _is_current_rpc_agent_set, api


class JoinedGroup(Protocol):
    """A group that this process has joined."""

    def leave(self, deadline: float) -> None:
        """Leave in good order, by the deadline (monotonic seconds)."""


_group: JoinedGroup | None = None


def set_group(group: JoinedGroup | None) -> None:
    """Remember the group for ``shutdown``, or forget it."""
    global _group
    _group = group


def current_group() -> JoinedGroup | None:
    """Return the group that one of our back ends has joined; None if there is none."""
    return _group


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
                # The first error is the cause, and is the one to raise. Python 3.10 has no notes.
                note = f"taking the agent down failed as well: {another}"
                getattr(error, "add_note", lambda _: None)(note)
        raise
