"""Deadlocks: ranks that wait for each other in a circle."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rankcall.analysis.hang.waits import Wait

Edges = Mapping[int, Sequence[int]]


@dataclass(frozen=True)
class Cycle:
    """Ranks that wait for each other, and the waits that they are in."""

    ranks: tuple[int, ...]
    waits: tuple[Wait, ...]


def cycles(waits: Sequence[Wait], halted: Collection[int]) -> list[Cycle]:
    """Return every circle of ranks that wait for each other.

    ``halted`` are dead or stopped: what they were in when that came is not why they do not go on.
    """
    waiting = {rank for wait in waits for rank in wait.waiters if rank not in halted}
    mine: dict[int, list[int]] = {}  # rank -> waits it is in
    for number, wait in enumerate(waits):
        for rank in waiting.intersection(wait.waiters):
            mine.setdefault(rank, []).append(number)
    # One would do of those that a receive from any source waits for; only the last one is needed.
    certain = [
        [] if wait.any_source and len(wait.absent) > 1 else [r for r in wait.absent if r in waiting]
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


def components(edges: Edges) -> list[list[int]]:
    """Return the strongly connected components of more than one node (Tarjan, without recursion).

    R. E. Tarjan, Depth-first search and linear graph algorithms, 1972.
    """
    number: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    held: set[int] = set()
    found: list[list[int]] = []
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
                _close(node, number, low, stack, held, found)
    return found


def _close(
    node: int,
    number: Mapping[int, int],
    low: Mapping[int, int],
    stack: list[int],
    held: set[int],
    found: list[list[int]],
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
        found.append(part)
