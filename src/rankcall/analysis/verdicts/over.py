"""Whether a hang is over: its calls have ended. That other threads of its ranks go on is no sign.

A rank whose main thread trains may have another thread that waits for ever, in a group of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rankcall.analysis.collectives import BLOCKING
from rankcall.analysis.pace import quiet_s
from rankcall.analysis.snapshot import (
    ALIVE,
    COMPLETED,
    P2P,
    Bools,
    Snapshot,
    failed_for_good,
    unfinished,
)
from rankcall.analysis.verdicts.finding import Finding


def never_ended(snapshot: Snapshot, seconds: float) -> Bools:
    """Return which calls that were in flight so many s ago still are, or have failed for good.

    A message that was issued to be waited for later does not hold up a rank that goes on.
    """
    calls = snapshot.calls
    open_calls = unfinished(calls)
    blocking = [number for number, site in enumerate(snapshot.sites) if site.api in BLOCKING]
    loose = (calls["kind"] == P2P) & ~np.isin(calls["site"], blocking)
    open_calls &= ~loose | (quiet_s(snapshot)[calls["rank"]] >= seconds)
    held: Bools = (open_calls | _failed_since(snapshot, seconds)) & (calls["age_s"] >= seconds)
    return held


def _failed_since(snapshot: Snapshot, seconds: float) -> Bools:
    """Return which calls have failed for good in the last so many s."""
    calls = snapshot.calls
    failed: Bools = failed_for_good(calls) & ~(calls["ended_s"] > seconds)
    return failed


def quiet_if_over(snapshot: Snapshot, findings: Iterable[Finding], seconds: float) -> float | None:
    """Return for how long a rank has been quiet at most, in s, if a hang is over; else None.

    It is over if all calls that were in flight ``seconds`` ago have ended, none has failed for good
    since, and every known rank has issued or left a call since. The calls that findings name
    may be of other nodes' ranks: then a rank that is known here must have left them.
    """
    known = [state for state in snapshot.ranks if not state.blind]
    if any(state.state != ALIVE or state.leaving or state.closed for state in known):
        return None
    longest = float(quiet_s(snapshot)[[state.rank for state in known]].max(initial=0.0))
    stuck = never_ended(snapshot, seconds) | _failed_since(snapshot, seconds)
    if longest >= seconds or stuck.any():
        return None
    return longest if all(_was_left(snapshot, finding) for finding in findings) else None


def _was_left(snapshot: Snapshot, finding: Finding) -> bool:
    """Tell whether a rank has left the call that a finding names, or names none."""
    if not finding.group:
        return True
    calls = snapshot.calls
    groups = [number for number, label in enumerate(snapshot.labels) if label == finding.group]
    left = np.isin(calls["group"], groups) & (calls["status"] == COMPLETED)
    return bool(np.any(left & (calls["seq"] >= finding.seq)))


def lasted(snapshot: Snapshot, finding: Finding, seconds: float) -> bool:
    """Tell whether a finding of ``seconds`` before the snapshot was true until then.

    One that names a call lasted if a call of its ranks never ended. Of any other one, the records
    show only whether a rank has issued a call since. One of an earlier attempt did not last.
    """
    calls = snapshot.calls
    ranks = {*finding.ranks, *finding.victims}
    if any(state.started_s is not None and state.started_s < seconds for state in snapshot.ranks):
        return False
    if finding.group and not any(
        rank >= len(snapshot.ranks) or snapshot.ranks[rank].blind for rank in finding.victims
    ):
        held = never_ended(snapshot, seconds)
        return not ranks.isdisjoint(calls["rank"][held].tolist())
    return not np.any(calls["age_s"] < seconds)
