"""The verdict ``missing``: a rank runs and has not come to a call that others wait in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from rankcall.analysis.pace import quiet_s
from rankcall.analysis.snapshot import (
    GONE,
    START_SEEN,
    RankState,
    Snapshot,
    not_started,
    unfinished,
)
from rankcall.analysis.verdicts.arrivals import GOES_ON
from rankcall.analysis.verdicts.evidence import HangEvidence
from rankcall.analysis.verdicts.facts import (
    Fact,
    Ranks,
    Relation,
    call_of,
    hosts_of,
    place_of,
    ranks_of,
)
from rankcall.analysis.verdicts.finding import Finding, Predicate
from rankcall.analysis.verdicts.kind import CulpritKind
from rankcall.analysis.verdicts.lasting import followed_after, held_for
from rankcall.analysis.verdicts.reasons import reasons_for_absence
from rankcall.analysis.verdicts.sentences import SHOWN
from rankcall.analysis.verdicts.suspects import Suspect, Suspects
from rankcall.record import FLAG_DEVICE
from rankcall.run.frames import LOADER, CodePlace, code_place

# A process ends so soon after its ring was closed: Python closes down, and torch ends its threads.
_ENDING_S = 10.0
_APART_S = 1.0  # between two moments that hosts tell, whose order is to be known


class Missing(CulpritKind):
    """A rank has not arrived, and no other kind says why."""

    kind = "missing"
    order = 70
    predicate = Predicate("did not come", "did not come")
    may_have_skipped = True

    def in_hang(self, evidence: HangEvidence) -> Iterator[Finding]:
        """Yield the ranks that have not come, unless the one that has is the one that differs."""
        cases = [case for case in evidence.cases if not all(map(evidence.is_alone_in, case.waits))]
        yield from super().in_hang(replace(evidence, cases=cases))

    def confidence(self, suspects: Suspects, suspect: Suspect) -> str | None:
        """Fit every rank that is waited for."""
        state = suspect.state
        unseen = (state.blind and not state.unheard) or (state.closed and state.state != GONE)
        if unseen:
            return "possible"
        # Dumps are not all of one moment.
        return "likely" if suspects.snapshot.dumped else "certain"

    def settles_in(self, snapshot: Snapshot, hang_after: float, ranks: Sequence[int]) -> float:
        """Return in how many s it will be clear whether the ranks are on their way.

        A rank that has just come to another call leaves it soon, or waits for a rank itself. 0: no
        rank is in a call.
        """
        calls = snapshot.calls
        left = followed_after(snapshot, hang_after) - held_for(snapshot)
        mine = unfinished(calls) & np.isin(calls["rank"], ranks)
        return float(np.max(left[mine], initial=0.0))

    def state(self, snapshot: Snapshot, states: Sequence[RankState], held_s: float) -> Fact:
        """Return where the ranks are instead, as far as that is known."""
        first, ranks = states[0], ranks_of(snapshot, [state.rank for state in states])
        if first.unheard:
            return Fact(Relation.DOES_NOT_ANSWER, ranks)
        if first.blind:
            kind = "dump" if snapshot.dumped else "records"
            return Fact(Relation.LEFT_NO_RECORDS, ranks, values=(("kind", kind),))
        if first.closed and not all(_recorded_to_its_end(state, held_s) for state in states):
            return Fact(Relation.STOPPED_RECORDING, ranks)
        row = _call_on_device(snapshot, first.rank)
        if row is not None and not_started(snapshot.calls)[row]:
            return _not_started(snapshot, ranks, row)
        if row is not None:
            return Fact(Relation.STILL_IN, ranks, call_of(snapshot, row))
        if snapshot.dumped:
            return Fact(Relation.DUMP_ENDS_BEFORE, ranks)
        places = {code_place(state.stack) for state in states}
        # Ranks that stand in different places have none in common that a sentence could name.
        place = places.pop() if len(places) == 1 else CodePlace()
        quiet = quiet_s(snapshot)
        liveliest = min((state.rank for state in states), key=lambda rank: float(quiet[rank]))
        quiet_for_s, row = float(quiet[liveliest]), _newest_call(snapshot, liveliest)
        # The stack of its training thread does not say why another thread has not come.
        goes_on = quiet_for_s < GOES_ON * held_s and not (place.is_setup or place.inside == LOADER)
        if goes_on and row is not None:
            return Fact(Relation.GOES_ON, ranks, call_of(snapshot, row))
        quiet_for_s -= snapshot.ranks[liveliest].closed_s or 0.0  # what came later is not recorded
        known_s = max(0.0, quiet_for_s) if np.isfinite(quiet_for_s) else None
        return Fact(Relation.NOT_COME, ranks, values=place_of(place), number=known_s, unit="s")

    def reasons(self, snapshot: Snapshot, ranks: Sequence[int]) -> list[Fact]:
        """Return what the ranks have done since their last call."""
        return reasons_for_absence(snapshot, ranks)

    def advice(self, snapshot: Snapshot, states: Sequence[RankState]) -> str:
        """Write how to find out what the ranks do."""
        first = states[0]
        on = f" on {first.host}" if first.host else ""
        if first.unheard:
            lost = ", ".join(hosts_of(snapshot, [state.rank for state in states])[:SHOWN])
            return (
                f"See whether {lost or 'their host'} is up, and what the launcher there says: a "
                "host that is lost or stands still takes all its ranks with it."
            )
        if first.blind and snapshot.dumped:
            return (
                "Find out how it ended (the end of its stderr, dmesg -T): a process that is killed "
                "writes no dump. On NCCL in torch 2.15, nor does a rank whose own calls have not "
                "timed out. If it wrote one, put that beside the others."
            )
        if first.blind:
            return "Bring the records of all nodes together (rankcall collect), then ask again."
        row = _call_on_device(snapshot, first.rank)
        if row is not None and not_started(snapshot.calls)[row]:
            return (
                f"Look at rank {first.rank}'s device{on} (nvidia-smi, dmesg -T | grep -i xid), and "
                "at what its program issued before that line: a kernel there may never end."
            )
        if row is not None:
            return (
                f"Look at rank {first.rank}'s device{on} and its links (dmesg -T | grep -i xid): "
                "the other members have left that call."
            )
        place = code_place(first.stack)
        if place.inside == LOADER:
            return (
                f"Look at its data loader: its workers, the files that they read on "
                f"{first.host or 'its host'}, and whether it has as many batches as the others."
            )
        if place.is_setup:
            return (
                f"All members must call {place.inside} at the same place of the program: the "
                "others are in another call."
            )
        if not snapshot.live and place.line:
            return f"Look at what rank {first.rank} does at {place.line}."
        if not snapshot.live:
            return f"Look at what rank {first.rank} does after the call it was last in."
        return (
            f"See what it does: rankcall diagnose --stacks, or py-spy dump --pid {first.pid}{on}."
        )


def _recorded_to_its_end(state: RankState, held_s: float) -> bool:
    """Return whether a rank that others waited for, ``held_s`` s, recorded until its process ended.

    So it had not come until then: Ctrl-C ends a job that hangs, and closes all rings. A ring that
    was closed long before the process ended tells nothing of the time between.
    """
    if not state.closed:
        return True
    if state.closed_s is None or state.state != GONE:
        return False
    return state.closed_s - (state.gone_s or 0.0) < _ENDING_S and state.closed_s < held_s - _APART_S


def _call_on_device(snapshot: Snapshot, rank: int) -> int | None:
    """Return the row of the oldest call that a rank's device has not left; None without one."""
    calls = snapshot.calls
    on_device = calls["flags"] & FLAG_DEVICE != 0
    rows = np.flatnonzero(unfinished(calls) & on_device & (calls["rank"] == rank))
    return int(rows[np.argmin(calls["index"][rows])]) if len(rows) else None


def _newest_call(snapshot: Snapshot, rank: int) -> int | None:
    """Return the row of the newest call of a rank.

    None if it has issued none, as a rank that began to record while the others waited.
    """
    rows = np.flatnonzero(snapshot.calls["rank"] == rank)
    return int(rows[np.argmax(snapshot.calls["index"][rows])]) if len(rows) else None


def _not_started(snapshot: Snapshot, ranks: Ranks, row: int) -> Fact:
    """Return that ranks issued a call that their devices have not started, and who has."""
    calls = snapshot.calls
    alike = np.ones(len(calls), bool)
    for name in ("group", "kind", "seq", "tag"):
        alike &= calls[name] == calls[name][row]
    has_started = alike & (calls["flags"] & START_SEEN != 0)
    return Fact(
        Relation.NOT_STARTED,
        ranks,
        call_of(snapshot, row),
        ranks_of(snapshot, sorted(set(calls["rank"][has_started].tolist()))),
        number=float(calls["age_s"][row]),
        unit="s",
    )
