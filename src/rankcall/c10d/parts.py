"""Small protocols from which others are built: a log, a lease, a value of one of many.

Each is a class or a function whose methods are protocols: generators of requests
(``rankcall.c10d.requests``). ``rankcall.c10d.client.perform`` runs one on a store, with a deadline.
So the same code is tried in all orders by ``rankcall.testing.simulated_store``, and a caller with a
protocol of its own can build it from these.

No part compares the clocks of two processes, and none waits for a key that another process may have
removed. A process that dies at any point leaves nothing behind on which another one waits for ever.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from rankcall.c10d.requests import (
    Check,
    CompareSet,
    Delete,
    Now,
    Read,
    ReadMany,
    Set,
    Sleep,
    Steps,
    Until,
)

_LEASE_POLLS = 20  # looks at another holder's lease, while it lasts


def publish_once(key: str, value: bytes) -> Steps[bytes]:
    """Publish a value unless another process has; return what is published.

    All processes that call it get the same value. ``value`` must not be empty. Calling it again is
    harmless, also if the answer to the first call was lost.
    """
    if not value:
        raise ValueError(f"an empty value cannot be published as {key!r}")
    held: bytes = yield CompareSet(key, b"", value)
    return held


class Log:
    """A log to which any process appends, and which each process reads from its own place on.

    An entry is in the log once, at one place, for all readers; there are no gaps, also if a process
    dies while it appends. ``cursor`` is how many entries this object has read. ``append`` takes
    one request, and one more for each entry that it has not read.
    """

    def __init__(self, prefix: str, nonce: bytes | None = None) -> None:
        self._prefix = prefix
        self._nonce = os.urandom(8).hex().encode() if nonce is None else nonce
        self._appended = 0
        self._unreturned: list[bytes] = []  # read, before an answer was lost
        self.cursor = 0

    def append(self, value: bytes) -> Steps[int]:
        """Append an entry and return its index."""
        # Unique, so that a process that gets no answer finds its own entry again.
        entry = b"%s.%d " % (self._nonce, self._appended) + value
        index = self.cursor
        while (yield CompareSet(self._key(index), b"", entry)) != entry:
            index += 1
        self._appended += 1
        return index

    def read(self) -> Steps[list[bytes]]:
        """Return the entries since the last ``read``, oldest first."""
        while (entry := (yield Read(self._key(self.cursor)))) is not None:
            self.cursor += 1
            self._unreturned.append(entry.partition(b" ")[2])
        entries, self._unreturned = self._unreturned, []
        return entries

    def wait(self) -> Steps[list[bytes]]:
        """Wait for an entry that this object has not read; return as ``read``."""
        # Not a Wait: a TCPStore without libuv does not wake one for a key made by compare_set.
        yield Until(Check((self._key(self.cursor),)), bool)
        return (yield from self.read())

    def length(self) -> Steps[int]:
        """Return how many entries there are, read or not."""
        index = self.cursor
        while (yield Check((self._key(index),))):
            index += 1
        return index

    def remove(self) -> Steps[None]:
        """Remove the log. No process may use it any more."""
        index = 0
        while (yield Check((self._key(index),))):
            yield Delete(self._key(index))
            index += 1

    def _key(self, index: int) -> str:
        return f"{self._prefix}/log/{index}"


class Lease:
    """A right that one process at a time holds, and loses if it does not renew it in time.

    A holder believes in its lease for ``lasts_s`` seconds from the moment at which it asked for it.
    Another process takes the lease over when it has seen the same entry for ``lasts_s`` of its own
    seconds. It cannot have seen the entry before the holder asked, so no two processes hold the
    lease at once, as long as their clocks run at the same speed. A holder that is slow has to check
    ``is_held`` before it acts.
    """

    def __init__(self, key: str, holder: str, lasts_s: float = 5.0, nonce: str = "") -> None:
        self._key = key
        self._holder = holder
        self._lasts_s = lasts_s
        self._nonce = nonce or os.urandom(8).hex()
        self._entry = b""  # in the store, as far as this process knows
        self._turn = 0
        self._until = float("-inf")
        self._seen: tuple[bytes, float] | None = None  # another's entry, and since when

    def _next_entry(self) -> bytes:
        self._turn += 1
        return f"{self._nonce}.{self._turn} {self._holder}".encode()

    def try_take(self) -> Steps[bool]:
        """Take the lease if it is free or has expired, or renew it; return whether it is held."""
        now: float = yield Now()
        expected = self._entry
        if not expected and self._seen is not None and now - self._seen[1] >= self._lasts_s:
            expected = self._seen[0]
        entry = self._next_entry()
        held: bytes | None = yield CompareSet(self._key, expected, entry)
        if held is None:  # it was removed
            self._entry, self._seen = b"", None
            held = yield CompareSet(self._key, b"", entry)
        if held == entry:
            self._entry, self._until, self._seen = entry, now + self._lasts_s, None
            return True
        if held is not None and held.startswith(self._nonce.encode() + b"."):
            # The answer to an earlier request was lost: the lease has been this process's since.
            self._entry = held
            return (yield from self.try_take())
        self._entry = b""
        if held and (self._seen is None or self._seen[0] != held):
            self._seen = held, (yield Now())
        return False

    def take(self, timeout_s: float) -> Steps[bool]:
        """Wait for the lease; return whether it is held."""
        until = (yield Now()) + timeout_s
        while not (yield from self.try_take()):
            if (yield Now()) >= until:
                return False
            yield Sleep(self._lasts_s / _LEASE_POLLS)
        return True

    def is_held(self) -> Steps[bool]:
        """Return whether this process holds the lease for sure at this moment."""
        return bool((yield Now()) < self._until)

    def release(self) -> Steps[None]:
        """Give the lease up, if this process has it."""
        entry, self._entry, self._until = self._entry, b"", float("-inf")
        if entry:
            yield CompareSet(self._key, entry, b"")


class HostNames:
    """The names of the ranks' hosts, below a prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def publish(self, rank: int, name: str) -> Steps[None]:
        """Publish the host of a rank."""
        yield Set(f"{self._prefix}/host/{rank}", name.encode())

    def look_up(self, ranks: Sequence[int]) -> Steps[Mapping[int, str]]:
        """Return the hosts of those ranks that have told theirs."""
        names = yield ReadMany([f"{self._prefix}/host/{rank}" for rank in ranks])
        return {
            rank: name.decode("utf-8", "replace")
            for rank, name in zip(ranks, names, strict=True)
            if name is not None
        }
