"""Post bundles in the job's store, and collect them: the protocol.

Keys, below the prefix of a verdict or of the ranks that end: ``posts``, a count;
``<number>/<part>``, a bundle in parts; ``<number>``, written last: the ranks of the bundle and
the number of its parts; ``second``, the first node beside rank 0's, which collects as well;
``done``, a count of the collectors that have read all.

A bundle is written before its last key. So a process that dies in between leaves nothing that
another one reads, and no process waits for more than the deadline.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from rankcall.c10d.requests import Add, CompareSet, Delete, Now, Read, Set, Sleep, Steps
from rankcall.job.counts import newest_entries

ENDED = "ended"  # the prefix of ranks that end; that of a verdict is its id
PART_BYTES = 1 << 18  # far below the 8 MiB at which a TCPStore closes the connection
SETTLE_S = 6.0  # how long a collector waits for the bundles of all ranks
_POLL_S = 0.05
MOST_OF_ALL = 1 << 26  # bytes of all bundles of a job together, as far as ranks share it evenly
_HEADER_BYTES, _HEADER_BYTES_OF_RANK = 64, 16  # of the JSON with the ranks of a bundle
_COLLECTORS = 2  # rank 0's node, and one more in case rank 0's is the one that is lost


class Posts:
    """The bundles below one prefix, as one process sees them."""

    def __init__(self, prefix: str, world_size: int, settle_s: float = SETTLE_S) -> None:
        self._prefix = prefix
        self._world_size = world_size
        self._settle_s = settle_s
        self._read: dict[int, int] = {}  # by number: how many parts it has
        # Twice what the ranks post, because one that got no answer posts again. Without a bound, a
        # forged header would have this process read parts of any size.
        self._bytes_left = 2 * MOST_OF_ALL

    def post(self, ranks: Collection[int], bundle: bytes) -> Steps[None]:
        """Post a bundle with the rings of these ranks; if it is empty, only that they have none."""
        number = yield Add(self._key("posts"), 1)
        parts = [bundle[at : at + PART_BYTES] for at in range(0, len(bundle), PART_BYTES)]
        for index, part in enumerate(parts):
            yield Set(self._key(f"{number}/{index}"), part)
        header = {"ranks": sorted(ranks), "parts": len(parts)}
        yield Set(self._key(str(number)), json.dumps(header).encode())

    def fresh(self, known: set[int], skipped: Collection[int] = ()) -> Steps[list[bytes]]:
        """Return the bundles that were posted since the last call; add their ranks to ``known``.

        Bundles of ``skipped`` ranks, which are the caller's own, are left out.
        """
        bundles = []
        posts = yield Read(self._key("posts"))
        for number in newest_entries(posts, self._world_size):
            if number in self._read:
                continue
            header = self._header((yield Read(self._key(str(number)))))
            if header is None:
                continue  # it is still being written, was given up, or is no rank's
            ranks, self._read[number] = header
            known.update(ranks)
            if not set(ranks) <= set(skipped):
                bundle = yield from self._bundle(number)
                bundles += [bundle] if bundle else []
        return bundles

    def _header(self, raw: bytes | None) -> tuple[Sequence[int], int] | None:
        """Return the ranks and the number of parts of a bundle; None if it has no sound header."""
        if raw is None or len(raw) > _HEADER_BYTES + _HEADER_BYTES_OF_RANK * self._world_size:
            return None
        try:
            header = json.loads(raw)
            ranks, parts = header["ranks"], header["parts"]
            sound = type(parts) is int and 0 <= parts <= MOST_OF_ALL // PART_BYTES
            sound &= all(type(rank) is int and 0 <= rank < self._world_size for rank in ranks)
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        return (ranks, parts) if sound else None

    def _bundle(self, number: int) -> Steps[bytes]:
        """Return a bundle; empty if it has none, or if its parts are not as ranks post them."""
        parts = []
        for index in range(self._read[number]):
            part = (yield Read(self._key(f"{number}/{index}"))) or b""
            self._bytes_left -= len(part)
            if not 0 < len(part) <= PART_BYTES or self._bytes_left < 0:
                return b""
            parts.append(part)
        return b"".join(parts)

    def remove(self) -> Steps[None]:
        """Remove the bundles that this process has read."""
        for number, parts in sorted(self._read.items()):
            yield Delete(self._key(str(number)))
            for index in range(parts):
                yield Delete(self._key(f"{number}/{index}"))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def exchange(self, mine: Collection[int], bundle: bytes, name: str) -> Steps[list[bytes]]:
        """Send this node's bundle; return those of the other nodes if this node collects them.

        Args:
            mine: The ranks of this node.
            bundle: Their bundle; empty if this node need not send any, nor collect.
            name: A name of this node that no other node has.
        """
        yield from self.post(mine, bundle)
        if 0 not in mine and not (bundle and (yield from self._is_second(name.encode()))):
            return []
        bundles = yield from self._all_of(mine, self._settle_s)
        done = yield Add(self._key("done"), 1)
        if done == _COLLECTORS or (yield Read(self._key("second"))) is None:
            yield from self.remove()
        return bundles

    def _is_second(self, name: bytes) -> Steps[bool]:
        return bool((yield CompareSet(self._key("second"), b"", name)) == name)

    def collect(self, mine: Collection[int], wait_s: float) -> Steps[list[bytes]]:
        """Return and remove all bundles; wait so long for those of ranks that have posted none."""
        bundles = yield from self._all_of(mine, wait_s)
        yield from self.remove()
        return bundles

    def _all_of(self, mine: Collection[int], wait_s: float) -> Steps[list[bytes]]:
        known, until = set(mine), (yield Now()) + wait_s
        bundles: list[bytes] = yield from self.fresh(known, mine)
        while len(known) < self._world_size and (yield Now()) < until:
            yield Sleep(_POLL_S)
            bundles += yield from self.fresh(known, mine)
        return bundles
