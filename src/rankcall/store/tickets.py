"""Barriers without ranks: a counter gives out tickets, ``world_size`` of them to a generation.

Nothing tells two processes apart here, so no missing process can be named. A process that timed
out keeps its ticket, and waits with it when it calls again. If the answer to a request for a
ticket was lost, the process does not know its ticket: it cannot call again under this prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rankcall.c10d.requests import Add, Check, Delete, Read, Set, Steps, Wait
from rankcall.store.keys import Keys
from rankcall.store.protocol import (
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


def meet(keys: Keys, ticket: int) -> Steps[None]:
    """Wait until all tickets of the generation are drawn. Raises ``TooFew``, ``WorldsDiffer``."""
    generation, position = divmod(ticket - 1, keys.world_size)
    if position == 0 and generation == 0:
        yield from announce(keys, b"%d" % keys.world_size)
    if position == keys.world_size - 1:
        yield Set(keys.passed(generation), b"1")
        if generation > 0:  # all have drawn a ticket of this one, so all have left the last
            yield Delete(keys.passed(generation - 1))
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
