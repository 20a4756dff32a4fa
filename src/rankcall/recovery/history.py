"""The failures of a run as the policy sees them, whether the run was supervised or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rankcall.recovery.failures import Cause, cause_in
from rankcall.recovery.policy import POLICY, Case, Failure
from rankcall.run.load import Run
from rankcall.run.recoveries import GAVE_UP, AttemptEnd, Recoveries, read_recoveries

_FAILURES = {GAVE_UP, *(row.rule for row in POLICY)}  # not those that are other nodes' matter


def decided(agents: Sequence[Recoveries]) -> Sequence[AttemptEnd]:
    """Return the failures that one node's agent decided about: the one that decided most often.

    Each node's agent notes a failure that its workers had part in, and has only its own to judge
    by. An agent also notes those restarts about which another node decided.
    """
    ends = [[end for end in agent.ends if end.rule in _FAILURES] for agent in agents]
    return max(ends, key=len, default=[])


@dataclass(frozen=True)
class History:
    """The last failure of a run, with those before it, and what is known of it beside.

    Attributes:
        case: What the policy decides about. The limits are the defaults: a run keeps no others.
        culprits: The ranks at fault; none if no rank is named.
        summary: The verdict in a sentence.
        lost: The steps since the last checkpoint; -1 if the program has told of none.
    """

    case: Case
    culprits: tuple[int, ...]
    summary: str
    lost: int


def history_of(run: Run) -> History | None:
    """Return the failures of a run; None if nothing has failed."""
    ends = decided(read_recoveries(run.path))
    if ends:
        failures, last = [_failure(end) for end in ends], ends[-1]
        return History(Case(failures[-1], failures[:-1]), last.culprits, last.summary, last.lost)
    cause = cause_in(run)
    if cause is None:
        return None
    lost = cause.since_saved if cause.saved >= 0 else -1
    return History(Case(_of_cause(cause)), cause.culprits, cause.summary, lost)


def _failure(end: AttemptEnd) -> Failure:
    return Failure(
        end.signature,
        end.family,
        end.step,
        end.progressed,
        end.noticed_ns / 1e9,
        by_window=end.lost >= 0,
    )


def _of_cause(cause: Cause) -> Failure:
    step = cause.steps if cause.saved < 0 else cause.saved + cause.since_saved
    return Failure(cause.signature, cause.family, step, cause.steps > 0, by_window=cause.saved >= 0)
