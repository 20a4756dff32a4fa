"""The failures of a run as the policy sees them, whether the run was supervised or not."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rankcall.process import host_name
from rankcall.recovery.failures import cause_in, failure_of
from rankcall.recovery.policy import POLICY, Case, Failure
from rankcall.run.load import Run
from rankcall.run.recoveries import (
    ENDED,
    GAVE_UP,
    AttemptEnd,
    Recoveries,
    agent_of,
    file_of,
    note,
    read_recoveries,
)

_FAILURES = {GAVE_UP, *(row.rule for row in POLICY)}  # not those that are other nodes' matter


def decided(agents: Sequence[Recoveries]) -> Sequence[AttemptEnd]:
    """Return the failures that one node's agent decided about: the one that decided most often.

    Each node's agent notes a failure that its workers had part in, and has only its own to judge
    by. An agent also notes those restarts about which another node decided. Agents that had ended
    before the last one began are those of earlier launchers, which may have failed more often.
    """
    known = [
        (agent, ends)
        for agent in agents
        if (ends := [end for end in agent.ends if end.rule in _FAILURES])
    ]
    if not known:
        return []
    last, last_ends = max(known, key=lambda pair: pair[1][-1].noticed_ns)
    began_ns = min((start.epoch_ns for start in last.starts), default=last_ends[0].noticed_ns)
    beside = [ends for _, ends in known if ends[-1].noticed_ns >= began_ns]
    return max(beside, key=len)


@dataclass(frozen=True)
class History:
    """The last failure of a run, with those before it.

    Attributes:
        case: What the policy decides about. The limits are the defaults: a run keeps no others.
        end: The last failure as it was noted, or is to be noted.
        is_supervised: Whether torchrun's agent has noted it.
    """

    case: Case
    end: AttemptEnd
    is_supervised: bool = True


def history_of(run: Run) -> History | None:
    """Return the failures of a run; None if nothing has failed."""
    agents = read_recoveries(run.path)
    ends = decided(agents)
    if ends:
        failures = [_failure(end) for end in ends]
        return History(Case(failures[-1], failures[:-1]), ends[-1])
    cause = cause_in(run)
    if cause is None:
        return None
    earlier = [_failure(end) for end in _ends_before(run, agents)]
    step, progressed = cause.reached(-1, earlier)
    lost = cause.since_saved if cause.saved >= 0 else -1
    end = cause.as_end(0, step, lost=lost, progressed=progressed)
    end = replace(end, noticed_ns=time.time_ns(), decision="stop", rule=ENDED)
    return History(Case(_failure(end), earlier), end, is_supervised=False)


def note_end(run_dir: Path, history: History) -> None:
    """Note a failure that no agent has noted, for those who judge the next one of this run.

    Raises ``OSError``.
    """
    note(file_of(run_dir, host_name(), os.getpid()), replace(history.end, reason="the job ended"))


def _ends_before(run: Run, agents: Sequence[Recoveries]) -> list[AttemptEnd]:
    """Return what the earlier launchers of this host noted before the last attempt began."""
    last = max((head.header.attempt for head in run.heads), default=0)
    begins = [head.header.anchor_epoch_ns for head in run.heads if head.header.attempt == last]
    # The name of a file has the host's as far as a file name can.
    own = agent_of(file_of(run.path, host_name(), 0))[0]
    ends = [
        end
        for agent in agents
        if agent_of(agent.path)[0] == own
        for end in agent.ends
        if end.rule == ENDED and end.noticed_ns < min(begins, default=0)
    ]
    return sorted(ends, key=lambda end: end.noticed_ns)


def _failure(end: AttemptEnd) -> Failure:
    return failure_of(end, end.noticed_ns / 1e9, by_window=end.lost >= 0)
