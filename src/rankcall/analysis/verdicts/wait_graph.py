"""Which rank waits for which, and the ranks with which the waiting begins.

The ranks that have not come to a call are in a call themselves, which shows what they wait for, or
they are where the hang starts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rankcall.analysis.verdicts.wait import Place, Wait

_NEVER = np.iinfo(np.int64).max


class WaitGraph:
    """The waits by the ranks that are in them, and by the ranks that are absent from them."""

    def __init__(self, waits: Sequence[Wait], blind: Collection[int] = ()) -> None:
        self.waits = waits
        if blind:
            for wait in waits:
                _presume(wait, blind)
            _without_earlier(waits)
        self._first: dict[int, int] = {}  # by rank: its first call that all have come to
        self._full: dict[Place, list[Wait]] = {}  # their waits: a message has one of each end
        for wait in waits:
            if not (wait.absent or wait.soft):
                self._full.setdefault(wait.place, []).append(wait)
                for rank in wait.waiters:
                    self._first[rank] = min(wait.records[rank], self._first.get(rank, _NEVER))
        self.in_wait: dict[int, list[Wait]] = {}
        self.waits_for: dict[int, list[Wait]] = {}
        self._late = _late(waits)
        for wait in waits:
            for rank in self._held(wait, [*wait.waiters, *wait.presumed]):
                self.in_wait.setdefault(rank, []).append(wait)
            for rank in wait.absent:
                self.waits_for.setdefault(rank, []).append(wait)

    def _held(self, wait: Wait, ranks: Iterable[int]) -> list[int]:
        """Return which ranks a wait may keep from going on.

        What a rank has issued behind the call that its device is late in does not. What it has
        issued before that call does.
        """
        late = self._late
        return [rank for rank in ranks if wait.records.get(rank, -1) < late.get(rank, _NEVER)]

    def cycles(self, halted: Collection[int]) -> list[Cycle]:
        """Return every circle of ranks that wait for each other; see ``cycles_in``."""
        waits = [replace(wait, waiters=self._held(wait, wait.waiters)) for wait in self.waits]
        return cycles_in(waits, halted)

    def is_first(self, wait: Wait) -> bool:
        """Tell whether its ranks have issued no other call before it that all have come to.

        Of a message, both ends: the one may hang because the other rank is held in another call.
        """
        ends = self._full[wait.place]
        return all(end.records[rank] == self._first[rank] for end in ends for rank in end.waiters)

    def blocked(self, rank: int) -> bool:
        """Tell whether a rank waits for another one."""
        return rank in self.in_wait

    def joined(self, rank: int) -> list[Wait]:
        """Return the waits that a rank is in, or has left before the others could leave."""
        return [wait for wait in self.waits if rank in wait.present]

    def reach(self, waits: Iterable[Wait]) -> list[Wait]:
        """Return some waits, the waits for the ranks in them, and so on."""
        todo = list(waits)
        reached = {id(wait): wait for wait in todo}
        seen: set[int] = set()
        while todo:
            wait = todo.pop()
            for rank in [*wait.waiters, *wait.presumed]:
                if rank not in seen:
                    seen.add(rank)
                    fresh = [
                        next_wait
                        for next_wait in self.waits_for.get(rank, ())
                        if id(next_wait) not in reached
                    ]
                    reached.update((id(next_wait), next_wait) for next_wait in fresh)
                    todo += fresh
        return list(reached.values())

    def victims(self, waits: Iterable[Wait]) -> set[int]:
        """Return the ranks in some waits, the ranks that wait for those, and so on."""
        return {rank for wait in self.reach(waits) for rank in wait.waiters}


def _late(waits: Sequence[Wait]) -> dict[int, int]:
    """Return by rank the first call to which its device has not come, or that only it is in."""
    late: dict[int, int] = {}
    for wait in waits:
        for rank in [*wait.unstarted, *(wait.waiters if wait.behind else ())]:
            late[rank] = min(wait.records[rank], late.get(rank, _NEVER))
    return late


def _presume(wait: Wait, blind: Collection[int]) -> None:
    """Take ranks without records for victims if a rank with records has not arrived."""
    unseen = [rank for rank in wait.absent if rank in blind]
    if unseen and len(unseen) < len(wait.absent) and not wait.any_source:
        wait.absent = [rank for rank in wait.absent if rank not in blind]
        wait.presumed = unseen


def _without_earlier(waits: Sequence[Wait]) -> None:
    """Presume no rank in a collective whose group waits for it in an earlier one.

    Ranks leave a collective at different times: if a host stops in the midst of one, some ranks are
    in it for ever, and others already in the next, where they wait for the former.
    """
    first: dict[tuple[int, int], int] = {}
    for wait in waits:
        for rank in wait.absent if wait.channel is None else ():
            first[wait.group, rank] = min(wait.seq, first.get((wait.group, rank), wait.seq))
    for wait in waits:
        if wait.channel is None:
            wait.presumed = [
                rank
                for rank in wait.presumed
                if first.get((wait.group, rank), wait.seq) >= wait.seq
            ]


Edges = Mapping[int, Sequence[int]]


@dataclass(frozen=True)
class Cycle:
    """Ranks that wait for each other in a circle, and the waits that they are in."""

    ranks: tuple[int, ...]
    waits: tuple[Wait, ...]


def cycles_in(waits: Sequence[Wait], halted: Collection[int]) -> list[Cycle]:
    """Return every circle of ranks that wait for each other.

    Ranks in ``halted`` are dead or stopped, so the call that they are in is not why they do not go
    on.
    """
    waiting = {rank for wait in waits for rank in wait.waiters if rank not in halted}
    mine: dict[int, list[int]] = {}  # rank -> waits it is in
    for number, wait in enumerate(waits):
        for rank in waiting.intersection(wait.waiters):
            mine.setdefault(rank, []).append(number)
    # A receive from any source needs one of the ranks that it waits for. It is certain to need a
    # rank only if that is the only one left, or if none of them can ever send.
    stuck = _stuck_for_good(waits, mine)
    certain = [
        []
        if wait.any_source and len(wait.absent) > 1 and not stuck.issuperset(wait.absent)
        else [rank for rank in wait.absent if rank in waiting]
        for wait in waits
    ]
    edges = {number: [-1 - rank for rank in absent] for number, absent in enumerate(certain)}
    edges.update({-1 - rank: numbers for rank, numbers in mine.items()})
    return [
        Cycle(
            tuple(sorted(-1 - node for node in part if node < 0)),
            tuple(waits[node] for node in sorted(part) if node >= 0),
        )
        for part in components(edges)
    ]


def _stuck_for_good(waits: Sequence[Wait], mine: Mapping[int, Sequence[int]]) -> set[int]:
    """Return the ranks that can go on only if another one of them does.

    Args:
        waits: All waits.
        mine: The waits that each rank is in, as indexes.
    """
    stuck = set(mine)

    def holds(wait: Wait) -> bool:
        if wait.any_source:
            return stuck.issuperset(wait.absent)
        return not stuck.isdisjoint(wait.absent)

    while True:
        free = {rank for rank in stuck if not any(holds(waits[number]) for number in mine[rank])}
        if not free:
            return stuck
        stuck -= free


def components(edges: Edges) -> list[list[int]]:
    """Return the strongly connected components of more than one node (Tarjan, without recursion).

    R. E. Tarjan, Depth-first search and linear graph algorithms, 1972.
    """
    number: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    held: set[int] = set()
    parts: list[list[int]] = []
    for root in edges:
        if root in number:
            continue
        path = [(root, 0)]
        while path:
            node, at = path.pop()
            if at == 0:
                number[node] = low[node] = len(number)
                stack.append(node)
                held.add(node)
            targets = edges.get(node, ())
            if at > 0:
                low[node] = min(low[node], low[targets[at - 1]])
            while at < len(targets):
                target = targets[at]
                at += 1
                if target not in number:
                    path += [(node, at), (target, 0)]
                    break
                if target in held:
                    low[node] = min(low[node], number[target])
            else:
                _close(node, number, low, stack, held, parts)
    return parts


def _close(
    node: int,
    number: Mapping[int, int],
    low: Mapping[int, int],
    stack: list[int],
    held: set[int],
    parts: list[list[int]],
) -> None:
    """Take a finished component off the stack."""
    if low[node] != number[node]:
        return
    part = []
    while True:
        top = stack.pop()
        held.discard(top)
        part.append(top)
        if top == node:
            break
    if len(part) > 1:
        parts.append(part)
