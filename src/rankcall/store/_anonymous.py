"""Barriers without ranks: tickets from a counter, ``world_size`` of them to a generation.

Nothing tells two processes apart here, so nobody can be named. A process that timed out keeps its
ticket and waits with it when it calls again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.distributed import Store

from rankcall.errors import WorldMismatch
from rankcall.store import _messages, _roster, _words
from rankcall.store._bounded import within
from rankcall.store._connection import on_fork
from rankcall.store._keys import Keys
from rankcall.store._link import Link
from rankcall.store._member import Call, identity_of
from rankcall.store._sizes import CALLED_OFF, agree, heed
from rankcall.store._view import other_worlds

__all__ = ["barrier", "forget"]

_AGAIN_S = 0.01
NOBODY = -1  # the rank in the roster of a process that gave none


@dataclass
class _Part:
    """This process under one prefix: whether it signed, and tickets it drew and has not used."""

    claim: _roster.Claim
    signed: bool = False
    agreed: bool = False
    told: set[str] = field(default_factory=set)
    unused: list[int] = field(default_factory=list)


_parts: dict[tuple[str, Keys], _Part] = {}
on_fork(_parts.clear)


def barrier(store: Store, keys: Keys, timeout: float, what: str | None) -> None:
    """Wait until ``world_size`` processes are here."""
    drawn: list[int] = []

    def step(link: Link, call: Call, until: float) -> bool | None:
        if not drawn:
            drawn.append(_draw(store, link, keys))
        part = _part(store, link, keys)
        try:
            if not _wait(link, keys, part, drawn[0], until, what):
                return None
        except WorldMismatch:
            part.unused.append(drawn[0])
            raise
        if not call.finish():
            _part(store, link, keys).unused.append(drawn[0])  # the next call passes with it
        return True

    def last(link: Link, call: Call, until: float) -> bool:
        generation = (drawn[0] - 1) // keys.world_size
        now = link.add(keys.tickets, 0)
        if now < (generation + 1) * keys.world_size:
            _part(store, link, keys).unused.append(drawn[0])
            _raise(link, keys, now - generation * keys.world_size, timeout, what)
        if not call.finish():
            _part(store, link, keys).unused.append(drawn[0])
        return True

    within(store, timeout, step, last, saying=_messages.titled("barrier", keys.prefix, what))


def _part(store: Store, link: Link, keys: Keys) -> _Part:
    place = identity_of(store, link), keys
    found = _parts.get(place)
    return found or _parts.setdefault(place, _Part(_roster.new_claim(NOBODY, keys.world_size)))


def _draw(store: Store, link: Link, keys: Keys) -> int:
    part = _part(store, link, keys)
    try:
        ticket = part.unused.pop()
    except IndexError:
        ticket = link.add(keys.tickets, 1)
    if not part.signed and ticket <= _words.BITS:  # more would not be listed
        part.signed = True
        link.append(keys.rosters[0], part.claim.line())
    return ticket


def _wait(link: Link, keys: Keys, part: _Part, ticket: int, until: float, what: str | None) -> bool:
    generation, place = divmod(ticket - 1, keys.world_size)
    if place < keys.world_size - 1:
        if generation == 0:
            return _first(link, keys, part, until, what)
        return link.wait([keys.passed(generation)], until)
    link.set(keys.passed(generation), b"1")
    if generation > 0:  # all have drawn a ticket of this one, so all have left the last
        link.delete(keys.passed(generation - 1))
    return True


def _first(link: Link, keys: Keys, part: _Part, until: float, what: str | None) -> bool:
    """Wait in the first generation, where another world's process may call it off."""
    if not part.agreed:
        part.agreed = True
        agree(link, keys, part.claim, part.told, what)
    value = link.wait_get(keys.passed(0), until)
    while value == CALLED_OFF:
        heed(link, keys, part.claim, _signed(link, keys), part.told, what)
        if time.monotonic() >= until:
            return False
        time.sleep(_AGAIN_S)
        value = link.read(keys.passed(0))
    return value is not None


def _signed(link: Link, keys: Keys) -> Sequence[_roster.Claim]:
    return _roster.read(link.read_log(keys.rosters[0]), keys.world_size).claims


def _raise(link: Link, keys: Keys, arrived: int, timeout: float, what: str | None) -> None:
    others = [
        one
        for world in other_worlds(keys, (link.read(keys.sizes) or b"").decode())
        if link.check([world.tickets]) and link.add(world.tickets, 0) % world.world_size
        for one in _signed(link, world)
    ]
    if others:
        raise _messages.worlds_differ(keys, None, [*_signed(link, keys), *others], what)
    here = [one.who for one in _signed(link, keys)]
    raise _messages.timed_out(
        "barrier",
        keys,
        rank=None,
        missing=(),
        arrived=arrived,
        timeout=timeout,
        hosts={},
        what=what,
        notes=_messages.seen(here),
    )


def forget(store: Store, link: Link, keys: Keys) -> None:
    """Drop what this process remembers."""
    _parts.pop((identity_of(store, link), keys), None)
