"""A barrier under a prefix that this process has been at before: the usual case, in few steps.

The protocol is ``_meeting``'s. Here are only its two round trips, with what can be known beforehand
made beforehand: on a store that is near, the Python in between would cost as much as they do.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from torch.distributed import Store

from rankcall.store import _words
from rankcall.store._bounded import blocking
from rankcall.store._connection import answers_slowly, local
from rankcall.store._keys import Keys, attempt_of
from rankcall.store._link import Link
from rankcall.store._meeting import Meeting
from rankcall.store._member import Call, Member, drop, take

__all__ = ["passed", "remember"]

_LOW = (1 << _words.BITS) - 1


@dataclass(slots=True)
class _Seat:
    """One rank's place. ``call`` stands for whichever call is in there by this way."""

    keys: Keys
    member: Member
    word: str
    add: tuple[int, int]  # in even and odd generations
    claimed: int  # the word's high bits, when it is in order
    full: tuple[int, int]
    call: Call = field(default_factory=Call)


def remember(store: Store, keys: Keys, rank: int, member: Member) -> None:
    """Keep what the next barrier of this rank under this prefix needs."""
    if not answers_slowly(store) or member.generation == 0:
        return  # there is no clone there; or the prefix may be one that is used once
    word, _ = _words.place(rank)
    mask = _words.mask(word, keys.world_size)
    local(store).seats[keys.prefix, keys.world_size, rank] = _Seat(
        keys, member, keys.words[word], (_words.arrival(rank, 0), _words.arrival(rank, 1)), mask,
        (mask, 0),
    )  # fmt: skip


def passed(
    store: Store,
    world_size: int,
    prefix: str,
    attempt: int | None,
    rank: int | None,
    timeout: float,
) -> bool:
    """Pass the barrier; False where it takes more than this to pass it.

    Then the arrival may stand already, and whoever goes on finds that out. Nothing has been checked
    yet: what a seat was taken with before is in order.
    """
    if not isinstance(store, Store) or type(prefix) is not str:
        return False
    here = local(store)
    seat: _Seat | None = here.seats.get((prefix, world_size, rank))
    if seat is None or rank is None or not here.idle or type(timeout) not in (int, float):
        return False
    times = blocking(timeout)
    if times is None or seat.keys.attempt != attempt_of(attempt):
        return False
    member = seat.member
    if member.forgotten or not take(member, seat.call, again=False):
        return False
    try:
        link = here.idle.pop()
    except IndexError:  # another thread has just taken it
        drop(member)
        return False
    try:
        fit = not member.arrived and not member.unsure
        return fit and _pass(link, seat, rank, *times)
    finally:
        drop(member)
        if link.broken:
            link.close()
        else:
            here.idle.append(link)


def _pass(link: Link, seat: _Seat, rank: int, answer: float, wait: float) -> bool:
    member, deadline = seat.member, time.monotonic() + wait
    odd = member.generation & 1
    link.bound(answer)
    member.unsure = True
    value = link.add(seat.word, seat.add[odd])
    member.unsure, member.arrived = False, True
    if value >> _words.BITS != seat.claimed or value & _LOW == seat.full[odd]:
        meeting = Meeting(link, seat.keys, rank, member, seat.call, deadline)
        meeting.arrived(value)
        if meeting.passed:
            meeting.leave()
            return True
    if not link.wait([seat.keys.done(member.generation)], deadline):
        return False
    member.leave()
    return True
