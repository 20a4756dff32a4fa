"""Find out which ranks are on other hosts.

torchrun's variables say it. Without torchrun, ranks announce their host names through the store.
The number of devices on a host is never used: it is wrong for jobs on the CPU, for hosts of
different sizes and for GPUs that are divided between jobs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

_ASK_AGAIN_SECONDS = 0.2

Lookup = Callable[[Iterable[int]], dict[int, str]]


def ranks_of_this_node() -> range | None:
    """Return the ranks of this torchrun agent, which are consecutive; None without torchrun."""
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    numbers = [os.environ.get(name, "") for name in names]
    if not all(number.isdigit() for number in numbers):
        return None
    rank, local_rank, local_size, _ = map(int, numbers)
    return range(rank - local_rank, rank - local_rank + local_size)


class Hosts:
    """Answers whether a group crosses hosts; looks each group and rank up once.

    ``lookup`` returns the hosts of those ranks that have announced theirs. A rank that has not
    counts as being on another host: a surplus description is better than a missing one.
    """

    def __init__(
        self,
        here: range | None,
        host: str,
        lookup: Lookup,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._not_before = 0.0
        self._here = here
        self._host = host
        self._lookup = lookup
        self._hosts: dict[int, str] = {}
        self._crossing: dict[tuple[int, ...], bool] = {}

    def crosses(self, ranks: tuple[int, ...]) -> bool:
        """Tell whether a group of this rank has members on more than one host."""
        known = self._crossing.get(ranks)
        if known is None:
            known = any(self.is_elsewhere(rank) for rank in ranks) or not ranks
            if self._here is not None or all(rank in self._hosts for rank in ranks):
                self._crossing[ranks] = known
        return known

    def is_elsewhere(self, rank: int) -> bool:
        """Tell whether a rank is on another host."""
        if self._here is not None:
            return rank not in self._here
        if rank not in self._hosts and self._clock() >= self._not_before:
            self._hosts.update(self._lookup([rank]))
            if rank not in self._hosts:
                self._not_before = self._clock() + _ASK_AGAIN_SECONDS
        return self._hosts.get(rank) != self._host
