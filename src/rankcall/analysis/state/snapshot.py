"""Where every rank of a job stands at one moment: what diagnosis works on.

It is made from ring files (``standing.py``), or put together from what several nodes say of their
own ranks (``parts.py``). Times are ages in s before the moment, by each host's own clock, so that
hosts' clocks do not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rankcall.ring.tables import CallSite, Group
from rankcall.run import label_groups

# What a rank's process is doing. Unknown: it is on another host, or left no ring.
ALIVE, STOPPED, GONE, UNKNOWN = "alive", "stopped", "gone", "unknown"

Calls = npt.NDArray[Any]
CALL = np.dtype(
    [
        ("rank", "<i4"),
        ("group", "<i4"),  # index into Snapshot.groups
        ("site", "<i4"),  # index into Snapshot.sites; 0: not known
        ("root", "<i4"),  # global rank; -1: none
        ("peer", "<i4"),  # global rank; -1: none, or any source in flight
        ("shape_hash", "<u4"),
        ("seq", "<i8"),
        ("tag", "<i8"),
        ("step", "<i8"),
        ("index", "<i8"),  # the how-many-th record of its rank, from 0
        ("message_bytes", "<i8"),
        ("in_bytes", "<i8"),
        ("out_bytes", "<i8"),
        ("age_s", "<f8"),  # since it was issued
        ("came_s", "<f8"),  # since it was issued; on a device, since the device began it
        ("ended_s", "<f8"),  # since it ended; NaN: it has not
        ("kind", "u1"),
        ("op", "u1"),
        ("dtype", "u1"),
        ("reduce_op", "u1"),
        ("status", "u1"),
        ("flags", "u1"),
    ]
)


@dataclass(frozen=True)
class RankState:
    """One rank's process. Ages in s; None where there is nothing to measure."""

    rank: int
    host: str = ""
    pid: int = 0
    attempt: int = 0
    state: str = UNKNOWN
    exit: int | None = None  # exit code; negative: the signal that ended it
    gone_s: float | None = None  # since it was gone
    ended_by_launcher: bool = False  # which ended it because another had failed
    launcher_signal: int = 0  # which told its launcher to stop, and took it along
    aborted: bool = False  # its watcher ended it because the job hung
    silent_s: float = 0.0  # since its last sign of life
    gil_s: float = 0.0  # since a Python thread last ran
    closed: bool = False  # it stopped recording of its own accord, as at a normal exit
    leaving: bool = False  # its program came to its end; the process may still be closing down
    expects: str = ""  # what it declared to take long, while that lasts
    expected_s: float | None = None  # since that ended; negative: it ends in so many s
    steps: int = 0
    dropped: int = 0  # records overwritten or lost
    tables_lost: int = 0  # names of groups, lines and error texts that found no room in its ring
    blind: bool = False  # it left no readable ring: nothing is known of its calls
    unheard: bool = False  # its node was asked where it stands, and did not answer
    stack: str = ""  # of its Python threads, where somebody wrote it down

    @property
    def mute_s(self) -> float:
        """How long it has given no sign of life; of one that is gone, up to its end."""
        return self.silent_s - (self.gone_s or 0.0)

    @property
    def gil_held_s(self) -> float:
        """How long none of its Python threads has run; of one that is gone, up to its end."""
        return self.gil_s - (self.gone_s or 0.0)

    def may_be_silent(self, hang_after: float) -> bool:
        """Tell whether it is in a declared phase, or was less than ``hang_after`` s ago.

        Who waited for it all the while has the usual patience from the end of it on.
        """
        return bool(self.expects) or (self.expected_s is not None and self.expected_s < hang_after)


@dataclass
class Snapshot:
    """A job at one moment. ``ranks`` holds one state for each rank of the world, in order.

    ``calls`` holds, of each rank, its newest calls, and whatever has not ended or has failed.
    """

    ranks: list[RankState]
    calls: Calls
    groups: list[Group] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)  # of the groups, unique
    sites: list[CallSite] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    mixed: bool = False  # the records may be of several jobs

    @property
    def live(self) -> bool:
        """Whether any of its processes still runs, or may."""
        return any(each.state in (ALIVE, STOPPED) for each in self.ranks)

    def site(self, number: int) -> str:
        """Return a call site as ``file:line``; empty where it is not known."""
        return str(self.sites[number]) if 0 < number < len(self.sites) else ""


def no_calls() -> Calls:
    """Return an empty table."""
    return np.zeros(0, CALL)


def labels_of(groups: Sequence[Group], ranks: Iterable[RankState]) -> list[str]:
    """Return a label for each group that no other has."""
    known = label_groups(groups, {each.rank: each.host for each in ranks})
    return [known[group].label for group in groups]
