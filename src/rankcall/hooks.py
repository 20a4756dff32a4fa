"""Callbacks at the start and end of collectives, and at the creation of process groups.

They work on every back end. Start and end hooks run on one background thread. The thread that
issues a collective never runs them and never waits for them.
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
    """One event of one collective or point-to-point op: its start or its end.

    Attributes:
        pg_name: The name of the process group, unique within the job.
        backend: The name of the group's back end.
        sequence_number: The op's number within its group.
        operation: The name of the op.
        timestamp: When the op started (start event) or ended (end event), in ns since the epoch.
        duration: How long the op took, in ms; only in end events. For an op on a device it is the
            device's time, or None if that is not measured.
        drop_count: How many events were missed between the last delivered event and this one.
        status: enqueued, started, completed or failed.
        error: The error of a failed op.
        record: Every column of the record, by name.
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
    """A registration. ``remove()`` ends it, and so does leaving it as a context manager.

    After that no call of the hook begins; a call that has begun may still run.
    """


def register_collective_start_hook(hook: COLLECTIVE_HOOK_TYPE) -> Handle:
    """Call ``hook(status)`` for every collective and point-to-point op that starts.

    The hook runs on the dispatcher thread. Registering it switches recording on. Raises
    ``TypeError`` if ``hook`` is not callable, and ``TorchMissing``.
    """
    return Handle(_dispatcher.register(_checked(hook), ended=False))


def register_collective_end_hook(hook: COLLECTIVE_HOOK_TYPE) -> Handle:
    """Call ``hook(status)`` for every collective and point-to-point op that completed or failed.

    Otherwise as ``register_collective_start_hook``.
    """
    return Handle(_dispatcher.register(_checked(hook), ended=True))


def register_process_group_hook(hook: PG_HOOK_TYPE, *, existing: bool = True) -> Handle:
    """Call ``hook(process_group, pg_name)`` for every new group that this rank is a member of.

    The hook runs on the thread that creates the group. ``pg_name`` is an opaque name, unique within
    the job, and equal to ``CollectiveStatus.pg_name``. Groups that exist already are reported at
    once, unless ``existing`` is false. Raises ``TypeError`` if ``hook`` is not callable, and
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
    """Return the ops of this process that have started and not ended, the oldest first.

    The list is empty if recording is off. May be called from any thread.
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
