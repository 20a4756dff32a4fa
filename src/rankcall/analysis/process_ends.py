"""How the processes of a run ended, as their launchers noted it, matched to the rings they left."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rankcall.analysis.last_attempt import APART_S
from rankcall.analysis.snapshot import GONE, RankState
from rankcall.ring.layout import Header
from rankcall.run.exits import LAUNCHER, Exit

_TERMINATED = (-2, -15)  # signals with which a launcher that is stopped ends its workers at once
_AT_ONCE_NS = 500_000_000  # Ctrl-C reaches a launcher and its workers in any order
_S = 1e9


class End(NamedTuple):
    """How a process ended, and when by its host's monotonic clock."""

    noted: Exit
    mono_ns: int
    launcher_signal: int  # 0: its launcher was not told to stop, or the process ended before

    @property
    def by_launcher(self) -> bool:
        """Whether its launcher ended it, because of another rank or because it was told to stop."""
        return self.noted.by_launcher or bool(self.launcher_signal)


class ProcessEnds:
    """The noted ends of a run's processes.

    Args:
        exits: All exits that were noted in the run.
        headers: The headers of the rings that belong together, by rank.
    """

    def __init__(self, exits: Sequence[Exit], headers: Mapping[int, Header]) -> None:
        self._headers = headers
        self._stops = {stop.host: stop for stop in exits if stop.rank == LAUNCHER}
        self._ends = {}
        for ended in exits:
            head = headers.get(ended.rank)
            if head and head.pid == ended.pid:
                moment = ended.epoch_ns - head.anchor_epoch_ns + head.anchor_mono_ns
                self._ends[ended.rank] = End(ended, moment, self._with_launcher(ended))

    def of(self, rank: int) -> End | None:
        """Return how the process that left a rank's ring ended; None if nobody noted it."""
        return self._ends.get(rank)

    def told_s(self, head: Header, moment: int) -> float | None:
        """Return the age of the signal that told a process's launcher to stop, in seconds."""
        stop = self._stops.get(head.host)
        if stop is None or stop.epoch_ns < head.anchor_epoch_ns:
            return None
        told_ns = stop.epoch_ns - head.anchor_epoch_ns + head.anchor_mono_ns
        return max(0.0, (moment - told_ns) / _S)

    def without_ring(
        self, early: Sequence[Exit], moments: Mapping[int, int]
    ) -> dict[int, RankState]:
        """Return the ranks that ended before they had made a ring, as their launcher noted it.

        A process makes its ring when it makes its process group. Its exit counts only if it came
        after the other ranks of this attempt were started: earlier attempts of the run, and other
        jobs in the same directory, have left exits as well.

        Args:
            early: The exits of processes that left no ring in any attempt.
            moments: The moment of each rank with a ring, in ns of its host's monotonic clock.
        """
        states: dict[int, RankState] = {}
        started = min((_started_epoch_ns(head) for head in self._headers.values()), default=0)
        newest = max((noted.epoch_ns for noted in early), default=0)
        for rank, moment in moments.items():
            head = self._headers[rank]
            newest = max(newest, moment - head.anchor_mono_ns + head.anchor_epoch_ns)
        for noted in sorted(early, key=lambda noted: noted.epoch_ns):
            if noted.rank < 0 or noted.code is None or noted.epoch_ns < started:
                continue
            gone_s = (newest - noted.epoch_ns) / _S
            signal_number = self._with_launcher(noted)
            states[noted.rank] = RankState(
                noted.rank,
                noted.host,
                noted.pid,
                noted.attempt,
                GONE,
                exit=noted.code,
                gone_s=gone_s,
                ended_by_launcher=noted.by_launcher or bool(signal_number),
                launcher_signal=signal_number,
                silent_s=gone_s,
                blind=True,
            )
        return states

    def _with_launcher(self, ended: Exit) -> int:
        """Return the signal that stopped a process's launcher, if it ended because of that."""
        launcher = self._stops.get(ended.host)
        if launcher is None:
            return 0
        after = ended.epoch_ns >= launcher.epoch_ns - _AT_ONCE_NS
        return -(launcher.code or 0) if after or ended.code in _TERMINATED else 0


def _started_epoch_ns(header: Header) -> int:
    """Return when a process was started, as epoch ns of its host.

    The kernel counts that from the boot, in ticks, and goes on counting while a laptop sleeps. The
    monotonic clock does not, so the start is bounded by the making of the ring.
    """
    ticks = os.sysconf("SC_CLK_TCK")
    started_ns = header.process_start * 1_000_000_000 // ticks if header.process_start else 0
    lived_ns = header.anchor_mono_ns - started_ns if started_ns else int(APART_S * _S)
    return header.anchor_epoch_ns - max(0, lived_ns)
