"""Where the time of each recovery went, and how much of a job's time brought it forward.

torchrun's agents note when an attempt failed and when the next one was started, and a rank of each
node when it was at work again. The rings tell the latter, too, as long as they have their first
records.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from rankcall.analysis.attempts import Attempts, Noted, merged, on_one_line
from rankcall.ring.reader import Ring
from rankcall.run.recoveries import AttemptEnd, NodeChecked, Recoveries, newest_checks

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

    ``breaks`` are the times between two attempts: the recoveries, and those after which a launcher
    was started again. None stands for one of which no node noted how the attempt before it ended.
    ``checked`` is how each of its nodes was when it was checked last.
    """

    breaks: Sequence[Recovery | None] = ()
    elapsed_s: float = 0.0
    attempts: Attempts = field(default_factory=Attempts)
    checked: Sequence[NodeChecked] = ()

    @property
    def recoveries(self) -> Sequence[Recovery]:
        """The restarts without a human, each once, whichever nodes noted it."""
        return [
            after for after in self.breaks if after is not None and after.end.decision != "stop"
        ]

    @property
    def goodput(self) -> float | None:
        """The share of the job's time that brought it forward; None if that is not known.

        The time between attempts did not, nor that of the steps since the last checkpoint.
        """
        if not self.recoveries or self.elapsed_s <= 0:
            return None
        wasted_s = 0.0
        for after in self.breaks:
            if after is None or after.down_s is None or after.lost_s is None:
                return None
            wasted_s += after.down_s + after.lost_s
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
        self._noted, self._checked = merged(agents), newest_checks(agents)
        lost = {noted.end.lost for noted in self._noted if noted.end and noted.end.lost > 0}
        self._lost = sorted(lost)[:_MOST_LOST]
        self._began: list[_Began] = []
        self._last_ns = 0

    def add(self, ring: Ring) -> None:
        """Take a ring. One whose first records were overwritten tells nothing."""
        header, records = ring.header, ring.records
        self._last_ns = max(self._last_ns, header.last_sign_epoch_ns)
        if not self._noted or ring.dropped or not len(records):
            return
        shift = header.anchor_epoch_ns - header.anchor_mono_ns
        calls = records["enqueued_ns"].astype(np.int64) + shift
        step_ns = first_after(calls, records["step"], [1]).get(1, 0)
        caught_up_ns = first_after(calls, records["step"], self._lost)
        self._began.append(_Began(header.anchor_epoch_ns, int(calls.min()), step_ns, caught_up_ns))

    def finish(self) -> Carried:
        """Return the recoveries that the run's agents noted, with their phases."""
        noted = self._noted
        breaks = [
            self._break(noted[number : number + 3])
            for number, attempt in enumerate(noted)
            if number + 1 < len(noted) or (attempt.end and attempt.end.decision != "stop")
        ]
        attempts = on_one_line(noted, self._last_ns)
        began_ns = attempts.began_ns
        elapsed_s = max(0, self._last_ns - began_ns) / 1e9 if began_ns else 0.0
        return Carried(breaks, elapsed_s, attempts, self._checked)

    def _break(self, attempts: Sequence[Noted]) -> Recovery | None:
        """Return what came after the first of these attempts; the others are those after it."""
        before, after = attempts[0], attempts[1] if len(attempts) > 1 else None
        end = before.end
        if end is None:
            return None
        until_ns = attempts[2].began_ns if len(attempts) > 2 else math.inf
        return Recovery(end, self._phases(end, after, until_ns), _lost_s(before, end))

    def _phases(
        self, end: AttemptEnd, after: Noted | None, until_ns: float
    ) -> tuple[float | None, ...]:
        start_ns = after.began_ns if after is not None else 0
        began = [
            moments for moments in self._began if 0 < start_ns <= moments.recording_ns < until_ns
        ]
        calls = [moments.call_ns for moments in began]
        steps = [moments.step_ns for moments in began]
        caught_up = [moments.caught_up_ns.get(end.lost, 0) for moments in began]
        if after is not None and after.resumed is not None:
            calls.append(after.resumed.call_ns)
            steps.append(after.resumed.step_ns)
            caught_up.append(after.resumed.caught_up_ns)
        moments = (
            end.fault_ns,
            end.verdict_ns or end.ended_ns,  # a crash needs no verdict
            end.ended_ns,
            end.stopped_ns if not start_ns else min(end.stopped_ns, start_ns),
            start_ns,
            _first(calls),
            _first(steps),
            _first(steps if end.lost == 0 else caught_up),
        )
        # Nodes note moments by their own clocks, and may still end workers while others start some:
        # none comes before the one before it, so that phases add up to the time from the fault on.
        in_order = zip(moments, accumulate(moments, max), strict=True)
        return tuple(
            (after - before) / 1e9 if before and after else None
            for before, after in pairwise(latest if moment else 0 for moment, latest in in_order)
        )


def _first(moments: Sequence[int]) -> int:
    return min(filter(None, moments), default=0)


def first_after(calls: Any, steps: Any, wanted: Collection[int]) -> dict[int, int]:
    """Return when the first call after so many steps was issued; of those that were taken."""
    reached = np.maximum.accumulate(steps)
    places = np.searchsorted(reached, list(wanted))
    return {
        count: int(calls[place])
        for count, place in zip(wanted, places.tolist(), strict=True)
        if place < len(calls)
    }


def agent_phases(agent: Recoveries) -> dict[str, float]:
    """Return the seconds that the recoveries of one agent took so far, by phase."""
    spent = dict.fromkeys(PHASES, 0.0)
    for recovery in FirstMoments([agent]).finish().recoveries:
        for phase, seconds in zip(PHASES, recovery.phases_s, strict=True):
            spent[phase] += seconds or 0.0
    return spent


def _lost_s(attempt: Noted, end: AttemptEnd) -> float | None:
    """Return the share of the attempt's time that its lost steps took; None if it is not known."""
    if end.lost < 0 or not attempt.began_ns:
        return None
    share = min(1.0, end.lost / end.steps) if end.steps else 0.0
    return share * max(0, end.fault_ns - attempt.began_ns) / 1e9
