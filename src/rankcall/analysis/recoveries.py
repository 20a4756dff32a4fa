"""Where the time of each recovery went, and how much of a job's time brought it forward.

The agent of torchrun notes when an attempt failed and when the next one was started. The rings of
the next attempt tell the rest: its first call, and the first call after an optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from rankcall.analysis.attempts import Attempts, attempts_of
from rankcall.ring.reader import Ring
from rankcall.run.recoveries import (
    AttemptEnd,
    AttemptStart,
    NodeChecked,
    Recoveries,
    newest_checks,
    read_recoveries,
)

# In order. Each lasts from the moment before it until its own.
PHASES = (
    "verdict",  # from the fault, which is when the calls were issued that then hung
    "evidence",  # until the first worker is ended
    "end",  # until no worker is left
    "restart",  # the pause that the policy asks for, and the rendezvous
    "start",  # until the first call: the processes start, import and load
    "step",  # until the first call after an optimizer step
)


@dataclass(frozen=True)
class Recovery:
    """One recovery. ``phases_s`` are in the order of ``PHASES``; None: not known.

    ``lost_s`` is about how long the steps took that no checkpoint had saved.
    """

    end: AttemptEnd
    phases_s: tuple[float | None, ...]
    lost_s: float | None = None

    @property
    def down_s(self) -> float | None:
        """From the fault to the first new step, or None if one of the moments is not known."""
        known = [seconds for seconds in self.phases_s if seconds is not None]
        return sum(known) if len(known) == len(self.phases_s) else None


@dataclass(frozen=True)
class Carried:
    """The recoveries of a job, oldest first. ``elapsed_s`` goes from its first start to its end.

    ``checked`` is how each of its nodes was when it was checked last.
    """

    recoveries: Sequence[Recovery] = ()
    elapsed_s: float = 0.0
    attempts: Attempts = field(default_factory=Attempts)
    checked: Sequence[NodeChecked] = ()

    @property
    def down_s(self) -> float | None:
        """The time of all recoveries together, if all of it is known."""
        times = [recovery.down_s for recovery in self.recoveries]
        return None if None in times else sum(time for time in times if time is not None)

    @property
    def goodput(self) -> float | None:
        """The share of the job's time that brought it forward; None if that is not known.

        The time of the recoveries did not, nor that of the steps since the last checkpoint.
        """
        down_s, lost_s = self.down_s, [recovery.lost_s for recovery in self.recoveries]
        if not self.recoveries or down_s is None or None in lost_s or self.elapsed_s <= 0:
            return None
        wasted_s = down_s + sum(seconds for seconds in lost_s if seconds is not None)
        return max(0.0, 1.0 - wasted_s / self.elapsed_s)


@dataclass(frozen=True)
class _Began:
    """When a ring's process began to record, and its first moments, in ns since the epoch."""

    recording_ns: int
    call_ns: int
    step_ns: int  # 0: there was none


class FirstMoments:
    """Collects the first moments of each process while the rings of a run are read."""

    def __init__(self) -> None:
        self._began: list[_Began] = []
        self._last_ns = 0

    def add(self, ring: Ring) -> None:
        """Take a ring. One whose first records were overwritten tells nothing."""
        header, records = ring.header, ring.records
        self._last_ns = max(self._last_ns, header.last_sign_epoch_ns)
        if ring.dropped or not len(records):
            return
        shift = header.anchor_epoch_ns - header.anchor_mono_ns
        calls = records["enqueued_ns"].astype(np.int64) + shift
        after_step = calls[records["step"] > 0]
        step_ns = int(after_step.min()) if len(after_step) else 0
        self._began.append(_Began(header.anchor_epoch_ns, int(calls.min()), step_ns))

    def finish(self, run_dir: Path) -> Carried:
        """Return the recoveries that the run's agents noted, with their phases.

        Each node's agent notes the failures that it saw. If several did, the one with the most
        counts: agents that only followed note fewer.
        """
        agents = read_recoveries(run_dir)
        if not agents:
            return Carried()
        agent = max(agents, key=lambda agent: len(agent.ends))
        starts = sorted(agent.starts, key=lambda start: start.epoch_ns)
        recoveries = [
            Recovery(end, self._phases(end, starts), _lost_s(end, starts))
            for end in agent.ends
            if end.decision != "stop"
        ]
        first_ns = starts[0].epoch_ns if starts else 0
        elapsed_s = max(0, self._last_ns - first_ns) / 1e9 if first_ns else 0.0
        attempts = attempts_of(run_dir, self._last_ns)
        return Carried(recoveries, elapsed_s, attempts, newest_checks(agents))

    def _phases(self, end: AttemptEnd, starts: Sequence[AttemptStart]) -> tuple[float | None, ...]:
        later = [start for start in starts if start.epoch_ns >= end.stopped_ns]
        start_ns = later[0].epoch_ns if later else 0
        until_ns = later[1].epoch_ns if len(later) > 1 else math.inf
        began = [moments for moments in self._began if start_ns <= moments.recording_ns < until_ns]
        first_call_ns = min((moments.call_ns for moments in began), default=0) if later else 0
        steps = [moments.step_ns for moments in began if moments.step_ns] if later else []
        verdict_ns = end.verdict_ns or end.ended_ns  # a crash needs no verdict
        moments = (
            end.fault_ns,
            verdict_ns,
            end.ended_ns,
            end.stopped_ns,
            start_ns,
            first_call_ns,
            min(steps, default=0),
        )
        return tuple(
            max(0, after - before) / 1e9 if before and after else None
            for before, after in pairwise(moments)
        )


def agent_phases(agent: Recoveries) -> dict[str, float]:
    """Return the seconds that the recoveries of one agent took so far, by phase.

    These are the phases that the agent notes itself. What follows the start of the processes is in
    the rings of the ranks.
    """
    spent = dict.fromkeys(PHASES[:4], 0.0)
    for end in agent.ends:
        later = [start.epoch_ns for start in agent.starts if start.epoch_ns >= end.stopped_ns]
        moments = (
            *(end.fault_ns, end.verdict_ns or end.ended_ns, end.ended_ns, end.stopped_ns),
            min(later, default=0),
        )
        for phase, (before, after) in zip(PHASES, pairwise(moments), strict=False):
            if before and after:
                spent[phase] += max(0, after - before) / 1e9
    return spent


def _lost_s(end: AttemptEnd, starts: Sequence[AttemptStart]) -> float | None:
    """Return the share of the attempt's time that its lost steps took; None if it is not known."""
    began_ns = max(
        (start.epoch_ns for start in starts if start.epoch_ns <= end.fault_ns), default=0
    )
    if end.lost < 0 or not began_ns:
        return None
    share = min(1.0, end.lost / end.steps) if end.steps else 0.0
    return share * (end.fault_ns - began_ns) / 1e9
