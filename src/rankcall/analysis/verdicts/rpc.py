"""The verdict ``rpc``: ranks wait for the answers of other workers, and no rank does anything else.

Each long wait leads to the worker that is to answer, and there to the threads that run the
function. If all of these wait for answers themselves, it goes on from there. It ends at a function
that runs, at a worker that does not run the function, or in a circle: a deadlock.

A thread that runs a function does not show for which call. So if several workers call the same
function, one of them may be taken for another, and the finding is likely, not certain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rankcall.analysis.rpc_calls import RankWait, long_waits, rpc_states
from rankcall.analysis.snapshot import Snapshot
from rankcall.analysis.verdicts.evidence import HangEvidence
from rankcall.analysis.verdicts.facts import Fact, Relation, hosts_of, ranks_of
from rankcall.analysis.verdicts.finding import Finding, Predicate
from rankcall.analysis.verdicts.kind import Kind
from rankcall.analysis.verdicts.no_progress import silence_of
from rankcall.analysis.verdicts.sentences import SHOWN
from rankcall.analysis.verdicts.wait_graph import components
from rankcall.ring.rpc_state import RpcRun, RpcState

_S = 1e9
# What a rank runs for other workers, by the function; "" is what it runs for itself.
Place = tuple[int, str]


class Rpc(Kind):
    """Ranks wait for answers of workers that do not give any."""

    kind = "rpc"
    order = 74
    predicate = Predicate("does not answer", "do not answer", "RPCs are not answered")

    def if_unexplained(self, evidence: HangEvidence) -> Iterator[Finding]:
        """Yield one finding for each circle or, without one, for each worker that does not answer.

        Only if no rank has done anything else for so long: a call may take hours while its worker
        goes on.
        """
        snapshot, after = evidence.snapshot, evidence.hang_after
        waits, silence = long_waits(snapshot, after), silence_of(snapshot, after)
        if not waits or silence is None or silence.seconds < after:
            return
        states = rpc_states(snapshot)
        ways = [(wait, list(_places(wait, states))) for wait in waits]
        circles = list(_circles(ways, states))
        for circle in circles:
            yield self._circle(snapshot, circle)
        if circles:
            return
        ends: dict[int | None, list[RankWait]] = {}
        for wait, places in ways:
            if not places or any(not _is_blocked(place, states) for place in places):
                ends.setdefault(wait.to_rank, []).append(wait)
        # If all end at threads whose own waits are young or did not fit into the header, the
        # longest wait is all that is known.
        for rank, held in (ends or {waits[0].to_rank: [waits[0]]}).items():
            yield self._unanswered(snapshot, rank, held, waits, states)

    def _circle(self, snapshot: Snapshot, waits: Sequence[RankWait]) -> Finding:
        ranks = sorted({wait.rank for wait in waits})
        longest = max(waits, key=lambda wait: wait.age_s)
        return self.finding(
            ranks,
            hosts=hosts_of(snapshot, ranks),
            since_s=longest.age_s,
            call_site=longest.wait.line,
            confidence="likely",
            said=[
                Fact(Relation.RPC_CIRCLE, ranks_of(snapshot, ranks)),
                *(_wait_fact(snapshot, wait) for wait in waits),
            ],
            live=snapshot.live,
            advice=(
                "Let one of these functions return without the other's answer, for example by "
                "rpc_async; if a worker has no free thread, raise num_worker_threads."
            ),
        )

    def _unanswered(
        self,
        snapshot: Snapshot,
        rank: int | None,
        held: Sequence[RankWait],
        waits: Sequence[RankWait],
        states: Mapping[int, RpcState],
    ) -> Finding:
        """Return a finding about the worker at the end of some waits; None: it left no records."""
        ranks = () if rank is None else (rank,)
        said = [_wait_fact(snapshot, held[0])]
        places = list(_places(held[0], states))
        if rank is not None and not (places and all(_is_blocked(at, states) for at in places)):
            said.append(_end_fact(snapshot, rank, held[0], states[rank]))
        others = [_wait_fact(snapshot, wait) for wait in waits if wait is not held[0]]
        return self.finding(
            ranks,
            victims=tuple(sorted({wait.rank for wait in waits} - set(ranks))),
            hosts=hosts_of(snapshot, ranks),
            since_s=held[0].age_s,
            call_site=held[0].wait.line,
            confidence="likely",
            said=said,
            shown=others[:SHOWN],
            live=snapshot.live,
            advice=_advice(rank, held[0]),
        )


def _places(wait: RankWait, states: Mapping[int, RpcState]) -> Iterator[Place]:
    """Yield where the answer to a wait has to come from; nothing if no thread there runs it."""
    if wait.to_rank is None:
        return
    state = states[wait.to_rank]
    runs = {run.function for run in state.runs}
    if wait.wait.function in runs:
        yield wait.to_rank, wait.wait.function
    elif not state.idle:  # the request waits for a thread
        yield from ((wait.to_rank, function) for function in runs)


def _runs(place: Place, states: Mapping[int, RpcState]) -> list[RpcRun]:
    rank, function = place
    return [run for run in states[rank].runs if run.function == function]


def _is_blocked(place: Place, states: Mapping[int, RpcState]) -> bool:
    """Return whether every thread that runs a function waits for an answer itself."""
    return all(run.waits for run in _runs(place, states))


def _circles(
    ways: Sequence[tuple[RankWait, Sequence[Place]]], states: Mapping[int, RpcState]
) -> Iterator[list[RankWait]]:
    """Yield the waits of each circle of functions that wait for each other."""
    numbers: dict[Place, int] = {}
    edges: dict[int, list[int]] = {}
    for wait, places in ways:
        own = numbers.setdefault((wait.rank, wait.wait.during), len(numbers))
        for place in places:
            if _is_blocked(place, states):
                edges.setdefault(own, []).append(numbers.setdefault(place, len(numbers)))
    for number in range(len(numbers)):
        edges.setdefault(number, [])
    for part in components(edges):
        inside = {place for place, number in numbers.items() if number in part}
        yield [wait for wait, _ in ways if (wait.rank, wait.wait.during) in inside]


def _wait_fact(snapshot: Snapshot, wait: RankWait) -> Fact:
    others = None if wait.to_rank is None else ranks_of(snapshot, [wait.to_rank])
    values = ("worker", wait.wait.to), ("function", wait.wait.function), ("line", wait.wait.line)
    return Fact(
        Relation.RPC_WAITS,
        ranks_of(snapshot, [wait.rank]),
        others=others,
        values=values,
        number=wait.age_s,
        unit="s",
    )


def _end_fact(snapshot: Snapshot, rank: int, wait: RankWait, state: RpcState) -> Fact:
    """Return what the rank at the end of a wait does: it runs the function, or it does not."""
    ranks = ranks_of(snapshot, [rank])
    runs = [run for run in state.runs if not run.waits]
    same = [run for run in runs if run.function == wait.wait.function]
    if not same and (state.idle or not runs):
        values = ("worker", state.worker), ("function", wait.wait.function)
        return Fact(Relation.RPC_NOT_RUN, ranks, values=values)
    run = (same or runs)[0]
    values = ("function", run.function), ("line", run.line)
    seconds = run.since_ns / _S
    return Fact(Relation.RPC_RUNS, ranks, values=values, number=seconds, unit="s")


def _advice(rank: int | None, wait: RankWait) -> str:
    if rank is None:
        return f"See what worker {wait.wait.to!r} does; it left no records here."
    return f"See what rank {rank} does there: rankcall diagnose --stacks, or py-spy dump."
