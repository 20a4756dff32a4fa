"""Look at a run that is being recorded, on a helper thread, and log what the look finds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rankcall.analysis.recent_figures import recent_figures
from rankcall.analysis.verdicts import diagnose
from rankcall.analysis.verdicts.finding import Finding
from rankcall.background import BackgroundCall
from rankcall.capture import session
from rankcall.durations import Duration, seconds
from rankcall.errors import warn_once
from rankcall.run.load import load

EVERY_S = 30.0  # between looks
_MOST_SHARE = 0.01  # of a core, for the looks at a job of any size
LAST_LOOK_S = 2.0  # for which the end of training waits


@dataclass(frozen=True)
class Look:
    """The state of a run at one moment, as far as this host can read its records.

    ``cpu_s`` is the CPU time that reading them took.
    """

    figures: dict[str, float] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    cpu_s: float = 0.0


def look_at(run_dir: Path) -> Look:
    """Read a run that is being recorded."""
    began = time.thread_time()
    diagnosis = diagnose(load(run_dir))
    recent = recent_figures(diagnosis.snapshot)
    known = {"waiting_share": recent.waiting, "communication_share": recent.share}
    figures = {f"rankcall/{name}": value for name, value in known.items() if value is not None}
    if recent.late:
        figures["rankcall/straggler_rank"] = float(recent.late[0].rank)
        figures["rankcall/straggler_share"] = recent.late[0].share
    return Look(figures, tuple(diagnosis.findings), time.thread_time() - began)


class Reporter:
    """Logs the figures and the verdict of this process's run, and never raises.

    Args:
        log: Takes the figures: the shares of the ranks' time that they wait for others and that
            they communicate, and the rank that causes most of the waiting, with its part of it.
        say: Takes a verdict as text, once for each verdict.
        every_s: The least time between two looks at the records, in seconds or as a ``timedelta``.
            It is longer if a look takes more than a hundredth of it.
    """

    def __init__(
        self,
        log: Callable[[dict[str, float]], object],
        say: Callable[[str], object],
        every_s: Duration = EVERY_S,
    ) -> None:
        self._log, self._say = log, say
        self._every_s = seconds(every_s, "every_s", zero=True)
        self._call: BackgroundCall[Look] | None = None
        self._next = -float("inf")
        self._said: set[tuple[str, tuple[int, ...]]] = set()

    def update(self) -> None:
        """Log what the last look has found, and begin another one if it is time."""
        self._take(0.0)
        if time.monotonic() >= self._next:
            self._begin()

    def close(self) -> None:
        """Look once more, and log what that finds if it does so in time."""
        self._take(0.0)
        self._begin()
        self._take(LAST_LOOK_S)

    def _begin(self) -> None:
        recording = session.current()
        run_dir = recording.run_dir if recording is not None else None
        if self._call is not None or run_dir is None:
            return
        self._next = time.monotonic() + self._every_s
        self._call = BackgroundCall(lambda: look_at(run_dir), "rankcall-figures")

    def _take(self, seconds: float) -> None:
        if self._call is None or not self._call.ended(seconds):
            return
        call, self._call = self._call, None
        try:
            look = call.outcome()
            self._next = max(self._next, time.monotonic() + look.cpu_s / _MOST_SHARE)
            if look.figures:
                self._log(look.figures)
            for finding in look.findings:
                if (finding.kind, finding.ranks) not in self._said:
                    self._said.add((finding.kind, finding.ranks))
                    self._say(
                        f"rankcall: {finding.kind}: {finding.summary} {finding.advice}".strip()
                    )
        except Exception as error:  # also one of the framework's logger
            warn_once(f"cannot report on the run: {type(error).__name__}: {error}")
