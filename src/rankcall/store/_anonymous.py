"""Barriers without ranks: tickets from a counter, ``world_size`` of them to a generation.

Nothing tells two processes apart here, so nobody can be named. A process that timed out keeps its
ticket and waits with it when it calls again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.distributed import Store

from rankcall.store import _messages, _roster
from rankcall.store._bounded import within
from rankcall.store._keys import Keys
from rankcall.store._link import Link, on_fork
from rankcall.store._member import Call, identity_of

__all__ = ["barrier", "forget"]

NOBODY = -1  # the rank in the roster of a process that gave none


@dataclass
class _Part:
    """This process under one prefix: whether it signed, and tickets it drew and has not used."""

    signed: bool = False
    unused: list[int] = field(default_factory=list)


_parts: dict[tuple[str, Keys], _Part] = {}
on_fork(_parts.clear)


def barrier(store: Store, keys: Keys, timeout: float, what: str | None) -> None:
    """Wait until ``world_size`` processes are here."""
    drawn: list[int] = []

    def step(link: Link, call: Call, until: float) -> bool | None:
        if not drawn:
            drawn.append(_draw(store, link, keys))
        if not _wait(link, keys, drawn[0], until):
            return None
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

    within(store, timeout, step, last)


def _part(store: Store, link: Link, keys: Keys) -> _Part:
    return _parts.setdefault((identity_of(store, link), keys), _Part())


def _draw(store: Store, link: Link, keys: Keys) -> int:
    part = _part(store, link, keys)
    if not part.signed:
        part.signed = True
        link.append(keys.roster, _roster.new_claim(NOBODY, keys.world_size).line())
    try:
        return part.unused.pop()
    except IndexError:
        return link.add(keys.tickets, 1)


def _wait(link: Link, keys: Keys, ticket: int, until: float) -> bool:
    generation, place = divmod(ticket - 1, keys.world_size)
    if place < keys.world_size - 1:
        return link.wait([keys.passed(generation)], until)
    link.set(keys.passed(generation), b"1")
    if generation > 0:  # all have drawn a ticket of this one, so all have left the last
        link.delete(keys.passed(generation - 1))
    return True


def _raise(link: Link, keys: Keys, arrived: int, timeout: float, what: str | None) -> None:
    claims, _ = _roster.parse(link.read_log(keys.roster))
    sizes = {one.world_size for one in claims} - {keys.world_size}
    open_sizes = {size for size in sizes if _is_open(link, keys.of_world(size))}
    if open_sizes:
        wanted = {keys.world_size, *open_sizes}
        raise _messages.worlds_differ(
            keys, None, [one for one in claims if one.world_size in wanted], what
        )
    here = [one.who for one in claims if one.world_size == keys.world_size]
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


def _is_open(link: Link, keys: Keys) -> bool:
    """Whether a generation of a world of that size has begun and is not complete."""
    return link.check([keys.tickets]) and link.add(keys.tickets, 0) % keys.world_size != 0


def forget(store: Store, link: Link, keys: Keys) -> None:
    """Drop what this process remembers."""
    _parts.pop((identity_of(store, link), keys), None)
