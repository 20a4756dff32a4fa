"""Barriers without ranks: a counter gives out tickets, ``world_size`` of them to a generation.

Nothing tells two processes apart here, so no missing process can be named. A process that timed
out keeps its ticket, and waits with it when it calls again. If the answer to a request for a
ticket was lost, the process does not know its ticket: it cannot call again under this prefix.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from rankcall.c10d.requests import (
    Add,
    Append,
    Check,
    Delete,
    Read,
    Set,
    Steps,
    StoreGoneError,
    Until,
    Wait,
)
from rankcall.store.keys import Keys
from rankcall.store.protocol import (
    STAY_S,
    Claim,
    NotAllArrived,
    Unconfirmed,
    WorldsDiffer,
    announce,
    registered_sizes,
)
from rankcall.whole_numbers import whole_number

NO_RANK = -1  # in the claim of a process without a rank


@dataclass
class Tickets:
    """The tickets of this process under one prefix that it has not passed a barrier with."""

    unused: list[int] = field(default_factory=list)
    is_in_doubt: bool = False  # a request for a ticket was not answered


class TooFew(NotAllArrived):
    """The deadline came first. ``arrived`` processes of this generation have come."""

    def __init__(self, arrived: int) -> None:
        super().__init__(())
        self.arrived = arrived


def draw(keys: Keys, tickets: Tickets) -> Steps[int]:
    """Return a ticket that this process has not used, or draw one. It counts from 1."""
    if tickets.unused:
        return tickets.unused.pop()
    if tickets.is_in_doubt:
        # Another draw could take two places of one generation, and let the others pass too early.
        raise Unconfirmed
    try:
        ticket: int = yield Add(keys.tickets, 1)
    except BaseException:
        tickets.is_in_doubt = True
        raise
    return ticket


def meet(keys: Keys, ticket: int, hosts_store: bool = False) -> Steps[None]:
    """Wait until all tickets of the generation are drawn. Raises ``TooFew``, ``WorldsDiffer``.

    A process with ``hosts_store``, with which the store ends, leaves last.
    """
    generation, position = divmod(ticket - 1, keys.world_size)
    if position == 0 and generation == 0:
        yield from announce(keys, b"%d" % keys.world_size)
    yield from _wait_for_all(keys, generation, position)
    with suppress(StoreGoneError):  # all have come: the rest is for others, and for tidiness
        yield from _leave(keys, generation, position, hosts_store)


def _leave(keys: Keys, generation: int, position: int, hosts_store: bool) -> Steps[None]:
    """Say that this process is done, and remove keys; on the host, wait for the others."""
    if keys.appends:
        left = keys.passers(generation)
        yield Append(left, b".")
        if hosts_store:
            yield Until(Read(left), lambda held: len(held or b"") >= keys.world_size, STAY_S)
    if position == keys.world_size - 1 and generation > 0:
        # All have drawn a ticket of this generation, so all have left the last one.
        yield Delete(keys.passed(generation - 1))
        if keys.appends:
            yield Delete(keys.passers(generation - 1))


def _wait_for_all(keys: Keys, generation: int, position: int) -> Steps[None]:
    """Wait until all tickets of a generation are drawn; the last one lets the others pass."""
    if position == keys.world_size - 1:
        yield Set(keys.passed(generation), b"1")
        return
    if (yield Wait((keys.passed(generation),))):
        return
    drawn = whole_number((yield Read(keys.tickets))) or 0
    if drawn >= (generation + 1) * keys.world_size:
        return  # the last one has come at the deadline, and may not have set the key yet
    others = []
    for size in registered_sizes((yield Read(keys.register))):
        world = keys.of_size(size)
        if size != keys.world_size and (yield Check((world.tickets,))):
            waiting = (whole_number((yield Read(world.tickets))) or 0) % size
            others += [Claim(NO_RANK, size, "", 0, "")] * waiting
    arrived = drawn - generation * keys.world_size
    if others:
        here = [Claim(NO_RANK, keys.world_size, "", 0, "")] * arrived
        raise WorldsDiffer([*here, *others])
    raise TooFew(arrived)
