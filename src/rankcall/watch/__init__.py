"""The in-job watcher: says on the job's own terminal who hangs it, and why, while it hangs.

One thread a rank looks at the rank's own ring. When something has been in flight for too long,
one rank of each node reads the rings of its node; where there are several nodes they send each
other where their ranks stand, through the job's store; one of them judges. The verdict and all
stacks are kept in the run directory, below ``hangs/``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

from rankcall._handle import Scoped
from rankcall.analysis.verdicts.finding import Finding
from rankcall.capture import session
from rankcall.capture.notices import say
from rankcall.errors import RankcallError
from rankcall.watch._loop import ABORT_STATUS, Watcher

__all__ = ["ABORT_STATUS", "Handle", "arm", "start"]

HANG_AFTER, ON_HANG = "RANKCALL_HANG_AFTER", "RANKCALL_ON_HANG"  # set by the launcher
DEFAULT_S = 60.0
OnHang = str | Callable[[list[Finding]], object]


class Handle(Scoped):
    """A watcher at work. ``stop()`` ends it, once; leaving it as a context manager does too."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def stop(self) -> None:
        """Watch no more; the recording ends with it where nobody else holds it."""
        self._watcher.stop()

    def _end(self) -> None:
        self.stop()


def start(
    hang_after: float | None = None,
    on_hang: OnHang | None = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
) -> Handle:
    """Watch this rank for hangs, on a daemon thread. Call it on every rank, as ``enable``.

    ``hang_after``: s that something must be in flight before it counts as hung (default:
    ``RANKCALL_HANG_AFTER``, or 60); five times that in the first step, and at least ten times the
    median step later. ``on_hang``: ``"report"`` prints the verdict once, on one rank, and watches
    on; ``"abort"`` also ends every rank of the job that still can (exit status 124); a function is
    called with the findings, on each rank, on the watcher's thread (default: ``RANKCALL_ON_HANG``,
    or report). Recording is switched on if it is not, into ``run_dir``.

    Watching never raises, waits for or ends anything in training but by ``abort``. Starting again
    replaces the watcher. Raises ``ValueError`` and ``TypeError`` for bad arguments, and what
    ``rankcall.enable`` raises.
    """
    after, how = _hang_after(hang_after), _on_hang(on_hang)
    where = session.run_dir_of(run_dir)
    recording = session.claim("watch", where)
    watcher = Watcher(recording, after, how)
    watcher.start()
    return Handle(watcher)


def arm() -> bool:
    """Record and watch as the launcher asked by environment; tell whether this process records.

    Never raises; says on stderr what went wrong.
    """
    if not session.arm():
        return False
    try:
        if _hang_after(None) < math.inf:
            start()
    except (RankcallError, OSError, ValueError) as error:
        say(f"not watching for hangs: {error}")
    return True


def _hang_after(given: float | None) -> float:
    """Return the threshold, s; infinity where the environment says 0, which is off."""
    if given is not None:
        if not (given > 0 and math.isfinite(given)):
            raise ValueError(f"hang_after must be a number of seconds above 0; got {given}")
        return float(given)
    text = os.environ.get(HANG_AFTER) or str(DEFAULT_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise ValueError(f"{HANG_AFTER} must be a number of seconds, 0 for off; got {text!r}")
    return seconds or math.inf


def _on_hang(given: OnHang | None) -> OnHang:
    how = given if given is not None else os.environ.get(ON_HANG) or "report"
    if not isinstance(how, str):
        if not callable(how):
            raise TypeError(f"on_hang must be a word or a function; got {type(how).__name__}")
        return how
    if how not in ("report", "abort"):
        raise ValueError(f"on_hang must be report, abort or a function; got {how!r}")
    return how
