"""Where the time of each recovery went, and how much of a job's time brought it forward.

The agent of torchrun notes when an attempt failed and when the next one was started. The rings of
the next attempt tell the rest: its first call, and the first call after an optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rankcall.analysis.attempts import Attempts, attempts_of
from rankcall.ring.reader import Ring
from rankcall.run.recoveries import (
    AttemptEnd,
    AttemptStart,
    NodeChecked,
    Recoveries,
    newest_checks,
)

# In order. Each lasts from the moment before it until its own.
PHASES = (
    "verdict",  # from the fault, which is when the calls were issued that then hung
    "evidence",  # until the first worker is ended
    "end",  # until no worker is left
    "restart",  # the pause that the policy asks for, and the rendezvous
    "start",  # until the first call: the processes start, import and load
    "step",  # until the first call after an optimizer step
    "catch_up",  # until all steps are taken again that no checkpoint had saved
)
DOWN = PHASES[:-1]  # until the job goes on; what it then repeats counts as lost
_MOST_LOST = 256  # different numbers of lost steps that are looked for: a file is hostile


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
        phases_s = self.phases_s[: len(DOWN)]
        known = [seconds for seconds in phases_s if seconds is not None]
        return sum(known) if len(known) == len(phases_s) else None


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
    caught_up_ns: Mapping[int, int]  # by the number of steps to repeat, the first call after them


class FirstMoments:
    """Collects the first moments of each process while the rings of a run are read.

    Args:
        agents: What torchrun's agents noted in the run.
    """

    def __init__(self, agents: Sequence[Recoveries] = ()) -> None:
        self._agents = agents
        lost = {end.lost for agent in agents for end in agent.ends if end.lost > 0}
        self._lost = sorted(lost)[:_MOST_LOST]
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
        step_ns = _first_after(calls, records["step"], [1]).get(1, 0)
        caught_up_ns = _first_after(calls, records["step"], self._lost)
        self._began.append(_Began(header.anchor_epoch_ns, int(calls.min()), step_ns, caught_up_ns))

    def finish(self, run_dir: Path) -> Carried:
        """Return the recoveries that the run's agents noted, with their phases.

        Each node's agent notes the failures that it saw. If several did, the one with the most
        counts: agents that only followed note fewer.
        """
        agents = self._agents
        if not agents:
            return Carried()
        # A launcher without an agent of ours notes how its job ended, and no start.
        agent = max(agents, key=lambda agent: (bool(agent.starts), len(agent.ends)))
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
        began = [
            moments
            for moments in self._began
            if later and start_ns <= moments.recording_ns < until_ns
        ]
        first_call_ns = min((moments.call_ns for moments in began), default=0)
        steps = [moments.step_ns for moments in began if moments.step_ns]
        caught_up = [moments.caught_up_ns.get(end.lost, 0) for moments in began]
        verdict_ns = end.verdict_ns or end.ended_ns  # a crash needs no verdict
        moments = (
            end.fault_ns,
            verdict_ns,
            end.ended_ns,
            end.stopped_ns,
            start_ns,
            first_call_ns,
            min(steps, default=0),
            min(steps if end.lost == 0 else filter(None, caught_up), default=0),
        )
        return tuple(
            max(0, after - before) / 1e9 if before and after else None
            for before, after in pairwise(moments)
        )


def _first_after(calls: Any, steps: Any, wanted: Sequence[int]) -> dict[int, int]:
    """Return when the first call after so many steps was issued; of those that were taken."""
    reached = np.maximum.accumulate(steps)
    places = np.searchsorted(reached, wanted)
    return {
        count: int(calls[place])
        for count, place in zip(wanted, places.tolist(), strict=True)
        if place < len(calls)
    }


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
