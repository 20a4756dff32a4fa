"""A verdict: what is wrong with a job at one moment, and where its ranks stood.

Terminal, page, JSON, ``top``, the watcher and its store all get this object, and nothing beside it.
``encoding`` and ``decoding`` turn it into bytes for the store and the disk, and back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from rankcall.analysis.pace import Pace
from rankcall.analysis.snapshot import RankPosition
from rankcall.analysis.verdicts.finding import HEALTHY, Finding


@dataclass(frozen=True)
class Origin:
    """Which watcher gave a verdict, and when. ``id`` is unique in a run.

    A wall clock can step back, so ``epoch_ns`` is only for people to read. ``mono_ns`` counts from
    the boot ``boot_id``. A verdict of rankcall 0.1 has no ``boot_id``.
    """

    id: str = ""
    boot_id: str = ""
    mono_ns: int = 0
    epoch_ns: int = 0
    by_pid: int = 0


@dataclass(frozen=True)
class Lasting:
    """How long something has lasted, and how long it may last before it counts as a hang, in s."""

    seconds: float
    allowed_s: float

    @property
    def is_long(self) -> bool:
        """Whether it has lasted too long."""
        return self.seconds >= self.allowed_s


@dataclass(frozen=True)
class Going:
    """How a job goes that has no finding. None: nothing to measure, or too little is on record."""

    live: bool  # any of its processes still exists
    pace: Pace
    silence: Lasting | None  # no rank issues anything
    longest: Lasting | None  # the call that has been in flight longest


@dataclass(frozen=True)
class Verdict:
    """The findings about a job at one moment, the likeliest root cause first.

    ``run`` names what was judged, and ``hang_after`` is the threshold, in s. ``ranks`` has the
    position of every rank; none for a verdict from logs. ``problems`` says what is not known.
    ``kept`` has the verdicts that the job's own watcher kept in the run. Only a watcher's verdict
    has an ``origin``. If it is not final, ``again_s`` is after how many seconds to judge again.
    """

    run: str
    findings: list[Finding]
    hang_after: float = 0.0
    ranks: list[RankPosition] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    origin: Origin = Origin()
    again_s: float = 0.0

    @property
    def kind(self) -> str:
        """The kind of the likeliest root cause, or ``healthy``."""
        return self.findings[0].kind if self.findings else HEALTHY

    @property
    def stops(self) -> bool:
        """Whether the likeliest root cause keeps the job from going on."""
        return bool(self.findings) and self.findings[0].stops

    @property
    def culprits(self) -> set[int]:
        """All ranks that a finding names."""
        return {rank for finding in self.findings for rank in finding.ranks}

    def stands_at(self, position: RankPosition) -> str:
        """Return the line at which a culprit stands that is in no call; empty for other ranks.

        Its last call, which it has left, does not say where it is.
        """
        return "" if position.in_call else self._lines.get(position.rank, "")

    @cached_property
    def _lines(self) -> dict[int, str]:
        """The lines of the culprits, by the likeliest cause that names them."""
        return {
            rank: finding.culprit_line
            for finding in reversed(self.findings)
            for rank in finding.ranks
        }

    @property
    def going(self) -> Going | None:
        """How the job goes; None if the verdict does not come from records, or was read."""
        return None


@dataclass(frozen=True)
class Kept:
    """A verdict that the job's own watcher kept in its run, without the positions of the ranks.

    ``folder`` has the verdict, its text and the stacks of ``stacks`` ranks; for an archive,
    ``place`` is that folder's path inside the archive. ``over_s`` is after how many seconds the
    hang passed; None if it did not.
    """

    verdict: Verdict
    folder: Path
    place: str = ""
    over_s: float | None = None
    stacks: int = 0
