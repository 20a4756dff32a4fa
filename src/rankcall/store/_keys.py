"""The keys of one prefix, which all begin with ``{prefix}/rankcall.``, and the counters.

Arrivals are counts in 62-bit counters: one ``add`` arrives and tells which ranks are there. A
counter, called a word, has two bits for each of its 31 ranks. A rank that arrives adds 1 to its two
bits. It adds more than once only if the answer to an addition was lost, and never more than
``MOST_ADDITIONS`` times, so nothing is ever carried into the bits of another rank.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

BARRIER, EXCHANGE, GET_ALL, CLEAN_UP = "b", "s", "g", "c"
RANKS = 31  # in a word: two bits each stay below 2**62
MOST_ADDITIONS = 3  # of one rank to one word
_LOW_BITS = sum(1 << 2 * position for position in range(RANKS))
_CLAIM = "claim"


def attempt_of_this_process() -> int:
    """Return the elastic attempt: torchrun's restart count, or 0."""
    text = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(text) if text.isdecimal() else 0


@dataclass(frozen=True)
class Keys:
    """The keys of one world under one prefix.

    ``ranks_per_word`` is smaller in tests, so that a small world has several words. If ``appends``
    is false, the store cannot append, and every rank has a key of its own instead.
    """

    prefix: str
    attempt: int
    world_size: int
    appends: bool = True
    ranks_per_word: int = RANKS

    @cached_property
    def base(self) -> str:
        """The beginning of all keys of this attempt."""
        return f"{self.prefix}/rankcall.{self.attempt}/"

    @cached_property
    def register(self) -> str:
        """The world sizes with which ranks have arrived, and the processes that were rejected."""
        return f"{self.base}register"

    @cached_property
    def word_count(self) -> int:
        """How many counters hold the arrivals of one generation."""
        return -(-self.world_size // self.ranks_per_word)

    def full_value(self, word: int) -> int:
        """Return the value of a word to which each of its ranks has added once."""
        return self._full_values[0 if word < self.word_count - 1 else 1]

    @cached_property
    def _full_values(self) -> tuple[int, int]:
        last = self.world_size - (self.word_count - 1) * self.ranks_per_word
        low = [sum(1 << 2 * place for place in range(size)) for size in (self.ranks_per_word, last)]
        return low[0], low[1]

    @cached_property
    def _sized(self) -> str:
        return f"{self.base}{self.world_size}/"

    def claim(self, rank: int) -> str:
        """The process that is this rank."""
        return f"{self._sized}{_CLAIM}{rank}"

    def word(self, kind: str, number: int, word: int) -> str:
        """One counter of arrivals of a generation."""
        return f"{self._sized}{kind}{number}/w{word}"

    def words(self, kind: str, number: int) -> list[str]:
        """All counters of arrivals of a generation."""
        start = f"{self._sized}{kind}{number}/w"
        return [f"{start}{word}" for word in range(self.word_count)]

    def full(self, kind: str, number: int) -> str:
        """The counter of the words of a generation that are full, if there are several words."""
        return f"{self._sized}{kind}{number}/full"

    def release(self, kind: str, number: int) -> str:
        """The key for which all ranks of a generation wait.

        In an exchange, the key that holds the data of all. Else the first counter of the next
        generation: so a barrier needs no key besides its counters.
        """
        if kind == EXCHANGE:
            return f"{self._sized}{kind}{number}/done"
        return f"{self._sized}{kind}{number + 1}/w0"

    def data(self, number: int) -> str:
        """The log of the data that the ranks of an exchange hand in."""
        return f"{self._sized}{EXCHANGE}{number}/data"

    def left(self, kind: str, number: int) -> str:
        """The log of the ranks that have read all they need."""
        return f"{self._sized}{kind}{number}/left"

    @property
    def tickets(self) -> str:
        """The counter of those that come without a rank."""
        return f"{self._sized}tickets"

    def passed(self, generation: int) -> str:
        """The key for which those without a rank wait."""
        return f"{self._sized}t{generation}/passed"

    def answer(self, rank: int) -> str:
        """The answer of a rank to a roll call."""
        return f"{self._sized}answer{rank}"

    def parts(self, key: str, ranks: Iterable[int]) -> list[str]:
        """The keys of single ranks below a key, on a store that cannot append."""
        return [f"{key}/{rank}" for rank in ranks]

    def newest_generation(self, kind: str, listed: Iterable[str]) -> int | None:
        """Return the last generation that has a word among these keys."""
        pattern = re.compile(re.escape(self._sized + kind) + r"(\d+)/w\d+")
        matches = (pattern.fullmatch(key) for key in listed)
        return max((int(match.group(1)) for match in matches if match), default=None)

    def of_size(self, world_size: int) -> Keys:
        """Return the keys of a world of another size."""
        return Keys(self.prefix, self.attempt, world_size, self.appends, self.ranks_per_word)

    def ours(self, listed: Sequence[str], attempts_below: int | None = None) -> list[str]:
        """Return the keys that this package made under the prefix; claims are last."""
        pattern = re.compile(re.escape(self.prefix) + r"/rankcall\.(\d+)/")
        own_keys = []
        for key in listed:
            match = pattern.match(key)
            if match and (attempts_below is None or int(match.group(1)) < attempts_below):
                own_keys.append(key)
        return sorted(own_keys, key=is_claim)


def is_claim(key: str) -> bool:
    """Return whether a key of ours holds a claim."""
    return key.rpartition("/")[2].startswith(_CLAIM)


@lru_cache(maxsize=4096)
def keys_of(prefix: str, attempt: int, world_size: int, appends: bool) -> Keys:
    """Return the keys of a world; made once while they are in use."""
    if attempt < 0:
        raise ValueError(f"attempt counts restarts from 0; got {attempt}")
    return Keys(prefix, attempt, world_size, appends)


def counter(text: bytes | None) -> int:
    """Return the number of a counter; see ``_let_pass`` for what may follow it."""
    return int(text.split()[0]) if text else 0


def arrival(rank: int, ranks: int = RANKS) -> int:
    """Return the number that a rank adds to its word to arrive."""
    return 1 << 2 * (rank % ranks)


def arrivals(value: int, rank: int, ranks: int = RANKS) -> int:
    """Return how often a rank has added to its word."""
    return value >> 2 * (rank % ranks) & 3


def is_full(value: int, word: int, world_size: int, ranks: int = RANKS) -> bool:
    """Return whether all ranks of a word have arrived."""
    expected = _LOW_BITS & ((1 << 2 * min(ranks, world_size - word * ranks)) - 1)
    return (value | value >> 1) & expected == expected


def missing_ranks(
    words: Sequence[bytes | None], world_size: int, ranks: int = RANKS
) -> tuple[int, ...]:
    """Return the ranks that have not arrived, sorted. An absent word holds no arrival."""
    missing: list[int] = []
    for word, text in enumerate(words):
        value = counter(text)
        first = word * ranks
        if not is_full(value, word, world_size, ranks):
            last = min(first + ranks, world_size)
            missing += [rank for rank in range(first, last) if not arrivals(value, rank, ranks)]
    return tuple(missing)
