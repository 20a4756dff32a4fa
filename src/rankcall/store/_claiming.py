"""Take a rank's place in its word: one process for each rank, or a second one is told.

A process signs the roster, then adds its claim with its first arrival. Where the place was taken,
it takes the addition back and reads who has it: another process, and it must not be this rank; or
one that has ended, on this machine, and it goes on in its place. Of two, who signed first has it:
the word alone cannot tell where several additions that do not belong are in it at once, as when a
whole second job comes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rankcall.errors import WorldMismatch
from rankcall.store import _messages, _roster, _words
from rankcall.store._keys import Keys
from rankcall.store._link import Link
from rankcall.store._member import Member
from rankcall.store._roster import Claim
from rankcall.store._sizes import CALLED_OFF

__all__ = ["AGAIN_S", "put"]

AGAIN_S = 0.01


def put(
    link: Link,
    keys: Keys,
    rank: int,
    member: Member,
    deadline: float,
    what: str | None,
    arriving: bool,
) -> int | None:
    """Add this rank's claim, if it is the first time, and its arrival; return its word.

    None where the process that this one replaces had arrived already. Raises ``WorldMismatch``
    where another process is this rank.
    """
    word, _ = _words.place(rank)
    if not member.claimed:
        link.append(keys.rosters[word], member.claim.line())  # twice counts once
    while not (arriving and member.arrived):
        delta = _words.arrival(rank, member.generation) if arriving else 0
        if not member.claimed:
            delta += _words.claim(rank)
        before, member.unsure = member.unsure, True
        value = link.add(keys.words[word], delta)
        member.unsure = False
        free = _fits(value - delta, rank, member)
        first = member.claimed or not _preceding(_rivals(link, keys, rank, member), member)
        if not (free and first):
            value = link.add(keys.words[word], -delta)
        if first and (free or before):  # or it was taken by this process, which had no answer
            member.claimed = True
            member.arrived = arriving
            return value
        if member.claimed or not _displace(link, keys, rank, member, what):
            _pause(keys, rank, deadline)
        elif not arriving:
            return value
    return None


def _fits(before: int, rank: int, member: Member) -> bool:
    """Whether the rank's place was free."""
    if not member.claimed and _words.is_claimed(before, rank):
        return False
    return not _words.was_in(before, rank, member.generation)


def _displace(link: Link, keys: Keys, rank: int, member: Member, what: str | None) -> bool:
    """Go on in the place of a process that has ended; False where it is to be tried again.

    Raises ``WorldMismatch`` where a process has it that is there, or may be.
    """
    word, _ = _words.place(rank)
    rivals = _rivals(link, keys, rank, member)
    others = [one for one in rivals if one != member.claim]
    if _preceding(rivals, member):
        link.append(keys.rosters[word], member.claim.line("-"))
        link.append(keys.strays, member.claim.line("!"))
        mine, member.claim = member.claim, _roster.new_claim(rank, keys.world_size)
        raise _messages.claimed_twice(keys, [*others, mine], what)
    if not others or not all(one.gone for one in others):
        return False
    _succeed(link, keys, rank, member, others)
    return True


def _rivals(link: Link, keys: Keys, rank: int, member: Member) -> list[Claim]:
    """Return who has signed for a rank, in order; this process among them."""
    word, _ = _words.place(rank)
    roster = _roster.read(link.read_log(keys.rosters[word]), keys.world_size)
    return [one for one in roster.claims if one.rank == rank]


def _preceding(rivals: Sequence[Claim], member: Member) -> list[Claim]:
    """Return those who signed before this process, and are there, or may be."""
    at = rivals.index(member.claim) if member.claim in rivals else len(rivals)
    return [one for one in rivals[:at] if not one.gone]


def _succeed(link: Link, keys: Keys, rank: int, member: Member, ended: list[Claim]) -> None:
    """Find out how far the world is, and whether this rank has arrived there already."""
    word, _ = _words.place(rank)
    for one in ended:
        link.append(keys.rosters[word], one.line("-"))
    newest = keys.newest_done(link.list_keys())
    if newest == 0 and link.read(keys.done(0)) == CALLED_OFF:
        newest = -1
    member.generation = newest + 1
    member.arrived = _words.was_in(link.add(keys.words[word], 0), rank, member.generation)
    member.claimed = True


def _pause(keys: Keys, rank: int, deadline: float) -> None:
    """Give way: nobody else is this rank, the word is out of order for another one's sake."""
    if time.monotonic() > deadline:
        raise WorldMismatch(
            f"{keys.prefix!r}: the place of rank {rank} of {keys.world_size} stays taken, by a "
            "process that has not signed for it. Use another key_prefix"
        )
    time.sleep(AGAIN_S)
