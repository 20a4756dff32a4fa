"""Be told about collectives: callbacks at their start and end, and at process-group creation.

Works on every backend. Start and end hooks run on one background thread, never on the thread that
issues the collective, which never waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from rankcall._handle import Registered
from rankcall.capture import session
from rankcall.capture.delivery import Dispatcher, FailureLog
from rankcall.capture.events import StatusMaker
from rankcall.capture.tail import RingTail
from rankcall.ring.tables import Group

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = [
    "COLLECTIVE_HOOK_TYPE",
    "PG_HOOK_TYPE",
    "CollectiveStatus",
    "Handle",
    "pending",
    "register_collective_end_hook",
    "register_collective_start_hook",
    "register_process_group_hook",
]


@dataclass(slots=True)
class CollectiveStatus:
    """One event of one collective or point-to-point op, as a hook gets it.

    ``timestamp``: when it began (start) or ended (end), ns since the epoch. ``duration``: how long
    it executed, ms, end events only; from the device where it ran on one. ``drop_count``: events
    missed between the one delivered before and this one. ``status``: enqueued, started, completed
    or failed. ``record``: every column of the record, by name.
    """

    pg_name: str = "unknown"
    backend: str = "unknown"
    sequence_number: int = -1
    operation: str = "unknown"
    timestamp: int = 0
    duration: float | None = None
    drop_count: int = 0
    status: str = "unknown"
    error: str | None = None
    record: Mapping[str, Any] | None = None


H = TypeVar("H", bound=Callable[..., Any])
COLLECTIVE_HOOK_TYPE = Callable[[CollectiveStatus], None]
PG_HOOK_TYPE = Callable[["dist.ProcessGroup", str], None]


class Handle(Registered):
    """A registration. ``remove()`` ends it, once; leaving it as a context manager does too.

    No call of the hook begins after that; one may be under way.
    """


def register_collective_start_hook(hook: COLLECTIVE_HOOK_TYPE) -> Handle:
    """Call ``hook(status)`` for every collective and point-to-point op that starts.

    Runs on the dispatcher thread. Recording is switched on if it is not. Raises ``TypeError`` where
    ``hook`` cannot be called, and ``TorchMissing``.
    """
    return Handle(_dispatcher.register(_checked(hook), ended=False))


def register_collective_end_hook(hook: COLLECTIVE_HOOK_TYPE) -> Handle:
    """Call ``hook(status)`` for every collective and point-to-point op that ended, well or not.

    Runs on the dispatcher thread; otherwise as ``register_collective_start_hook``.
    """
    return Handle(_dispatcher.register(_checked(hook), ended=True))


def register_process_group_hook(hook: PG_HOOK_TYPE, *, existing: bool = True) -> Handle:
    """Call ``hook(process_group, pg_name)`` inline for every new group this rank is a member of.

    ``pg_name`` is what ``CollectiveStatus.pg_name`` says; it is opaque and unique in the job.
    Groups that exist are reported at once, unless ``existing`` is false. Raises ``TypeError`` and
    ``TorchMissing``.
    """
    session.check_torch()
    from rankcall.capture.groups import watch

    failures = FailureLog("process-group hook", _checked(hook))

    def observer(process_group: dist.ProcessGroup, group: Group) -> None:
        failures.call(process_group, group.label)

    watch.add(observer, existing)
    return Handle(lambda: watch.remove(observer))


def pending() -> list[CollectiveStatus]:
    """Return what has started and not finished in this process, oldest first.

    Empty where nothing is being recorded. May be called from any thread.
    """
    recording = session.current()
    if recording is None:
        return []
    rows = RingTail(recording.ring, recording.geometry).open()
    maker = StatusMaker(recording)
    return [CollectiveStatus(*fields) for fields in maker.unfinished(rows)]


def _checked(hook: H) -> H:
    if not callable(hook):
        raise TypeError(f"a hook must be callable; got {type(hook).__name__}")
    return hook


_dispatcher = Dispatcher(CollectiveStatus)
