"""The verdict ``stopped``: a process exists and does not run."""

from __future__ import annotations

from collections.abc import Sequence

from rankcall.analysis.snapshot import GONE, STOPPED, RankState, Snapshot
from rankcall.analysis.verdicts.ends import FROZEN_S
from rankcall.analysis.verdicts.facts import Fact, Relation, ranks_of
from rankcall.analysis.verdicts.finding import Predicate
from rankcall.analysis.verdicts.kind import CulpritKind
from rankcall.analysis.verdicts.reasons import reasons_for_absence
from rankcall.analysis.verdicts.sentences import SHOWN
from rankcall.analysis.verdicts.suspects import Case, Suspect, Suspects, frozen_after_s


class Stopped(CulpritKind):
    """A signal stopped a process, or it gives no sign of life, or one thread holds the GIL."""

    kind = "stopped"
    order = 20
    predicate = Predicate("does not run", "do not run")

    def confidence(self, suspects: Suspects, suspect: Suspect) -> str | None:
        """Fit stopped processes, and those whose heartbeat froze when the waiting began."""
        state = suspect.state
        if state.state == STOPPED:
            return "certain"
        if suspects.has_left(suspect.rank) or state.closed or state.blind:
            return None
        frozen = max(state.mute_s, state.gil_held_s) > frozen_after_s(suspect.waits)
        return "likely" if frozen else None

    def counts(self, suspects: Suspects, case: Case) -> bool:
        """Report every stopped process, and a frozen one that others wait for.

        A process that a signal has stopped makes no progress, whether others wait for it or not.
        """
        return case.state.state == STOPPED or self.has_waited_long(suspects, case)

    def state(self, snapshot: Snapshot, states: Sequence[RankState], held_s: float) -> Fact:
        """Return the sign by which the processes are known to stand still."""
        first, ranks = states[0], ranks_of(snapshot, [state.rank for state in states])
        if first.state == STOPPED:
            return Fact(Relation.STOPPED, ranks)
        relation, seconds = Relation.HOLDS_GIL, first.gil_held_s
        if _is_mute(first):
            seconds = first.mute_s
            relation = Relation.NO_PYTHON_THREAD if first.needs_gil else Relation.NO_SIGN_OF_LIFE
        return Fact(relation, ranks, number=seconds, unit="s")

    def reasons(self, snapshot: Snapshot, ranks: Sequence[int]) -> list[Fact]:
        """Return what the ranks have done since their last call."""
        return reasons_for_absence(snapshot, ranks)

    def advice(self, snapshot: Snapshot, states: Sequence[RankState]) -> str:
        """Write how to let the processes go on, or how to find out what stopped them."""
        first = states[0]
        on = f" on {first.host}" if first.host else ""
        if first.state == STOPPED:
            return _resume(states)
        if first.state == GONE:
            return f"See what stopped it{on}: a SIGSTOP, a debugger, swapping, a held GIL."
        if _is_mute(first):
            causes = ["it is swapped out", "a debugger holds it"]
            if first.needs_gil:
                causes.append("one thread holds the GIL")
            same_host = [
                state
                for state in snapshot.ranks
                if state.host == first.host and state not in states
            ]
            # If others of the host give signs of life, the host does not stand still.
            if all(_is_mute(state) for state in same_host):
                causes.append("its host stands still")
            any_of = f"{', '.join(causes[:-1])} or {causes[-1]}"
            return f"See whether {any_of}{on}: pid {first.pid}."
        return f"See which extension holds the GIL: py-spy dump --native --pid {first.pid}{on}."


def _is_mute(state: RankState) -> bool:
    """Tell whether not even the native heartbeat goes on, which does not need the GIL."""
    return state.mute_s > FROZEN_S


def _resume(states: Sequence[RankState]) -> str:
    """Write the commands that let stopped processes go on, host by host."""
    pids: dict[str, list[str]] = {}
    for state in states:
        pids.setdefault(state.host, []).append(str(state.pid))
    commands = [
        f"kill -CONT {' '.join(host_pids)}{f' on {host}' if host else ''}"
        for host, host_pids in pids.items()
    ]
    more = ", and so on," if len(commands) > SHOWN else ""
    pronoun = "it" if len(states) == 1 else "them"
    return f"{', '.join(commands[:SHOWN])}{more} lets {pronoun} go on."
