"""The hosts that a store may be on, one after the other, and the connections to them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store, TCPStore

from rankcall.background import BackgroundCall
from rankcall.store._bounded import within
from rankcall.store._errors import StoreLost
from rankcall.store._link import Link
from rankcall.store._member import Call

__all__ = ["Place", "Places", "place_of"]

Place = tuple[str, int]  # address, port


def place_of(text: str) -> Place:
    """Return what ``"address:port"`` says; raises ``ValueError`` where it says nothing."""
    address, _, port = text.rpartition(":")
    if not address or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"a host is 'address:port'; got {text!r}")
    return address.strip("[]"), int(port)


class Places:
    """``at`` is the number of the one in use. One thread at a time.

    ``timeout``, in seconds, is what connecting to one may take before the next is tried.
    """

    def __init__(self, places: Sequence[Place], timeout: float) -> None:
        self._places = places
        self._ahead: dict[int, Store] = {}  # connections to later ones
        self._tried = 0.0  # seconds that went into connecting to the one that is next
        self.timeout = timeout
        self.at = 0

    @property
    def over(self) -> bool:
        """Whether none is left."""
        return self.at >= len(self._places)

    def serve(self, number: int) -> Store:
        """Host the store of one of them in this process."""
        address, port = self._places[number]
        return TCPStore(address, port, is_master=True, wait_for_workers=False)

    def connect(self, reason: str, seconds: float) -> Store:
        """Connect to the one in use, or to the next that answers, in this time.

        Raises ``StoreLost`` for this ``reason`` where none does.
        """
        until = time.monotonic() + seconds
        while not self.over:
            left = max(0.0, min(self.timeout - self._tried, until - time.monotonic()))
            found = self._ahead.get(self.at) or _connected(*self._places[self.at], left)
            if found is not None:
                self._tried = 0.0
                return found
            self._tried += left
            if self._tried < self.timeout:
                raise StoreLost(f"{reason}. No time was left to connect to the next host")
            self.at, self._tried = self.at + 1, 0.0
        names = ", ".join(f"{address}:{port}" for address, port in self._places)
        raise StoreLost(f"no store is left of {names}: {reason}", host=names)

    def later_has(self, key: str, seconds: float) -> bool:
        """Whether the store of one that comes later has a key; each is asked, in this time."""

        def step(link: Link, call: Call, until: float) -> tuple[bool]:
            return (link.check([key]),)

        until = time.monotonic() + seconds
        for number in range(self.at + 1, len(self._places)):
            left = max(0.001, until - time.monotonic())
            store = self._ahead.get(number) or _connected(*self._places[number], left)
            if store is None:
                continue
            self._ahead[number] = store
            try:
                if within(store, max(0.001, until - time.monotonic()), step, step)[0]:
                    return True
            except StoreLost:
                del self._ahead[number]
        return False


def _connected(address: str, port: int, seconds: float) -> Store | None:
    """Connect; None where that takes too long, or fails. A stopped host does not hold it up."""

    def connect() -> Store:
        wait = timedelta(seconds=max(1.0, seconds))
        return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=wait)

    helper = BackgroundCall(connect, "rankcall-store-connect")
    if not helper.ended(seconds):
        return None
    try:
        store = helper.outcome()
    except RuntimeError:
        return None
    store.set_timeout(timedelta(seconds=300))  # as torch's own default
    return store
