"""Record this process, and give its records a place in the run of its job.

A recording begins before the job's run is known. The ranks choose the run when the default process
group is created (``placement``, ``choice``). Until then, the ring of a run without a name vanishes
with its process.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing import util
from pathlib import Path

from rankcall.capture import session
from rankcall.capture.recording import Recording

NESTED = "RANKCALL_WORKER"  # the pid of a recorded rank: a group below it belongs to another job


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
        The recording, a context manager. If recording is on already, the one that is on.

    Raises:
        TorchMissing: torch is absent or too old.
        ValueError: The capture is unknown, or the capacity out of range.
        CaptureUnavailable: ``native`` was chosen by name, and cannot be built.
    """
    return claim("user", run_dir, capture, capacity, call_sites)


def claim(
    owner: str,
    run_dir: str | os.PathLike[str] | None,
    capture: str | None = None,
    capacity: int | None = None,
    call_sites: bool = True,
) -> Recording:
    """Claim the recording for ``owner``, and choose its run once there is a group."""
    planned, outer = _planned(run_dir)
    recording = session.claim(owner, planned, capture, capacity, call_sites)
    from rankcall.attach.placement import Placement  # needs torch, which the launcher may lack

    placement = Placement(recording, planned, outer)
    with _starting:
        is_first = recording.placement is None
        if is_first:
            recording.placement = placement
    if is_first:
        placement.start()
    return recording


_starting = threading.Lock()


def _planned(run_dir: str | os.PathLike[str] | None) -> tuple[Path | None, Path | None]:
    """Return the run directory that is asked for, and that of the job that this one is inside."""
    current = session.current()
    if run_dir:
        return Path(run_dir).absolute(), None
    inherited = os.environ.get("RANKCALL_RUN_DIR")
    if not inherited or (current is not None and current.placement is not None):
        return None, None
    path = Path(inherited).absolute()
    return (None, path) if _is_nested() else (path, None)


def attach(rank: int, world_size: int) -> None:
    """Record this process, which is about to create its first group. Raises as ``enable``.

    What the process starts from now on is not part of its own job, and the environment says so.
    """
    recording = enable()
    recording.expect_rank(rank, world_size)
    os.environ[NESTED] = str(os.getpid())
    if recording.placement is not None:
        recording.placement.name_in_time()
    if multiprocessing.parent_process() is not None:
        # Children that multiprocessing forks end without atexit, but run these.
        util.Finalize(None, session.end, exitpriority=0)


def _is_nested() -> bool:
    """Return whether this process was started by a recorded rank, and so belongs to another job."""
    return os.environ.get(NESTED, str(os.getpid())) != str(os.getpid())
