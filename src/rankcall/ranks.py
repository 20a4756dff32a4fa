"""Lists of ranks: as people write them (``0-3,8,10-11``), and in a compact form for files."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

# Of a world. A file that claims more is damaged or forged: without a bound, a few bytes of it could
# expand to any amount of memory.
MAX_RANKS = 1 << 20


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks in ascending order and without repetition, with runs of them as ranges."""
    ranges: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def with_noun(ranks: Iterable[int]) -> str:
    """Return ranks with their noun: ``rank 2``, ``ranks 0-3``, ``ranks 0 and 2``."""
    ranks = set(ranks)
    if len(ranks) == 2 and max(ranks) - min(ranks) > 1:
        return f"ranks {min(ranks)} and {max(ranks)}"
    return f"rank{'' if len(ranks) == 1 else 's'} {format_ranks(ranks)}"


def compress_ranks(ranks: list[int]) -> list[list[int]]:
    """Return ranks as runs ``[first, count, stride]``. A world of 100,000 ranks is one run."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs:
            run = runs[-1]
            first, count, stride = run
            if count == 1:
                run[1:] = [2, rank - first]
                continue
            if rank == first + count * stride:
                run[1] += 1
                continue
        runs.append([rank, 1, 1])
    return runs


def count_ranks(runs: list[list[int]]) -> int:
    """Return how many ranks runs stand for, before any memory is taken for them.

    Raises ``ValueError`` if they cannot be the ranks of a group.
    """
    total = 0
    for first, count, stride in runs:
        if not (type(first) is type(count) is type(stride) is int):
            raise ValueError("a rank is an integer")
        if count > 1 and not stride:
            raise ValueError("a group lists a rank more than once")
        total += count
        # Each run by itself: the numbers of a hostile one have any number of digits.
        if not 0 <= count <= total <= MAX_RANKS:
            raise ValueError(f"more than {MAX_RANKS:,} ranks, or a negative number of them")
        last = first + max(0, count - 1) * stride
        if not (0 <= first < MAX_RANKS and 0 <= last < MAX_RANKS):
            raise ValueError(f"a rank is less than 0 or more than {MAX_RANKS:,}")
    return total


def expand_ranks(runs: list[list[int]]) -> tuple[int, ...]:
    """Undo ``compress_ranks``.

    Raises ``ValueError`` as ``count_ranks`` does, and if a rank is there more than once.
    """
    count_ranks(runs)
    ranks = tuple(
        chain.from_iterable(
            range(first, first + count * stride, stride) if count > 1 else [first] * count
            for first, count, stride in runs
        )
    )
    if len(runs) > 1 and len(set(ranks)) < len(ranks):  # one run has each of its ranks once
        raise ValueError("a group lists a rank more than once")
    return ranks
