"""The verdict ``no_progress``: no call hangs on record, and still nothing goes on.

Ranks wait without a record while they make a process group or wait on a store. The records then
only show that the ranks do nothing; their stacks, if there are any, show who waits for whom.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rankcall.analysis.pace import quiet_s, usual_step_s
from rankcall.analysis.rpc_calls import long_waits, rpc_quiet_s, rpc_states
from rankcall.analysis.snapshot import (
    ALIVE,
    END_UNKNOWN,
    GONE,
    RankState,
    Snapshot,
    standings,
    unfinished,
)
from rankcall.analysis.verdicts.evidence import HangEvidence
from rankcall.analysis.verdicts.facts import (
    Fact,
    Relation,
    hosts_of,
    last_call,
    not_known,
    place_of,
    ranks_of,
)
from rankcall.analysis.verdicts.finding import Finding, Predicate
from rankcall.analysis.verdicts.kind import Kind
from rankcall.analysis.verdicts.lasting import FIRST_STEP, LONG_STEPS
from rankcall.analysis.verdicts.sentences import SHOWN
from rankcall.analysis.verdicts.verdict import Lasting
from rankcall.run.frames import CodePlace, code_place, stands_still

# A process gets this long to start up, however short the threshold: it imports, opens its data and
# meets the others.
_START_UP_S = 20.0
_STORE = "the job's store"
_MOST_PLACES = 4  # that a finding lists
# A rank stands still if it has done so for this share of the threshold. It may have come to the
# place some time after its last call.
STILL_SHARE = 0.5
_FRESH_S = 5.0  # what a rank's watcher wrote into its ring counts for so long after Python last ran


def silence_of(snapshot: Snapshot, hang_after: float) -> Lasting | None:
    """Return the silence of a job that runs; None if a rank is busy, or has reason to be silent.

    A rank in a call is not silent: the wait for that call has a verdict of its own. A rank is busy
    if it declared a long phase, or has taken optimizer steps since its last call. If a rank has
    left the job, the others may do what they like.
    """
    known = [state for state in snapshot.ranks if not state.blind]
    if not snapshot.live or len(snapshot.ranks) < 2 or not known:
        return None
    if any(state.leaving or state.closed or state.state == GONE for state in known):
        return None
    if any(state.may_be_silent(hang_after) for state in known):
        return None
    calls = snapshot.calls
    if unfinished(calls).any() or _steps_on_its_own(snapshot, known):
        return None
    quiet = quiet_s(snapshot)
    seconds = min(min(float(quiet[state.rank]), rpc_quiet_s(state)) for state in known)
    allowed = max(hang_after, LONG_STEPS * usual_step_s(snapshot))
    if not len(calls):
        allowed = max(FIRST_STEP * hang_after, _START_UP_S)
    elif not any(state.steps for state in known):
        allowed = FIRST_STEP * hang_after
    return Lasting(seconds, allowed) if np.isfinite(seconds) else None


def _steps_on_its_own(snapshot: Snapshot, known: Sequence[RankState]) -> bool:
    """Tell whether a rank has taken steps since its last call, as in local training."""
    newest = np.zeros(len(snapshot.ranks), np.int64)
    np.maximum.at(newest, snapshot.calls["rank"], snapshot.calls["step"])
    # The optimizer step after the last call belongs to that call.
    return any(state.steps > newest[state.rank] + 1 for state in known)


class NoProgress(Kind):
    """Ranks wait without a record, or no rank has issued anything for too long."""

    kind = "no_progress"
    order = 75
    predicate = Predicate("did not come", "did not come", "No rank goes on")

    def if_unexplained(self, evidence: HangEvidence) -> Iterator[Finding]:
        """Yield one finding if all ranks have been silent for too long."""
        snapshot = evidence.snapshot
        silence = silence_of(snapshot, evidence.hang_after)
        if silence is None or not silence.is_long or long_waits(snapshot, evidence.hang_after):
            return  # the last: the verdict ``rpc`` says more
        places = {state.rank: code_place(state.stack) for state in snapshot.ranks if state.stack}
        in_setup = {rank for rank, place in places.items() if place.is_setup}
        in_store = set(_in_store(snapshot, evidence.hang_after)) - in_setup
        if in_setup:
            in_store &= places.keys()  # their lines are named as well
        waiting = sorted(in_setup | in_store)
        absent = _absent(snapshot, waiting)
        # A function that makes a group waits for other ranks. A key of the store may also be set by
        # a rank that computes first, so the others must do nothing.
        is_certain = bool(in_setup) or (
            bool(in_store)
            and all(
                _is_still(state, evidence.hang_after)
                for state in snapshot.ranks
                if state.rank not in in_store
            )
        )
        line = next((places[rank].line for rank in waiting if rank in places), "")
        yield self.finding(
            absent,
            victims=tuple(
                state.rank
                for state in snapshot.ranks
                if state.rank not in absent and not state.blind
            ),
            hosts=hosts_of(snapshot, absent),
            since_s=silence.seconds,
            call_site=line,
            confidence="certain" if is_certain else "likely" if absent else "possible",
            said=[
                _silent(snapshot, places, waiting, absent, silence.seconds)
                if in_setup or not in_store
                else _store_wait(snapshot, line, waiting, is_certain, silence.seconds)
            ],
            shown=list(_stand(snapshot, places)),
            live=snapshot.live,
            advice=_advice(snapshot, waiting, absent, places),
        )


def _in_store(snapshot: Snapshot, hang_after: float) -> Iterator[int]:
    """Yield the ranks whose thread that trains waits for the job's store."""
    for state in snapshot.ranks:
        seconds = state.in_store_s or 0.0
        if _is_fresh(state) and seconds >= STILL_SHARE * hang_after:
            yield state.rank


def _is_still(state: RankState, hang_after: float) -> bool:
    """Return whether a rank does nothing: it sleeps in its own code.

    It may also wait for another program or for the network, and then go on. So the stack has to
    show that it does not, and the process must have used hardly any CPU time.
    """
    is_idle = _is_fresh(state) and (state.idle_s or 0.0) >= STILL_SHARE * hang_after
    return is_idle and stands_still(state.stack)


def _is_fresh(state: RankState) -> bool:
    return state.state == ALIVE and state.gil_s < _FRESH_S


def _absent(snapshot: Snapshot, waiting: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks that have not come to where others wait.

    With stacks: the ranks whose stack shows them elsewhere, and those that left no record. Without:
    those that have no process group yet, if others have one, or those that left no record.
    """
    ranks = snapshot.ranks
    if waiting:
        absent = [
            state.rank
            for state in ranks
            if state.rank not in waiting and (state.stack or state.blind)
        ]
    elif any(state.groups for state in ranks):
        absent = [state.rank for state in ranks if not state.groups]
    else:
        absent = [state.rank for state in ranks if state.blind]
    return tuple(absent)


def _silent(
    snapshot: Snapshot,
    places: dict[int, CodePlace],
    waiting: Sequence[int],
    absent: Sequence[int],
    seconds: float,
) -> Fact:
    """Return who waits where, and for whom, as far as stacks and groups show it."""
    if waiting:
        functions = sorted(
            {places[rank].inside if places[rank].is_setup else _STORE for rank in waiting}
        )
        line = places[waiting[0]].line
        everybody = not absent and len(waiting) == len(snapshot.ranks)
        return Fact(
            Relation.ALL_WAIT_IN_FUNCTION if everybody else Relation.WAITS_IN_FUNCTION,
            ranks_of(snapshot, waiting),
            others=ranks_of(snapshot, absent) if absent else None,
            values=(("functions", " and ".join(functions)), ("line", line)),
            number=seconds,
            unit="s",
        )
    if absent:
        ranks = ranks_of(snapshot, absent)
        return Fact(Relation.NO_GROUP_YET, ranks, number=seconds, unit="s")
    begun = any(state.groups for state in snapshot.ranks)
    everyone = ranks_of(snapshot, range(len(snapshot.ranks)))
    if not begun:
        return Fact(Relation.NONE_STARTED, everyone, number=seconds, unit="s")
    rows, how = standings(snapshot.calls)
    unknown = [
        int(rank)
        for rank, stands in zip(snapshot.calls["rank"][rows], how, strict=True)
        if stands == END_UNKNOWN
    ]
    others = ranks_of(snapshot, unknown) if unknown else None
    return Fact(Relation.NONE_ISSUES, everyone, others=others, number=seconds, unit="s")


def _store_wait(
    snapshot: Snapshot, line: str, waiting: Sequence[int], is_certain: bool, seconds: float
) -> Fact:
    """Return who waits for the store, and what the others do as far as that is certain."""
    others = [state.rank for state in snapshot.ranks if state.rank not in waiting]
    return Fact(
        Relation.WAITS_IN_STORE if others else Relation.ALL_WAIT_IN_STORE,
        ranks_of(snapshot, waiting),
        others=ranks_of(snapshot, others) if others and is_certain else None,
        values=(("line", line),),
        number=seconds,
        unit="s",
    )


def _stand(snapshot: Snapshot, places: dict[int, CodePlace]) -> Iterator[Fact]:
    """Yield where each rank stands; ranks at one line share a fact."""
    alike: dict[CodePlace, list[int]] = {}
    for rank, place in places.items():
        alike.setdefault(place, []).append(rank)
    for place, ranks in sorted(alike.items(), key=lambda item: item[1])[:_MOST_PLACES]:
        yield Fact(Relation.STANDS_AT, ranks_of(snapshot, ranks), values=place_of(place))
    without = [
        state.rank for state in snapshot.ranks if state.rank not in places and not state.blind
    ]
    for rank in without[:SHOWN]:
        yield last_call(snapshot, rank)
    blind = [state.rank for state in snapshot.ranks if state.blind]
    if blind:
        yield not_known(snapshot, blind)
    for rank, rpc in list(rpc_states(snapshot).items())[:SHOWN]:
        if rpc.open_calls > len(rpc.waits):
            values = ("worker", rpc.worker), ("calls", str(rpc.open_calls))
            yield Fact(Relation.RPC_UNANSWERED, ranks_of(snapshot, [rank]), values=values)


def _advice(
    snapshot: Snapshot,
    waiting: Sequence[int],
    absent: Sequence[int],
    places: dict[int, CodePlace],
) -> str:
    if waiting and not absent:
        return (
            "Check that all ranks have the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, and that "
            "they create the same groups in the same order."
        )
    blind = [rank for rank in absent if snapshot.ranks[rank].blind]
    if blind and len(blind) == len(absent):
        return (
            "See whether these processes were started, and what they do before they call "
            "init_process_group: until then, a process leaves no records."
        )
    if absent:
        first = snapshot.ranks[absent[0]]
        if places.get(absent[0]):
            return f"See what rank {absent[0]} does at that line before it joins the others."
        return f"See what rank {absent[0]} does: {_look(first)}."
    alive = next((state for state in snapshot.ranks if state.state == ALIVE), snapshot.ranks[0])
    see = "" if places else f"See what the ranks do: {_look(alive)}. "
    return f"{see}If this phase is meant to take long, declare it: rankcall.expect(seconds, what)."


def _look(state: RankState) -> str:
    on = f" on {state.host}" if state.host else ""
    return f"rankcall diagnose --stacks, or py-spy dump --pid {state.pid}{on}"
