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

from rankcall.c10d.requests import (
    Check,
    CompareSet,
    Delete,
    Read,
    Steps,
    Until,
)


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
