"""Whom everybody waits for in the end, and what is the matter with them."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rankcall.analysis.deaths import Deaths
from rankcall.analysis.finding import Finding, less_sure
from rankcall.analysis.snapshot import GONE, STOPPED, RankState, Snapshot
from rankcall.analysis.waits import Wait
from rankcall.record import OPS
from rankcall.run import format_ranks

_FROZEN_S = 3.0  # six heartbeats
_KEPT_EVIDENCE = 8


@dataclass
class _Case:
    """One rank that others wait for and that waits for nobody."""

    rank: int
    kind: str
    confidence: str
    waits: list[Wait] = field(default_factory=list)


class Graph:
    """The waits, by who is in them and who is not."""

    def __init__(self, waits: Sequence[Wait]) -> None:
        self.waits = waits
        self.in_wait: dict[int, list[Wait]] = {}
        self.without: dict[int, list[Wait]] = {}
        for wait in waits:
            for rank in wait.waiters:
                self.in_wait.setdefault(rank, []).append(wait)
            for rank in wait.absent:
                self.without.setdefault(rank, []).append(wait)

    def blocked(self, rank: int) -> bool:
        """Tell whether a rank waits for somebody itself."""
        return rank in self.in_wait

    def victims(self, waits: Iterable[Wait]) -> set[int]:
        """Return who is in some waits, and who waits for those, and so on."""
        seen: set[int] = set()
        todo = list(waits)
        done = {id(wait) for wait in todo}
        while todo:
            for rank in todo.pop().waiters:
                if rank not in seen:
                    seen.add(rank)
                    for wait in self.without.get(rank, ()):
                        if id(wait) not in done:
                            done.add(id(wait))
                            todo.append(wait)
        return seen


def name_culprits(
    snapshot: Snapshot, waits: Sequence[Wait], gone: Deaths, hang_after: float
) -> list[Finding]:
    """Return one finding for each cause: ranks alike in kind, in the same wait, are one."""
    graph = Graph(waits)
    cases = {
        rank: _case(snapshot, graph, gone, rank)
        for rank in _suspects(snapshot, graph, gone)
        if not snapshot.ranks[rank].may_be_silent(hang_after)
    }
    found: dict[tuple[str, int], list[_Case]] = {}
    for case in cases.values():
        if case is not None and _counts(snapshot, graph, case, gone, hang_after):
            longest = max(case.waits, key=lambda wait: wait.age_s, default=None)
            found.setdefault((case.kind, id(longest)), []).append(case)
    return [_finding(snapshot, graph, alike) for alike in found.values()]


def _suspects(snapshot: Snapshot, graph: Graph, gone: Deaths) -> list[int]:
    """Return who is waited for and waits for nobody, and who cannot go on whatever it is in."""
    absent = {rank for rank in graph.without if not graph.blocked(rank)}
    halted = {
        each.rank
        for each in snapshot.ranks
        if each.rank in gone.own or (each.state != GONE and _halted(each))
    }
    return sorted(absent | halted)


def _halted(state: RankState) -> bool:
    return state.state == STOPPED or (not state.blind and _frozen(state))


def _frozen(state: RankState) -> bool:
    return state.gil_s > _FROZEN_S and not state.closed


def _case(snapshot: Snapshot, graph: Graph, gone: Deaths, rank: int) -> _Case | None:
    state = snapshot.ranks[rank]
    waits = [*graph.without.get(rank, ()), *graph.in_wait.get(rank, ())]
    if rank in gone.own:
        return _Case(rank, "dead", "certain" if state.exit is not None else "likely", waits)
    if not waits:
        return None
    if rank in gone.left or state.left_loop:
        return _Case(rank, "exhausted", "certain" if state.exit == 0 else "likely", waits)
    if state.state == STOPPED:
        return _Case(rank, "stopped", "certain", waits)
    if state.state != GONE and not state.blind and _frozen(state):
        return _Case(rank, "stopped", "likely", waits)
    return _Case(rank, "missing", "possible" if state.blind else "certain", waits)


def _counts(snapshot: Snapshot, graph: Graph, case: _Case, gone: Deaths, hang_after: float) -> bool:
    """Tell whether somebody has waited long enough for a case to count."""
    if case.kind == "dead":
        return True
    reached = graph.victims(case.waits) | {case.rank}
    hung = [wait for rank in reached for wait in graph.in_wait.get(rank, ()) if wait.hung]
    if gone.first_s is None or case.kind != "missing":
        return bool(hung)
    # One process took the others with it: who was on the way then is no cause, unless it had
    # kept them waiting for long.
    return any(wait.age_s - gone.first_s >= hang_after for wait in hung)


def _finding(snapshot: Snapshot, graph: Graph, cases: Sequence[_Case]) -> Finding:
    ranks = tuple(sorted(case.rank for case in cases))
    kind = cases[0].kind
    waits = list({id(wait): wait for case in cases for wait in case.waits}.values())
    victims = tuple(sorted(graph.victims(waits) - set(ranks)))
    longest = max(waits, key=lambda wait: wait.age_s, default=None)
    confidence = max((case.confidence for case in cases), key=len) if len(cases) > 1 else ""
    confidence = confidence or cases[0].confidence
    if any(snapshot.ranks[victim].blind for victim in ranks):
        confidence = less_sure(confidence)
    hosts = tuple(dict.fromkeys(snapshot.ranks[r].host for r in ranks if snapshot.ranks[r].host))
    if longest is None:
        return Finding(
            kind, ranks, victims, hosts, confidence=confidence,
            since_s=max(snapshot.ranks[rank].gone_s or 0.0 for rank in ranks),
            summary=_summary(snapshot, kind, ranks, None),
        )  # fmt: skip
    call = snapshot.calls[longest.rows[0]]
    return Finding(
        kind, ranks, victims, hosts, snapshot.labels[longest.group], longest.seq,
        OPS[int(call["op"])], _common_site(snapshot, longest), longest.age_s, confidence,
        _summary(snapshot, kind, ranks, longest),
    )  # fmt: skip


def _common_site(snapshot: Snapshot, wait: Wait) -> str:
    sites, counts = np.unique(snapshot.calls["site"][wait.rows], return_counts=True)
    return snapshot.site(int(sites[np.argmax(counts)]))


def _summary(snapshot: Snapshot, kind: str, ranks: Sequence[int], wait: Wait | None) -> str:
    who = f"rank {format_ranks(ranks)}"
    return f"{who} is {kind}"


def signal_name(code: int) -> str:
    """Return an exit code in words: ``SIGKILL``, ``exit code 1``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
