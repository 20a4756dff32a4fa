"""The keys of one prefix, which all begin with ``{prefix}/rankcall.``, and what a log holds."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from rankcall.whole_numbers import whole_number

BARRIER, EXCHANGE, GET_ALL, CLEAN_UP = "b", "s", "g", "c"
_CLAIM = "claim"


def attempt_of_this_process() -> int:
    """Return the elastic attempt: torchrun's restart count, or 0."""
    return whole_number(os.environ.get("TORCHELASTIC_RESTART_COUNT")) or 0


@dataclass(frozen=True)
class Keys:
    """The keys of one world under one prefix.

    If ``appends`` is false, the store cannot append, and every rank has a key of its own for its
    part of a log. ``counts`` says whether the store takes ``Arrive``.
    """

    prefix: str
    attempt: int
    world_size: int
    appends: bool = True
    counts: bool = True

    @cached_property
    def base(self) -> str:
        """The beginning of all keys of this attempt."""
        return f"{self.prefix}/rankcall.{self.attempt}/"

    @cached_property
    def register(self) -> str:
        """The world sizes with which ranks have come, and the processes that were rejected."""
        return f"{self.base}register"

    @cached_property
    def _sized(self) -> str:
        return f"{self.base}{self.world_size}/"

    @cached_property
    def all_ranks(self) -> frozenset[int]:
        """All ranks of the world."""
        return frozenset(range(self.world_size))

    def claim(self, rank: int) -> str:
        """The process that is this rank."""
        return f"{self._sized}{_CLAIM}{rank}"

    def log(self, kind: str, number: int) -> str:
        """The log of the ranks that have arrived in a generation."""
        return f"{self._sized}{kind}{number}/log"

    def turnstile(self, kind: str, number: int) -> str:
        """The key at which ranks wait with ``Arrive``. Other requests may only let them pass."""
        return f"{self._sized}{kind}{number}/in"

    def count(self, kind: str, number: int) -> str:
        """The counter of the ranks that have arrived, if the store does not take ``Arrive``."""
        return f"{self._sized}{kind}{number}/count"

    def release(self, kind: str, number: int) -> str:
        """The key for which all wait, if the store does not take ``Arrive``."""
        return f"{self._sized}{kind}{number}/go"

    def data(self, number: int) -> str:
        """The log of the data that the ranks of an exchange hand in."""
        return f"{self._sized}{EXCHANGE}{number}/data"

    def left(self, kind: str, number: int) -> str:
        """The log of the ranks that have read all they need."""
        return f"{self._sized}{kind}{number}/left"

    def to_remove(self, kind: str, number: int, rank: int) -> list[str]:
        """Return the keys that a rank removes when it has passed a generation.

        In every second generation, the ranks remove the keys of the two before it, each rank one
        key if there are enough ranks: a removal is a round trip of one rank, for which all others
        wait at the next barrier. With 16 ranks this was worth 4 % of a barrier. The last rank
        begins, because rank 0 has to wait for the others after an exchange.
        """
        if number % 2 == 0:
            return []
        parts = self._parts[kind]
        first, step = (self.world_size - 1 - rank, self.world_size) if self.appends else (0, 1)
        removed = len(parts) * min(number, 2)  # keys of two generations, and of one at first
        if first >= removed:
            return []  # most ranks of a large world: no key is put together for them
        keys = []
        for index in range(first, removed, step):
            back, part = divmod(index, len(parts))
            keys.append(f"{self._sized}{kind}{number - 1 - back}/{parts[part]}")
        return keys if self.appends else [f"{key}/{rank}" for key in keys]

    @cached_property
    def _parts(self) -> dict[str, tuple[str, ...]]:
        """How the keys of a generation end, by the kind of call."""
        waited = () if not self.appends else ("in",) if self.counts else ("count", "go")
        return {BARRIER: ("log", *waited), EXCHANGE: ("log", *waited, "data", "left")}

    @property
    def tickets(self) -> str:
        """The counter of those that come without a rank."""
        return f"{self._sized}tickets"

    def passed(self, generation: int) -> str:
        """The key for which those without a rank wait."""
        return f"{self._sized}t{generation}/passed"

    def passers(self, generation: int) -> str:
        """A byte for each of those without a rank that makes no more requests."""
        return f"{self._sized}t{generation}/left"

    def answer(self, rank: int) -> str:
        """The answer of a rank to a roll call."""
        return f"{self._sized}answer{rank}"

    def parts(self, key: str, ranks: Iterable[int]) -> list[str]:
        """The keys of single ranks below a key, on a store that cannot append."""
        return [f"{key}/{rank}" for rank in ranks]

    def is_full(self, log: bytes | None) -> bool:
        """Return whether a log names all ranks."""
        # The lines first: to count them is cheap, and a thousand ranks poll a log of as many lines.
        return log is not None and log.count(b"\n") >= self.world_size and not self.missing(log)

    def missing(self, log: bytes | None) -> tuple[int, ...]:
        """Return the ranks that a log does not name, sorted."""
        return tuple(sorted(self.all_ranks - ranks_in(log)))

    def newest_generation(self, kind: str, listed: Iterable[str]) -> int | None:
        """Return the last generation that has a log among these keys."""
        pattern = re.compile(re.escape(self._sized + kind) + r"([0-9]+)/log(/[0-9]+)?")
        matches = (pattern.fullmatch(key) for key in listed)
        numbers = (whole_number(match.group(1)) for match in matches if match)
        return max((number for number in numbers if number is not None), default=None)

    def of_size(self, world_size: int) -> Keys:
        """Return the keys of a world of another size."""
        return Keys(self.prefix, self.attempt, world_size, self.appends, self.counts)

    def ours(self, listed: Sequence[str], attempts_below: int | None = None) -> list[str]:
        """Return the keys that this package made under the prefix; claims are last."""
        pattern = re.compile(re.escape(self.prefix) + r"/rankcall\.([0-9]+)/")
        own_keys = []
        for key in listed:
            match = pattern.match(key)
            attempt = whole_number(match.group(1)) if match else None
            if attempt is not None and (attempts_below is None or attempt < attempts_below):
                own_keys.append(key)
        return sorted(own_keys, key=is_claim)


def is_claim(key: str) -> bool:
    """Return whether a key of ours holds a claim."""
    return key.rpartition("/")[2].startswith(_CLAIM)


def line_of(rank: int) -> bytes:
    """Return the line of a rank in a log."""
    return b"%d\n" % rank


def begins_to_ask(rank: int) -> bytes:
    """Return what a rank adds to a log if it makes requests after the last rank has arrived.

    It has arrived, or arrives with the same request. So ``ranks_in`` takes it for an arrival.
    """
    return b"+%d\n" % rank


def ends_to_ask(rank: int) -> bytes:
    """Return what this rank adds when it makes no more requests; no rank has a negative number."""
    return b"-%d\n" % rank


def is_asked(log: bytes | None) -> bool:
    """Return whether a rank that makes requests after the last arrival has not ended to."""
    marks = (log or b"").split()
    begun = {mark[1:] for mark in marks if mark.startswith(b"+")}
    return not begun.issubset(mark[1:] for mark in marks if mark.startswith(b"-"))


def ranks_in(log: bytes | None) -> set[int]:
    """Return the ranks that a log names."""
    return set(map(int, (log or b"").split()))
