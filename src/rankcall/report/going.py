"""How a job goes that has no finding, in a sentence or two."""

from __future__ import annotations

import math

from rankcall.analysis.snapshot import END_UNKNOWN
from rankcall.analysis.verdicts.verdict import Lasting, Verdict
from rankcall.analysis.verdicts.wording import duration
from rankcall.ranks import with_noun
from rankcall.report.formatting import digits, percent, plural

LONG = 0.1  # of the age at which a call counts as hung: from then on, people are told of it


def healthy(verdict: Verdict) -> str:
    """Say that nothing is wrong, how fast the job goes, or how it ended."""
    going = verdict.going
    if going is None:
        return "healthy"
    processes = [
        position.process
        for position in verdict.ranks
        if not position.blind or position.process.exit is not None
    ]
    speed = ""
    if going.pace.steps_per_s is not None:
        speed = f", {digits(going.pace.steps_per_s)} steps/s"
    elif going.pace.calls_per_s is not None:
        speed = f", {digits(going.pace.calls_per_s)} calls/s"
    if going.pace.share is not None:
        speed += f", {percent(going.pace.share)} of the time in communication"
    if going.live:
        silence = going.silence
        if silence is not None and silence.seconds >= LONG * verdict.hang_after:
            return (
                f"nothing found yet: no rank has issued anything for {duration(silence.seconds)}; "
                f"that counts as no progress from {duration(silence.allowed_s)} on."
            )
        ranks = plural(len(processes), "rank goes", "ranks go")
        return f"healthy: {ranks} on{speed}.{_longest(going.longest, verdict.hang_after)}"
    ended = sum(state.exit == 0 or (state.exit is None and state.closed) for state in processes)
    ended_by_launcher = sum(state.ended_by_launcher for state in processes)
    more = (
        f" {plural(ended_by_launcher, 'was', 'were')} ended by the launcher."
        if ended_by_launcher
        else ""
    )
    unknown = sum(
        state.exit is None and not (state.closed or state.ended_by_launcher) for state in processes
    )
    if unknown:
        pronoun = "it" if unknown == 1 else "they"
        more += f" Of {plural(unknown, 'rank')} nobody noted how {pronoun} ended."
    unclear = [
        position.rank
        for position in verdict.ranks
        if position.how == END_UNKNOWN and position.process.exit is None
        if not (position.process.closed or position.process.ended_by_launcher)
    ]
    if unclear:  # the ranks may have hung in these calls
        calls = "calls" if len(unclear) > 1 else "call"
        more += f" Nobody knows whether the last {calls} of {with_noun(unclear)} ended."
    whole = plural(len(verdict.ranks), "rank")
    verdict_words = "nothing found" if unclear else "healthy"
    return f"{verdict_words}: {ended:,} of {whole} ended well{speed}.{more}"


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
