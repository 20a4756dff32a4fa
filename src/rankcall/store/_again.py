"""A barrier or an exchange under a prefix that this process has been at before, in few steps.

The protocol is ``_meeting``'s. Here are only its round trips, with what can be known beforehand
made beforehand: on a store that is near, the Python in between would cost as much as they do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

from torch.distributed import Store

from rankcall.store import _words
from rankcall.store._bounded import blocking
from rankcall.store._connection import answers_slowly, local
from rankcall.store._keys import Keys, attempt_of
from rankcall.store._link import Link
from rankcall.store._meeting import Meeting
from rankcall.store._member import Call, Member, drop, take

__all__ = ["Seat", "again", "arrived", "came", "remember"]

_LOW = (1 << _words.BITS) - 1
T = TypeVar("T")


@dataclass(slots=True)
class Seat:
    """One rank's place. ``call`` stands for whichever call is in there by this way."""

    keys: Keys
    rank: int
    member: Member
    word: str
    add: tuple[int, int]  # in even and odd generations
    claimed: int  # the word's high bits, when it is in order
    full: tuple[int, int]
    timeout: float = 0.0
    answer: float = 0.0  # what an answer may take, and the wait, with this timeout
    wait: timedelta = field(default_factory=timedelta)
    call: Call = field(default_factory=Call)


def remember(store: Store, keys: Keys, rank: int, member: Member) -> None:
    """Keep what the next barrier or exchange of this rank under this prefix needs."""
    if not answers_slowly(store) or member.generation == 0:
        return  # there is no clone there; or the prefix may be one that is used once
    word, _ = _words.place(rank)
    mask = _words.mask(word, keys.world_size)
    local(store).seats[keys.kind, keys.prefix, keys.world_size, rank] = Seat(
        keys, rank, member, keys.words[word], (_words.arrival(rank, 0), _words.arrival(rank, 1)),
        mask, (mask, 0),
    )  # fmt: skip


def again(
    store: Store,
    kind: str,
    world_size: int,
    prefix: str,
    attempt: int | None,
    rank: int | None,
    timeout: float,
    steps: Callable[[Link, Seat], T | None],
) -> T | None:
    """Take the seat and do the steps; None where it takes more than this.

    Then the arrival may stand already, and whoever goes on finds that out. Nothing has been checked
    yet: what a seat was taken with before is in order.
    """
    if not isinstance(store, Store) or type(prefix) is not str:
        return None
    here = local(store)
    seat: Seat | None = here.seats.get((kind, prefix, world_size, rank))
    if seat is None or not here.idle or seat.keys.attempt != attempt_of(attempt):
        return None
    if timeout != seat.timeout and not _timed(seat, timeout):
        return None
    member = seat.member
    if member.forgotten or not take(member, seat.call, again=False):
        return None
    try:
        link = here.idle.pop()
    except IndexError:  # another thread has just taken it
        drop(member)
        return None
    try:
        if member.arrived or member.unsure:
            return None
        link.bound(seat.answer)
        return steps(link, seat)
    finally:
        drop(member)
        if link.broken:
            link.close()
        else:
            here.idle.append(link)


def _timed(seat: Seat, timeout: float) -> bool:
    """Work out how long to wait; False where it is too short to block in."""
    times = blocking(timeout) if type(timeout) in (int, float) else None
    if times is None:
        return False
    seat.timeout, seat.answer, seat.wait = timeout, times[0], timedelta(seconds=min(times[1], 1e6))
    return True


def arrived(link: Link, seat: Seat, data: bool = False) -> Meeting | None:
    """Arrive; return what is to be done if this rank has to see to its word."""
    member = seat.member
    odd = member.generation & 1
    member.unsure = True
    value = link.add(seat.word, seat.add[odd])
    member.unsure, member.arrived = False, True
    if value >> _words.BITS == seat.claimed and value & _LOW != seat.full[odd]:
        return None
    deadline = time.monotonic() + seat.wait.total_seconds()
    meeting = Meeting(link, seat.keys, seat.rank, member, seat.call, deadline, data)
    meeting.arrived(value)
    return meeting


def came(link: Link, seat: Seat) -> bool | None:
    """Go through a barrier."""
    meeting = arrived(link, seat)
    passed = meeting is not None and meeting.passed
    if not passed and not link.block(seat.keys.done(seat.member.generation), seat.wait):
        return None
    seat.member.leave()
    return True
