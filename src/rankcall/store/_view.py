"""Who is here, and where: all words, but only the parts of the roster that are needed.

The words of a world are small. Its roster is not, and every rank that times out reads at the same
moment: so hosts are looked up for the missing, and no more than the store can send to all within
part of a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rankcall.store import _roster, _words
from rankcall.store._keys import Keys
from rankcall.store._link import Link
from rankcall.store._roster import Claim, Roster

__all__ = ["View", "look", "open_worlds", "other_worlds"]

_READ_IN_ALL = 60_000  # parts of rosters, some 2 kB each, that all ranks together may read
_LEAST = 4


@dataclass(frozen=True)
class View:
    """Who is here at one moment. ``roster`` holds who was looked up."""

    missing: Sequence[int]
    roster: Roster
    orderly: bool  # nobody's additions that do not belong are in the words

    @property
    def complete(self) -> bool:
        """Whether all have arrived, beyond doubt."""
        return self.orderly and not self.missing


def look(link: Link, keys: Keys, generation: int) -> View:
    """See who is here."""
    size = keys.world_size
    words = link.counters(keys.words)
    missing = _words.missing(words, size, generation)
    if missing or generation:
        log = link.read_logs(_worth_reading(keys, words, missing))
    else:  # claims made twice can make the words of the first generation look full
        log, words = link.snapshot(keys.rosters, keys.words)
        missing = _words.missing(words, size, generation)
    roster = _roster.read(log, size)
    disturbed = any(_words.disturbed(value, at, size, generation) for at, value in words.items())
    return View(missing, roster, not disturbed and not roster.twice)


def _worth_reading(keys: Keys, words: Mapping[int, int], missing: Sequence[int]) -> list[str]:
    """Return the rosters of the missing that have been here, then those of others."""
    most = max(_LEAST, _READ_IN_ALL // keys.world_size)
    rosters = keys.rosters
    if len(rosters) <= most:
        return rosters
    known = {
        _words.place(rank)[0]: None
        for rank in missing
        if _words.is_claimed(words.get(_words.place(rank)[0], 0), rank)
    }
    return [rosters[word] for word in list(known)[:most]]


def other_worlds(keys: Keys, said: str) -> list[Keys]:
    """Return the worlds of other sizes that processes have come with, as the store says."""
    sizes = [int(each) for each in said.split(",") if each.isdecimal()]
    return [keys.of_world(size) for size in sizes if size != keys.world_size]


def open_worlds(link: Link, keys: Keys) -> list[Claim]:
    """Return the claims of those who wait just now in a world of another size."""
    claims: list[Claim] = []
    for world in other_worlds(keys, (link.read(keys.sizes) or b"").decode()):
        words = link.counters(world.words)
        if _words.is_open(words, world.world_size):
            claims += _roster.read(
                link.read_logs(_worth_reading(world, words, range(world.world_size))),
                world.world_size,
            ).claims
    return claims
