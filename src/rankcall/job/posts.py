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
from rankcall.whole_numbers import whole_number

ENDED = "ended"  # the prefix of ranks that end; that of a verdict is its id
_MOST_POSTS = 1 << 14  # a node posts its bundles once for a verdict, and once at its end
PART_BYTES = 1 << 18  # far below the 8 MiB at which a TCPStore closes the connection
SETTLE_S = 6.0  # how long a collector waits for the bundles of all ranks
_POLL_S = 0.05
_MOST_PARTS = 1 << 10  # that a header may announce: it may come from any process
_COLLECTORS = 2  # rank 0's node, and one more in case rank 0's is the one that is lost


class Posts:
    """The bundles below one prefix, as one process sees them."""

    def __init__(self, prefix: str, settle_s: float = SETTLE_S) -> None:
        self._prefix = prefix
        self._settle_s = settle_s
        self._read: set[int] = set()

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
        posts = whole_number((yield Read(self._key("posts")))) or 0
        # Any process may have raised the counter; a list up to it took gigabytes.
        last = min(posts, _MOST_POSTS)
        for number in [
            post_number for post_number in range(1, last + 1) if post_number not in self._read
        ]:
            raw = yield Read(self._key(str(number)))
            header = _decoded(raw) if raw is not None else None
            if header is None:
                continue  # it is still being written, or was given up
            self._read.add(number)
            ranks, count = header
            known.update(ranks)
            if count and not set(ranks) <= set(skipped):
                parts = []
                for index in range(count):
                    parts.append((yield Read(self._key(f"{number}/{index}"))) or b"")
                bundles.append(b"".join(parts))
        return bundles

    def remove(self) -> Steps[None]:
        """Remove the bundles that this process has read."""
        for number in sorted(self._read):
            header = _decoded((yield Read(self._key(str(number)))) or b"")
            yield Delete(self._key(str(number)))
            for index in range(header[1] if header else 0):
                yield Delete(self._key(f"{number}/{index}"))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def exchange(
        self, mine: Collection[int], bundle: bytes, world_size: int, name: str
    ) -> Steps[list[bytes]]:
        """Send this node's bundle; return those of the other nodes if this node collects them.

        Args:
            mine: The ranks of this node.
            bundle: Their bundle; empty if this node need not send any, nor collect.
            world_size: The number of ranks of the job.
            name: A name of this node that no other node has.
        """
        yield from self.post(mine, bundle)
        if 0 not in mine and not (bundle and (yield from self._is_second(name.encode()))):
            return []
        bundles = yield from self._all_of(mine, world_size, self._settle_s)
        done = yield Add(self._key("done"), 1)
        if done == _COLLECTORS or (yield Read(self._key("second"))) is None:
            yield from self.remove()
        return bundles

    def _is_second(self, name: bytes) -> Steps[bool]:
        return bool((yield CompareSet(self._key("second"), b"", name)) == name)

    def collect(self, mine: Collection[int], world_size: int, wait_s: float) -> Steps[list[bytes]]:
        """Return and remove all bundles; wait so long for those of ranks that have posted none."""
        bundles = yield from self._all_of(mine, world_size, wait_s)
        yield from self.remove()
        return bundles

    def _all_of(self, mine: Collection[int], world_size: int, wait_s: float) -> Steps[list[bytes]]:
        known, until = set(mine), (yield Now()) + wait_s
        bundles: list[bytes] = yield from self.fresh(known, mine)
        while len(known) < world_size and (yield Now()) < until:
            yield Sleep(_POLL_S)
            bundles += yield from self.fresh(known, mine)
        return bundles


def _decoded(raw: bytes) -> tuple[Sequence[int], int] | None:
    """Return the ranks and the number of parts of a bundle; None if that is damaged."""
    try:
        header = json.loads(raw)
        ranks, parts = [int(rank) for rank in header["ranks"]], int(header["parts"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    return (ranks, parts) if 0 <= parts <= _MOST_PARTS else None
