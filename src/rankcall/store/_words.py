"""Arrivals as bits in 62-bit counters, so that one ``add`` arrives and tells who else is here.

A word holds up to 31 ranks. Its low 31 bits are arrivals, its high 31 bits say which ranks have
ever been claimed. An arrival sets the rank's bit in even generations and clears it in odd ones, so
the same words serve all generations and never have to be reset. Pure arithmetic; no store.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "BITS", "arrival", "begun", "claim", "disturbed", "full", "is_claimed", "is_open", "mask",
    "missing", "place", "was_in", "word_count",
]  # fmt: skip

BITS = 31  # arrivals and claims of a word together stay below 2**62: no sum of them wraps
_LOW = (1 << BITS) - 1
_ALL = (1 << 64) - 1


def word_count(world_size: int) -> int:
    """Return how many words hold a world."""
    return -(-world_size // BITS)


def place(rank: int) -> tuple[int, int]:
    """Return the word of a rank and its bit within it."""
    return divmod(rank, BITS)


def mask(word: int, world_size: int) -> int:
    """Return the bits of a word that stand for ranks."""
    return (1 << min(BITS, world_size - word * BITS)) - 1


def arrival(rank: int, generation: int) -> int:
    """Return what to add for an arrival."""
    bit = 1 << (rank % BITS)
    return -bit if generation & 1 else bit


def claim(rank: int) -> int:
    """Return what to add to say, once, that this rank has a process."""
    return 1 << (rank % BITS + BITS)


def was_in(before: int, rank: int, generation: int) -> bool:
    """Whether ``before`` held the rank's arrival in that generation already."""
    return bool(before >> (rank % BITS) & 1) != bool(generation & 1)


def is_claimed(value: int, rank: int) -> bool:
    """Whether a process has claimed the rank."""
    return bool(value >> (rank % BITS + BITS) & 1)


def disturbed(value: int, word: int, world_size: int, generation: int) -> bool:
    """Whether somebody's additions that do not belong are in the word just now.

    After the first generation every rank is claimed, exactly once. A process that claims a rank
    once more adds to the high bits before it finds out, and takes it away again.
    """
    return generation > 0 and (value & _ALL) >> BITS != mask(word, world_size)


def full(value: int, word: int, world_size: int, generation: int) -> bool:
    """Whether all ranks of the word have arrived in this generation."""
    target = 0 if generation & 1 else mask(word, world_size)
    claimed = (value & _ALL) >> BITS == mask(word, world_size)
    return claimed and value & _LOW == target


def missing(words: Mapping[int, int], world_size: int, generation: int) -> list[int]:
    """Return the ranks that have not arrived; a word that is absent holds nobody.

    A word at a time: every rank that times out asks, all at the same moment.
    """
    found = []
    for word in range(word_count(world_size)):
        value, ranks = words.get(word, 0), mask(word, world_size)
        arrived = value ^ (_LOW if generation & 1 else 0)
        absent = ranks & ~(arrived & value >> BITS)
        while absent:
            lowest = absent & -absent
            found.append(word * BITS + lowest.bit_length() - 1)
            absent ^= lowest
    return found


def begun(words: Mapping[int, int], world_size: int) -> bool:
    """Whether some ranks have a process and others have never had one."""
    claimed = sum((value & _ALL).bit_count() for value in (words[at] >> BITS for at in words))
    return 0 < claimed < world_size


def is_open(words: Mapping[int, int], world_size: int) -> bool:
    """Whether some have arrived that others have not followed yet, in whichever generation."""
    here = [words.get(rank // BITS, 0) >> (rank % BITS) & 1 for rank in range(world_size)]
    return len(set(here)) > 1
