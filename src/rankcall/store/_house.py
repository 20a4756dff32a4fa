"""A host's ranks and the store they meet in, which their leader hosts on loopback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.distributed import Store, TCPStore

from rankcall.store import _messages
from rankcall.store._bounded import within
from rankcall.store._connection import local
from rankcall.store._keys import Keys
from rankcall.store._link import Link
from rankcall.store._member import Call

__all__ = ["House", "delete", "enter", "hear"]

_HOST_PORT_KIND = "h"


@dataclass
class House:
    """The ranks of this host, and the store they meet in."""

    host: int
    hosts: int
    size: int  # ranks on a host
    local_rank: int
    store: Store
    announced: str | None  # the key that says where it is, until all have read it
    rounds: dict[str, int] = field(default_factory=dict)  # barriers passed, by prefix
    wrote: list[str] = field(default_factory=list)  # logs of who has come, in the caller's store

    def ranks(self, host: int) -> range:
        """Return the ranks of a host, as torchrun numbers them."""
        return range(host * self.size, (host + 1) * self.size)


def enter(store: Store, keys: Keys, rank: int, local_rank: int, size: int, timeout: float) -> House:
    """Return this host's store; the leader makes it and says where in the caller's store."""
    seats = local(store).seats
    place = ("house", keys.attempt, keys.world_size, size, rank)
    found: House | None = seats.get(place)
    if found is not None:
        return found
    host = rank // size
    name = f"rankcall.hosts/rankcall.{_HOST_PORT_KIND}{keys.attempt}/{keys.world_size}/{host}"
    if local_rank == 0:
        home = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        _tell(store, name, str(home.port).encode(), timeout)
    else:
        told = hear(store, name, timeout)
        if told is None:
            raise _messages.timed_out(
                "barrier", keys, rank=rank, missing=[host * size], arrived=0, timeout=timeout,
                hosts={}, notes="; the leader of this host has never come",
            )  # fmt: skip
        home = TCPStore("127.0.0.1", int(told), is_master=False, wait_for_workers=False)
    announced = name if local_rank == 0 else None
    found = House(host, keys.world_size // size, size, local_rank, home, announced)
    seats[place] = found
    return found


def _tell(store: Store, key: str, value: bytes, timeout: float) -> None:
    def step(link: Link, call: Call, until: float) -> bool:
        link.set(key, value)
        return link.check([key])

    within(store, timeout, step, step)


def delete(store: Store, keys: Sequence[str], timeout: float) -> None:
    """Remove keys, logs among them."""

    def step(link: Link, call: Call, until: float) -> bool:
        for key in keys:
            link.delete_log(key)
        return True

    within(store, timeout, step, step)


def hear(store: Store, key: str, timeout: float) -> bytes | None:
    """Return what a key says, as soon as it is there; None where that is not in time."""

    def step(link: Link, call: Call, until: float) -> tuple[bytes] | None:
        value = link.wait_get(key, until)
        return None if value is None else (value,)

    return within(store, timeout, step, lambda link, call, until: (b"",))[0] or None
