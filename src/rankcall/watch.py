"""The in-job watcher: if the job hangs, it names the rank that is the cause on the job's terminal.

Each rank has one watcher thread, which reads the rank's own ring. If a call has been in flight for
too long, one rank of each node reads all rings of its node. If there are several nodes, they
exchange the states of their ranks through the job's store, and one of them judges. The verdict and
all stacks are kept in the run directory, below ``hangs/``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.lasting import HANG_AFTER_S
from rankcall.capture.settings import read_settings
from rankcall.durations import Duration, seconds
from rankcall.errors import RankcallError, warn_once
from rankcall.handles import Handle, Registration
from rankcall.job import attach
from rankcall.job.watcher import ABORT_STATUS, Watcher, is_watching

__all__ = ["ABORT_STATUS", "Handle", "arm", "start"]

HANG_AFTER, ON_HANG = "RANKCALL_HANG_AFTER", "RANKCALL_ON_HANG"  # set by the launcher


def start(
    hang_after: Duration | None = None,
    on_hang: OnHang | None = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
) -> Handle:
    """Watch this rank for hangs, on a daemon thread. Call it on every rank, as ``enable``.

    A second call replaces the watcher. If recording is off, this function switches it on. The
    watcher never raises in training or waits for it, and ends it only with ``"abort"`` and
    ``"recover"``.

    Args:
        hang_after: How long a call must be in flight before it counts as hung, in seconds or as a
            ``timedelta`` (default: ``RANKCALL_HANG_AFTER``, or 60 s). In the first step it is five
            times as long, and later at least ten times the median step.
        on_hang: What to do (default: ``RANKCALL_ON_HANG``, or ``"report"``). ``"report"`` prints
            the verdict once, on one rank, and watches on. ``"abort"`` also ends every rank that can
            still be ended, with exit status 124. ``"recover"`` ends the rank that holds the others
            up, so that the launcher restarts all of them. A function is called with the findings,
            on each rank, on the watcher's thread.
        run_dir: Where to record, if recording is off.

    Returns:
        The handle of the watcher. ``stop()`` ends it, and the recording as well, unless something
        else in this process uses that.

    Raises:
        ValueError: An argument or an environment variable has a value that is not allowed.
        TypeError: ``hang_after`` is not a duration, or ``on_hang`` neither a string nor a function.

    It also raises the errors of ``rankcall.enable``.
    """
    after, how = _hang_after(hang_after), _on_hang(on_hang)
    recording = attach.record("watch", read_settings(run_dir))
    watcher = Watcher(recording, after, how)
    watcher.start()
    return Registration(watcher.stop)


def arm(rank: int = -1, world_size: int = -1) -> bool:
    """Record and watch as the environment variables say; return whether we record.

    Called when this process is about to create its first process group. It never raises; an error
    is printed on stderr. If the program records or watches already, that goes on unchanged.

    Args:
        rank: The rank that this process will have; -1 if only the environment says it.
        world_size: The number of ranks, or -1.
    """
    try:
        attach.attach(rank, world_size)
    except (RankcallError, OSError, ValueError) as error:
        warn_once(f"not recording: {error}")
        return False
    try:
        if _hang_after(None) < math.inf and not is_watching():
            start()
    except (RankcallError, OSError, ValueError) as error:
        warn_once(f"not watching for hangs: {error}")
    return True


def _hang_after(given: Duration | None) -> float:
    """Return the threshold in seconds; infinity if the environment variable is 0, which is off."""
    if given is not None:
        after_s = seconds(given, "hang_after")
        if after_s == math.inf:
            raise ValueError("hang_after must be finite: without a watcher, nothing counts as hung")
        return after_s
    text = os.environ.get(HANG_AFTER) or str(HANG_AFTER_S)
    try:
        after_s = float(text)
    except ValueError:
        after_s = math.nan
    if not (after_s >= 0 and math.isfinite(after_s)):
        raise ValueError(f"{HANG_AFTER} must be a number of seconds, 0 for off; got {text!r}")
    return after_s or math.inf


def _on_hang(given: OnHang | None) -> OnHang:
    how = given if given is not None else os.environ.get(ON_HANG) or "report"
    if not isinstance(how, str):
        if not callable(how):
            raise TypeError(f"on_hang must be a word or a function; got {type(how).__name__}")
        return how
    if how not in ("report", "abort", "recover"):
        raise ValueError(f"on_hang must be report, abort, recover or a function; got {how!r}")
    return how


OnHang = str | Callable[[list[Finding]], object]
