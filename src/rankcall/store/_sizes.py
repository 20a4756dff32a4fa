"""Worlds of different sizes under one prefix: told as soon as the second one shows.

Whoever has arrived for the first time, and is going to wait, writes down its world's size. Where
another size stands there already, whose world has begun and never come together, these processes
mean one barrier and will never meet. The one that finds out says so among the strays, wakes those
who wait, and raises; they look among the strays and raise as well. A world that did come together
is no reason (a job that went on with fewer ranks), nor one that this process was in itself, nor
one whose processes are all gone.
"""

from __future__ import annotations

from collections.abc import Sequence

from rankcall.store import _messages, _roster, _words
from rankcall.store._keys import Keys
from rankcall.store._link import Link
from rankcall.store._roster import Claim
from rankcall.store._view import other_worlds

__all__ = ["CALLED_OFF", "agree", "heed", "strays"]

CALLED_OFF = b"!"  # in place of what is waited for, in the first generation


def agree(link: Link, keys: Keys, mine: Claim, told: set[str], what: str | None) -> None:
    """Say which world this process means.

    Raises ``WorldMismatch`` where others wait in another one.
    """
    claims: list[Claim] = []
    for world in other_worlds(keys, _say(link, keys)):
        found = _waiting(link, world, mine)
        if found:
            claims += found
            link.append(keys.strays, mine.line("?"))
            for key in (world.done(0), world.passed(0)):
                link.set_first(key, CALLED_OFF.decode())
    told.update(one.nonce for one in claims)
    if claims:
        raise _messages.worlds_differ(keys, mine.rank, [mine, *claims], what)


def _say(link: Link, keys: Keys) -> str:
    mine = str(keys.world_size)
    before, wanted = "", mine
    while (said := link.replace(keys.sizes, before, wanted)) != wanted:
        if mine in said.split(","):
            break
        before, wanted = said, f"{mine},{said}"
    return said


def _waiting(link: Link, world: Keys, mine: Claim) -> list[Claim]:
    """Return who has begun to come together in a world, and means the same as this process."""
    words, size = link.counters(world.words), world.world_size
    drawn = link.add(world.tickets, 0) if link.check([world.tickets]) else 0
    if not _words.begun(words, size) and not 0 < drawn < size:
        return []
    word = min(max(mine.rank, 0) // _words.BITS, len(world.rosters) - 1)
    claims = _roster.read(link.read_logs(world.rosters[word:][:4]), size).claims
    if any(one.process == mine.process for one in claims) or all(one.gone for one in claims):
        return []
    return list(claims)


def strays(link: Link, keys: Keys, sign: str) -> list[Claim]:
    """Return those who did not belong: ``!`` to their rank, ``?`` to the other worlds."""
    return [one for each, one in _roster.signed(link.read_log(keys.strays)) if each == sign]


def heed(
    link: Link, keys: Keys, mine: Claim, here: Sequence[Claim], told: set[str], what: str | None
) -> None:
    """Raise ``WorldMismatch``, once for each who came from a world of another size."""
    found = [one for one in strays(link, keys, "?") if one.world_size != keys.world_size]
    news = [one for one in found if one.nonce not in told]
    told.update(one.nonce for one in news)
    if news:
        rest = [one for one in here if one.nonce != mine.nonce]
        raise _messages.worlds_differ(keys, mine.rank, [mine, *rest, *news], what)
