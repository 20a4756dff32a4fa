"""The names of the keys of one prefix. All of ours begin with ``{prefix}/rankcall.``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from rankcall.store import _words

__all__ = ["Keys", "attempt_of", "keys_of"]


def attempt_of(attempt: int | None) -> int:
    """Return the elastic attempt: as given, or torchrun's restart count, or 0."""
    if attempt is None:
        text = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return int(text) if text.isdecimal() else 0
    if attempt < 0:
        raise ValueError(f"attempt counts restarts from 0; got {attempt}")
    return attempt


@dataclass(frozen=True)
class Keys:
    """``kind`` keeps a barrier, an exchange and others under one prefix apart."""

    prefix: str
    kind: str
    attempt: int
    world_size: int

    @cached_property
    def base(self) -> str:
        """What all of them begin with, whatever the world's size."""
        return f"{self.prefix}/rankcall.{self.kind}{self.attempt}/"

    @cached_property
    def _sized(self) -> str:
        return f"{self.base}{self.world_size}/"

    @cached_property
    def sizes(self) -> str:
        """The world sizes that processes came with, the newest first."""
        return f"{self.base}sizes"

    @cached_property
    def strays(self) -> str:
        """The log of processes that did not belong: their rank was another's, or their world."""
        return f"{self.base}strays"

    @cached_property
    def rosters(self) -> list[str]:
        """The logs of who claimed which rank, a word's ranks each."""
        count = _words.word_count(self.world_size)
        return [f"{self._sized}who{word}" for word in range(count)]

    @cached_property
    def words(self) -> list[str]:
        """The counters that hold the arrivals."""
        count = _words.word_count(self.world_size)
        return [f"{self._sized}w{word}" for word in range(count)]

    def done(self, generation: int) -> str:
        """What is waited on."""
        return f"{self._sized}done{generation}"

    def newest_done(self, listed: Iterable[str]) -> int:
        """Return the last generation that is complete, by the keys there are; -1: none is."""
        begin = self.done(0)[:-1]
        ends = (key.removeprefix(begin) for key in listed if key.startswith(begin))
        return max((int(end) for end in ends if end.isdecimal()), default=-1)

    def count(self, generation: int) -> str:
        """How many words are full."""
        return f"{self._sized}n{generation}"

    def data(self, generation: int) -> str:
        """The log of what the ranks hand in."""
        return f"{self._sized}data{generation}"

    def left(self, generation: int) -> str:
        """The log of who has read everything."""
        return f"{self._sized}left{generation}"

    @property
    def tickets(self) -> str:
        """The counter of those who came without a rank."""
        return f"{self._sized}tickets"

    def passed(self, generation: int) -> str:
        """What those without a rank wait for."""
        return f"{self._sized}passed{generation}"

    def of_kind(self, kind: str) -> Keys:
        """Return the same keys for another kind of meeting."""
        return keys_of(self.prefix, kind, self.attempt, self.world_size)

    def of_world(self, world_size: int) -> Keys:
        """Return the same keys for a world of another size."""
        return keys_of(self.prefix, self.kind, self.attempt, world_size)


@lru_cache(maxsize=4096)
def keys_of(prefix: str, kind: str, attempt: int, world_size: int) -> Keys:
    """Return the keys of a prefix, made once while it is in use."""
    return Keys(prefix, kind, attempt, world_size)
