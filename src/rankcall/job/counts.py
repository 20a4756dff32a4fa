"""Counters in the job's store, which any process that reaches the store may have raised.

A counter says how many entries nodes have made, and a reader looks for each of them. So it has a
bound by the number of ranks of the job. Without one, a reader made a list as long as any number
that somebody had written, which took gigabytes.
"""

from __future__ import annotations

from rankcall.job.sealing import ForgedError
from rankcall.whole_numbers import whole_number


def checked_count(key: str, count: int | None, most: int) -> int:
    """Return a counter. Raises ``ForgedError`` if ranks cannot have counted so far.

    A counter that is too large is not taken for ``most``: what ranks count from there on has
    numbers that no rank would look for.
    """
    if count is None or not 0 <= count <= most:
        raise ForgedError(f"{key} is not a number up to {most:,}")
    return count


def most_entries(world_size: int) -> int:
    """Return how many entries the nodes of a job can make for one purpose.

    Each rank can be the leader of its node, and a request whose answer was lost is made again.
    """
    return 4 * max(0, world_size) + 64


def newest_entries(count: bytes | None, world_size: int, after: int = 0) -> range:
    """Return the numbers of the newest entries that a counter counts, those of ``after`` left out.

    A node registers again whenever its ranks change, so there is no largest number.
    """
    last = whole_number(count) or 0
    return range(max(after, last - most_entries(world_size)) + 1, last + 1)
