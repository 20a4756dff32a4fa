"""The waits of a job, by who is in them and who is not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rankcall.analysis.hang.waits import Wait


class Graph:
    """Who waits for whom, followed in both directions."""

    def __init__(self, waits: Sequence[Wait], blind: Collection[int] = ()) -> None:
        self.waits = waits
        if blind:
            for wait in waits:
                _presume(wait, blind)
        self.in_wait: dict[int, list[Wait]] = {}
        self.without: dict[int, list[Wait]] = {}
        for wait in waits:
            for rank in [*wait.waiters, *wait.presumed]:
                self.in_wait.setdefault(rank, []).append(wait)
            for rank in wait.absent:
                self.without.setdefault(rank, []).append(wait)

    def blocked(self, rank: int) -> bool:
        """Tell whether a rank waits for somebody itself."""
        return rank in self.in_wait

    def joined(self, rank: int) -> list[Wait]:
        """Return the waits that a rank is in, or has been in and left before the others could."""
        return [wait for wait in self.waits if rank in wait.present]

    def reach(self, waits: Iterable[Wait]) -> list[Wait]:
        """Return some waits, those for the ranks in them, and so on."""
        todo = list(waits)
        found = {id(wait): wait for wait in todo}
        seen: set[int] = set()
        while todo:
            wait = todo.pop()
            for rank in [*wait.waiters, *wait.presumed]:
                if rank not in seen:
                    seen.add(rank)
                    fresh = [w for w in self.without.get(rank, ()) if id(w) not in found]
                    found.update((id(each), each) for each in fresh)
                    todo += fresh
        return list(found.values())

    def victims(self, waits: Iterable[Wait]) -> set[int]:
        """Return who is in some waits, and who waits for those, and so on."""
        return {rank for wait in self.reach(waits) for rank in wait.waiters}


def _presume(wait: Wait, blind: Collection[int]) -> None:
    """Take ranks of which nothing is known for victims where a known one has not come."""
    unseen = [rank for rank in wait.absent if rank in blind]
    if unseen and len(unseen) < len(wait.absent) and not wait.any_source:
        wait.absent = [rank for rank in wait.absent if rank not in blind]
        wait.presumed = unseen
