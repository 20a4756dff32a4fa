"""Record this process, and give its records a place in the run of its job.

A recording begins before the job's run is known. The ranks choose the run when the default process
group is created. Until then, the ring of a run without a name vanishes with its process.

The ranks agree through the job's own store, because a store is all that the ranks of every launcher
have in common. Rank 0 proposes a run. The others take what is published, so none of them waits for
a rank that has not created its process group.

A run holds *attempts*: each job that is recorded into a run directory is one, and each elastic
restart of it is a further one. Attempts are reserved by files in the run directory::

    attempts/00000.json     the command that the attempt belongs to

The store of torchrun's agent outlives a restart, so all restarts of a job find the same choice.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import weakref
from multiprocessing import util

from rankcall.background import exit_budget
from rankcall.capture import session
from rankcall.capture.recording import Recording
from rankcall.capture.settings import WORKER, Settings, read_settings
from rankcall.job.placement import Placement

_placements: weakref.WeakKeyDictionary[Recording, Placement] = weakref.WeakKeyDictionary()


def enable(
    run_dir: str | os.PathLike[str] | None = None,
    *,
    capture: str | None = None,
    capacity: int | None = None,
    call_sites: bool = True,
) -> Recording:
    """Record every collective of this process, from now on, until ``disable()``.

    Call it before or after ``init_process_group``, on every rank at the same point of the program:
    sequence numbers count from here.

    Args:
        run_dir: The directory of the run. The default is ``RANKCALL_RUN_DIR``, or
            ``rankcall-runs/<UTC time>-<script>`` in rank 0's working directory. The ranks agree on
            it when they create the default process group. If the directory has a run already, the
            job becomes a new attempt of it.
        capture: ``auto``, ``native`` or ``python``. The default is ``RANKCALL_CAPTURE``, or
            ``auto``: native, and Python if the native recorder cannot be built.
        capacity: The number of records in the ring, rounded up to a power of two. Newer records
            overwrite the oldest ones. The default is ``RANKCALL_CAPACITY``, or 16,384.
        call_sites: Whether to record the line that issued each op.

    Returns:
        The recording of this process; this call starts one if there is none. It is a context
        manager, and its ``stop()`` does what ``disable()`` does.

    Raises:
        TorchMissingError: torch is absent or too old.
        ValueError: The capture is unknown, or the capacity out of range.
        CaptureUnavailableError: ``native`` was chosen by name, and cannot be built.
    """
    return record(session.USER, read_settings(run_dir, capture, capacity, call_sites))


def record(owner: str, settings: Settings) -> Recording:
    """Claim the recording for ``owner``, and see to it that its records get a run.

    Without a run directory in the settings, the ranks choose the run once there is a group.
    """
    current = session.current()
    if settings.is_inherited and current in _placements:
        # The environment named this recording's run, or the run around its job, when it began.
        # Since ``attach`` the environment describes the processes that this one starts.
        settings = settings.without_run()
    recording = session.claim(owner, settings)
    # Of two threads, one succeeds. A lock would be held in a child that is forked meanwhile.
    placement = Placement(recording, settings)
    if _placements.setdefault(recording, placement) is placement:
        placement.start()
    return recording


def attach(rank: int, world_size: int) -> None:
    """Record this process, which is about to create its first group. Raises as ``enable``.

    Processes that it starts from now on are jobs of their own, and the environment says so.
    """
    recording = enable()
    recording.expect_rank(rank, world_size)
    os.environ[WORKER] = str(os.getpid())
    _placements[recording].name_in_time()
    if multiprocessing.parent_process() is not None:
        # Children that multiprocessing forks end without atexit, but run these.
        util.Finalize(None, _end_child, exitpriority=0)


def _end_child() -> None:
    """End the recording of a child of multiprocessing, which handles its last exception now."""
    exit_budget.begin()  # such a child runs no exit handlers
    session.note_end(sys.exc_info()[1])
    session.end()
