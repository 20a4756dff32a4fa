"""How a job goes that has no finding, in a sentence or two."""

from __future__ import annotations

import math

from rankcall.analysis.pace import Pace
from rankcall.analysis.snapshot import END_UNKNOWN, RankState
from rankcall.analysis.verdicts.verdict import Going, Lasting, Verdict
from rankcall.analysis.verdicts.wording import duration
from rankcall.ranks import with_noun
from rankcall.report.formatting import digits, percent, plural

LONG = 0.1  # of the age at which a call counts as hung: from then on, people are told of it


def healthy(verdict: Verdict) -> str:
    """Say that nothing is wrong, how fast the job goes, or how it ended."""
    going = verdict.going
    if going is None:
        return "healthy"
    if going.live:
        return _goes_on(verdict, going)
    return _ended(verdict, going)


def _processes(verdict: Verdict) -> list[RankState]:
    """Return the processes of which something is known."""
    return [
        position.process
        for position in verdict.ranks
        if not position.blind or position.process.exit is not None
    ]


def _speed(pace: Pace) -> str:
    speed = ""
    if pace.steps_per_s is not None:
        speed = f", {digits(pace.steps_per_s)} steps/s"
    elif pace.calls_per_s is not None:
        speed = f", {digits(pace.calls_per_s)} calls/s"
    if pace.share is not None:
        speed += f", {percent(pace.share)} of the time in communication"
    return speed


def _goes_on(verdict: Verdict, going: Going) -> str:
    silence = going.silence
    if silence is not None and silence.seconds >= LONG * verdict.hang_after:
        return (
            f"nothing found yet: no rank has issued anything for {duration(silence.seconds)}; "
            f"that counts as no progress from {duration(silence.allowed_s)} on."
        )
    ranks = plural(len(_processes(verdict)), "rank goes", "ranks go")
    longest = _longest(going.longest, verdict.hang_after)
    return f"healthy: {ranks} on{_speed(going.pace)}.{longest}"


def _ended(verdict: Verdict, going: Going) -> str:
    processes, speed = _processes(verdict), _speed(going.pace)
    ended = sum(map(_ended_well, processes))
    # A launcher that is told to stop notes all its workers, also those that were done.
    stopped = sum(state.ended_by_launcher and not _ended_well(state) for state in processes)
    unclear = [  # the ranks may have hung in their last calls
        position.rank
        for position in verdict.ranks
        if position.how == END_UNKNOWN and position.process.exit is None
        if not (position.process.closed or position.process.ended_by_launcher)
    ]
    whole = plural(len(verdict.ranks), "rank")
    if stopped and not ended and stopped == len(verdict.ranks):
        them = "it" if stopped == 1 else "them"
        text = f"nothing found: {whole} had not ended when the launcher ended {them}{speed}."
    else:
        verdict_words = "nothing found" if unclear else "healthy"
        text = f"{verdict_words}: {ended:,} of {whole} ended well{speed}."
        if stopped:
            text += f" {plural(stopped, 'was', 'were')} ended by the launcher."
    unknown = sum(
        state.exit is None and not (state.closed or state.ended_by_launcher) for state in processes
    )
    if unknown:
        pronoun = "it" if unknown == 1 else "they"
        text += f" Of {plural(unknown, 'rank')} nobody noted how {pronoun} ended."
    if unclear:
        calls = "calls" if len(unclear) > 1 else "call"
        text += f" Nobody knows whether the last {calls} of {with_noun(unclear)} ended."
    return text


def _ended_well(state: RankState) -> bool:
    return state.exit == 0 or (state.exit is None and state.closed)


def _longest(call: Lasting | None, hang_after: float) -> str:
    """Write when the call that has been in flight longest will count as hung.

    A user who asks because the job stands still must not only read that it goes on.
    """
    if call is None or call.seconds < LONG * hang_after:
        return ""
    lasts = f" The longest call has been in flight for {duration(call.seconds)}"
    if call.allowed_s == math.inf:
        return f"{lasts}: its rank declared to take long (rankcall.expect)."
    more = "" if call.allowed_s <= hang_after else ", more in the first step or for long steps"
    option = f"(--hang-after {hang_after:g}{more})"
    return f"{lasts}; it counts as hung from {duration(call.allowed_s)} on {option}."
